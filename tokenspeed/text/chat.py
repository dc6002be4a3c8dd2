"""Messages to a prompt, by the model's own chat template, as transformers renders it.

Rendering is plain Python of the template's making and has no time limit of its own: a server calls
`render` off its event loop and with a deadline. Only the first try, while loading, has one here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jinja2

from tokenspeed.log import logger
from tokenspeed.request import InvalidRequest
from tokenspeed.text.errors import ModelError
from tokenspeed.text.messages import normalize_messages
from tokenspeed.text.template_file import SHIPPED
from tokenspeed.text.template_sandbox import Sandbox, render_capped, undeclared_names

PROBE_S = 10.0
"""A template that takes longer for one line will not serve anybody."""
_OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_PROBE = "probe-7f3a"
# Where the final message ends. If the space behind it is gone, the template trims its contents.
_CONTINUE_MARK = "<|continue-here-7f3a|> "


class ChatTemplate:
    """One model's chat template, compiled and tried out once.

    `special_tokens` are the names a template may use ("bos_token": "<s>", ...). With no template
    (a base model) every `render` is refused with the way out.
    """

    def __init__(self, template: str | None, special_tokens: dict[str, str] | None = None) -> None:
        self.source = template or ""
        self._special_tokens = dict(special_tokens or {})
        self._template: jinja2.Template | None = None
        self._names: frozenset[str] = frozenset()
        if template is None:
            return
        try:
            self._template = Sandbox().from_string(template)
            names = undeclared_names(template)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template is broken at line {error.lineno}: {error.message}; give "
                "another with --chat-template FILE"
            ) from None
        except RecursionError:
            raise ModelError("the chat template is nested too deeply to be compiled") from None
        self._names = frozenset(names)
        self._allowed = names - _OWN_NAMES - frozenset(self._special_tokens)
        self._knows_tools, self._knows_calls = "tools" in names, "tool_calls" in template
        self._knows_developer = "developer" in template
        self._wants_parts = self._wants_text_arguments = self._wants_no_content = False
        _within(PROBE_S, self._probe)

    def reads(self, name: str) -> bool:
        """Whether the template looks at a variable of this name."""
        return name in self._names

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text; special tokens are in it, so it is tokenized without adding any.

        `continue_final_message` ends the prompt inside the last message. `kwargs` reach the
        template as variables; only names it reads are taken.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template FILE",
                "messages",
            )
        if tools and not self._knows_tools:
            raise _no_place("tools", "tools")
        chat = normalize_messages(messages, knows_developer=self._knows_developer)
        if not self._knows_calls and any(message.get("tool_calls") for message in chat):
            raise _no_place("tool calls", "messages")
        if continue_final_message:
            _mark_final(chat, add_generation_prompt)
        text = self._run(chat, add_generation_prompt, tools or None, self._check(kwargs or {}))
        return _cut_at_mark(text) if continue_final_message else text

    def _check(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Only names the template reads, and never one of ours, so nothing can be replaced."""
        for name in kwargs:
            if name not in self._allowed:
                known = ", ".join(sorted(self._allowed)) or "nothing"
                raise InvalidRequest(
                    f"chat_template_kwargs: this model's chat template does not read {name[:60]!r} "
                    f"(but {known})",
                    "chat_template_kwargs",
                    "unsupported_parameter",
                )
        return kwargs

    def _run(
        self,
        chat: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> str:
        assert self._template is not None
        if self._wants_parts:
            chat = [_as_parts(message) for message in chat]
        text, none = self._wants_text_arguments, self._wants_no_content
        chat = [_with_calls(message, text, none) for message in chat]
        variables = {
            **kwargs,
            **self._special_tokens,
            "messages": chat,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render_capped(self._template, variables)
        except Exception as error:  # the template is a stranger's program: it may raise anything
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise InvalidRequest(
                f"the chat template does not take these messages: {reason}", "messages"
            ) from None

    def _probe(self) -> None:
        """Try short chats: whether contents reach the prompt only as lists of parts, and calls only
        with their arguments as text, or in messages whose content is none.
        """
        chat: list[dict[str, Any]] = [{"role": "user", "content": _PROBE}]
        if not self._renders(chat):
            self._wants_parts = True
            if not self._renders(chat):
                self._wants_parts = False
                logger.warning(
                    "the chat template does not render a one-line user message, so chat requests "
                    "may fail; --chat-template FILE gives another"
                )
        call = {"name": "probe", "arguments": {"probe": _PROBE}}
        calls = [{"id": "call_0", "type": "function", "function": call}]
        chat = [{"role": "user", "content": "-"}]
        chat += [{"role": "assistant", "content": "", "tool_calls": calls}]
        if not self._knows_calls:
            return
        for style in ((False, False), (True, False), (False, True), (True, True), (False, False)):
            self._wants_text_arguments, self._wants_no_content = style
            if self._renders(chat):
                return

    def _renders(self, chat: list[dict[str, Any]]) -> bool:
        """Whether the probe's word reaches the prompt."""
        try:
            return _PROBE in self._run(chat, True, None, {})
        except InvalidRequest:
            return False


def _no_place(what: str, param: str) -> InvalidRequest:
    shipped = " or ".join(SHIPPED)
    return InvalidRequest(
        f"this model's chat template has no place for {what}; --chat-template {shipped} is one for "
        "models that speak ChatML (<|im_start|>), and takes a file of yours as well",
        param,
        "unsupported_parameter",
    )


def _within(seconds: float, probe: Callable[[], None]) -> None:
    """Run it; ModelError if it does not end in time. Python cannot stop the thread, which is a
    daemon: it does not hold up the end of the process either.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            probe()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="template-probe", daemon=True).start()
    try:
        future.result(seconds)
    except TimeoutError:
        raise ModelError(
            f"the chat template does not render a one-line message within {seconds:g} s; give "
            "another with --chat-template FILE"
        ) from None


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_calls(message: dict[str, Any], wants_text: bool, wants_none: bool) -> dict[str, Any]:
    """A message with calls in the template's style: arguments as JSON text, spaced as models write
    it, and None for a content that is empty.
    """
    if not message.get("tool_calls"):
        return message
    calls = message["tool_calls"]
    if wants_text:
        calls = [{**call, "function": _as_text(call["function"])} for call in calls]
    content = None if wants_none and not message["content"] else message["content"]
    return {**message, "content": content, "tool_calls": calls}


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def _mark_final(chat: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    if chat[-1]["role"] != "assistant" or not chat[-1]["content"]:
        raise InvalidRequest(
            "continue_final_message needs an assistant message with content at the end",
            "continue_final_message",
        )
    chat[-1]["content"] += _CONTINUE_MARK


def _cut_at_mark(text: str) -> str:
    head, mark, tail = text.rpartition(_CONTINUE_MARK.rstrip())
    if not mark:
        raise InvalidRequest(
            "the chat template drops the final message, so it cannot be continued",
            "continue_final_message",
        )
    return head if tail.startswith(" ") else head.rstrip()
