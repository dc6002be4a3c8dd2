"""From a chat request to its prompt, and to what its answers will be made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.config import ServerConfig
from tokenspeed.parsers.parser import OutputFormat, OutputParser
from tokenspeed.parsers.tables import AUTO, choose_parsers, output_format
from tokenspeed.server.errors import bad_request, unsupported
from tokenspeed.server.protocol_chat import ChatRequest
from tokenspeed.server.protocol_tools import check_tools
from tokenspeed.text.chat import ChatTemplate
from tokenspeed.text.messages import content_text
from tokenspeed.text.text_side import TextSide
from tokenspeed.text.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch reasoning on and off."""


@dataclass(frozen=True, kw_only=True)
class ChatPlan:
    """What is settled before the prompt is made. `schemas` are the tools that may be called: none,
    and marks of calls are nothing special.
    """

    form: OutputFormat
    schemas: Mapping[str, Mapping[str, Any]]
    kwargs: dict[str, Any]

    def render(self, template: ChatTemplate, request: ChatRequest) -> str:
        """The prompt's text. Raises InvalidRequest."""
        continues, adds_prompt = request.continue_final_message, request.add_generation_prompt
        return template.render(
            request.messages,
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=bool(continues),
            tools=request.tools if self.schemas else None,
            kwargs=self.kwargs,
        )

    def is_open(self, request: ChatRequest, prompt: str) -> bool:
        """Whether an answer to `prompt` begins inside reasoning."""
        if self.form.thinking and request.continue_final_message:
            final = content_text(request.messages[-1].get("content") or "", "messages")
            return self.form.thinking.goes_on(final)
        return self.form.is_open(prompt)

    def parser(self, is_open: bool) -> Callable[[], OutputParser] | None:
        """What takes the text of an answer apart; None: nothing is to be done."""
        form, schemas = self.form, self.schemas
        if not (form.thinking or form.tools or form.is_harmony):
            return None
        return lambda: OutputParser(form, is_open=is_open, schemas=schemas)

    def end_of_reasoning(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The token that ends reasoning; none where its mark is no token of its own."""
        mark = self.form.thinking.close if self.form.thinking else ""
        ids = tokenizer.encode(mark, add_special_tokens=False)
        return tuple(ids) if len(ids) == 1 else ()


def plan_chat(config: ServerConfig, text: TextSide, request: ChatRequest) -> ChatPlan:
    """Raises APIError for tools and reasoning that this model cannot be asked for."""
    reasoning, tools = choose_parsers(
        config.reasoning_parser,
        config.tool_call_parser,
        model_type=text.model_type,
        template=text.template.source,
    )
    form = output_format(reasoning, tools)
    schemas = check_tools(request.tools, request.tool_choice)
    is_unknown = form.tools is None and not form.is_harmony and config.tool_call_parser == AUTO
    if schemas and is_unknown and text.template.reads("tools"):
        raise unsupported(
            "tools",
            "the chat template shows no call format known here: --tool-call-parser names it",
        )
    if not schemas:
        form = dataclasses.replace(form, tools=None)
    return ChatPlan(form=form, schemas=schemas, kwargs=_kwargs(text.template, form, request))


def _kwargs(template: ChatTemplate, form: OutputFormat, request: ChatRequest) -> dict[str, Any]:
    """Variables for the template: those of the request, and what `reasoning_effort` means to it."""
    given: dict[str, Any] = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is None:
        return given
    if effort not in EFFORTS:
        raise bad_request(f"reasoning_effort is one of {', '.join(EFFORTS)}", "reasoning_effort")
    if template.reads("reasoning_effort"):
        return {"reasoning_effort": effort} | given
    switches = [name for name in _SWITCHES if template.reads(name)]
    reasons = form.thinking is not None or form.is_harmony
    if not switches and (reasons or effort != "none"):
        raise unsupported("reasoning_effort", "this model's chat template has no reasoning levels")
    return dict.fromkeys(switches, effort != "none") | given
