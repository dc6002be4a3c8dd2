"""What a chat asks of its answer: its parts, the form it is held to, what its template is told.

Server and `LLM` make the same plan, so that the same chat gets the same answer from both.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.config import OutputConfig
from tokenspeed.constraint import StructuredOutputs, ToolCalls
from tokenspeed.parsers import harmony
from tokenspeed.parsers.json_calls import HERMES
from tokenspeed.parsers.parser import OutputFormat, OutputParser
from tokenspeed.parsers.tables import AUTO, choose_parsers, output_format
from tokenspeed.parsers.tools import ToolChoice, check_tools, unsupported
from tokenspeed.request import InvalidRequest
from tokenspeed.text.chat import ChatTemplate
from tokenspeed.text.messages import content_text
from tokenspeed.text.text_side import TextSide
from tokenspeed.text.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch reasoning on and off."""

_NO_ARGUMENTS = {"type": "object", "properties": {}}


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A chat, with what there is to say of its answer; names and meanings as in OpenAI's API and
    vLLM's.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    separate_reasoning: bool = True
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ChatPlan:
    """What is settled before the prompt is made. `schemas` are the tools that may be called: none,
    and marks of calls are nothing special. `demand` is what the choice of tools asks of the output.
    """

    chat: Chat
    form: OutputFormat
    schemas: Mapping[str, Mapping[str, Any]]
    demand: StructuredOutputs | None
    kwargs: dict[str, Any]

    def render(self, text: TextSide) -> tuple[str, list[int]]:
        """The prompt and its ids. Raises InvalidRequest."""
        chat = self.chat
        return text.chat_prompt(
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tools=chat.tools if self.schemas else None,
            kwargs=self.kwargs,
            add_special_tokens=chat.add_special_tokens,
        )

    def held_to(self, asked: StructuredOutputs | None) -> StructuredOutputs | None:
        """What the whole output has to be: the form that was `asked` for, or calls. Raises
        InvalidRequest where it would be both.
        """
        if asked is not None and self.demand is not None:
            raise InvalidRequest(
                "a demanded form leaves no room for forced or strict tool calls; send one of them",
                "tools",
            )
        return asked or self.demand

    def start(
        self, prompt: str, held: StructuredOutputs | None, tokenizer: Tokenizer
    ) -> tuple[StructuredOutputs | None, bool]:
        """Where an answer to `prompt` begins: `held`, behind reasoning if the prompt has opened
        some, and whether the answer begins inside it. Where no token ends it, the form begins at
        once, and is no reasoning.
        """
        is_open = self._is_open(prompt)
        if held is None or not is_open or held.reasoning_end:
            return held, is_open
        mark = self.form.thinking.close if self.form.thinking else ""
        ids = tuple(tokenizer.encode(mark, add_special_tokens=False))
        if len(ids) != 1:
            return held, False
        return msgspec.structs.replace(held, reasoning_end=ids), True

    def _is_open(self, prompt: str) -> bool:
        if self.form.thinking and self.chat.continue_final_message:
            final = content_text(self.chat.messages[-1].get("content") or "", "messages")
            return self.form.thinking.goes_on(final)
        return self.form.is_open(prompt)

    def parser(self, is_open: bool) -> Callable[[], OutputParser] | None:
        """What takes the text of an answer apart; None: nothing is to be done."""
        form, schemas = self.form, self.schemas
        if not (form.thinking or form.tools or form.is_harmony):
            return None
        calls = self.demand.tool_calls if self.demand else None
        only_calls = calls is not None and calls.required
        return lambda: OutputParser(form, is_open=is_open, schemas=schemas, only_calls=only_calls)


def parser_names(
    config: OutputConfig, text: TextSide, template: ChatTemplate | None = None
) -> tuple[str, str]:
    """The parsers of answers to what `template` (the model's own, if none is given) renders."""
    return choose_parsers(
        config.reasoning_parser,
        config.tool_call_parser,
        model_type=text.model_type,
        template=(template or text.template).source,
    )


def plan_chat(config: OutputConfig, text: TextSide, chat: Chat) -> ChatPlan:
    """Raises InvalidRequest for tools and reasoning that this model cannot be asked for."""
    choice = check_tools(chat.tools, chat.tool_choice)
    template = text.template_for(chat.messages, chat.tools if choice.schemas else None)
    form = output_format(*parser_names(config, text, template))
    reasons = form.thinking is not None or form.is_harmony
    if not chat.separate_reasoning:
        if form.is_harmony:
            raise unsupported("separate_reasoning", "the messages of gpt-oss are no one text")
        form = dataclasses.replace(form, thinking=None)
    is_unknown = form.tools is None and not form.is_harmony and config.tool_call_parser == AUTO
    if choice.schemas and not choice.forced and is_unknown and template.reads("tools"):
        raise unsupported(
            "tools",
            "the chat template shows no call format known here: --tool-call-parser names it",
        )
    if choice.forced and not form.is_harmony and not (form.tools and form.tools.spelling):
        form = dataclasses.replace(form, tools=HERMES)  # a form that any model can be held to
    if not choice.schemas:
        form = dataclasses.replace(form, tools=None)
    return ChatPlan(
        chat=chat,
        form=form,
        schemas=choice.schemas,
        demand=_demand(form, choice, chat),
        kwargs=_kwargs(template, chat, reasons=reasons),
    )


def _demand(form: OutputFormat, choice: ToolChoice, chat: Chat) -> StructuredOutputs | None:
    """Nothing but calls, where one is forced; no call that breaks a schema, where it is strict.
    Raises InvalidRequest.
    """
    if not (choice.forced or choice.strict):
        return None
    spelling = form.tools.spelling if form.tools else None
    if form.is_harmony and choice.forced:
        spelling = harmony.SPELLING
    if spelling is None:
        raise unsupported(
            "tools", "arguments in this model's call format cannot be held to a schema: strict"
        )
    names = choice.forced or choice.schemas
    is_one = bool(choice.forced) and chat.tool_choice != "required"  # a function is named
    calls = ToolCalls(
        format=spelling,
        tools=tuple((name, _schema(choice, name)) for name in names),
        required=bool(choice.forced),
        parallel=chat.parallel_tool_calls and not (is_one or form.is_harmony),
    )
    try:
        return StructuredOutputs(tool_calls=calls)
    except ValueError as error:  # such as schemas that are too large
        raise InvalidRequest(f"tools cannot be held to their schemas: {error}", "tools") from None


def _schema(choice: ToolChoice, name: str) -> str:
    """As text; "" for any object. The arguments of a forced call are always held to it. A function
    without one takes none.
    """
    is_held = bool(choice.forced) or name in choice.strict
    return json.dumps(choice.schemas[name] or _NO_ARGUMENTS) if is_held else ""


def _kwargs(template: ChatTemplate, chat: Chat, *, reasons: bool) -> dict[str, Any]:
    """Variables for the template: those of the chat, and what `reasoning_effort` means to it.

    Clients send switches without knowing the model: where there is nothing to switch, one that asks
    for what is so anyway is met. What is left and the template does not read, it refuses.
    """
    switches = [name for name in _SWITCHES if template.reads(name)]
    given = dict(chat.chat_template_kwargs)
    for name in (*_SWITCHES, "reasoning_effort"):
        value = given.get(name)
        is_so = value is None or (value in (False, "none")) != reasons
        if name in given and is_so and not (switches or template.reads(name)):
            del given[name]
    effort = chat.reasoning_effort
    if effort is None:
        return given
    if effort not in EFFORTS:
        raise InvalidRequest(f"reasoning_effort is one of {', '.join(EFFORTS)}", "reasoning_effort")
    if template.reads("reasoning_effort"):
        return {"reasoning_effort": effort} | given
    if not switches and (reasons or effort != "none"):
        raise unsupported("reasoning_effort", "this model's chat template has no reasoning levels")
    return dict.fromkeys(switches, effort != "none") | given
