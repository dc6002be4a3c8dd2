"""From a chat request to its prompt, and to what its answers will be made of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.constraint import StructuredOutputs, ToolCalls
from tokenspeed.parsers import harmony
from tokenspeed.parsers.json_calls import HERMES
from tokenspeed.parsers.parser import OutputFormat, OutputParser
from tokenspeed.parsers.tables import AUTO, choose_parsers, output_format
from tokenspeed.server.errors import bad_request, unsupported
from tokenspeed.server.protocol_chat import ChatRequest
from tokenspeed.server.protocol_tools import ToolChoice, check_tools
from tokenspeed.server_config import ServerConfig
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
    and marks of calls are nothing special. `demand` is what the choice of tools asks of the output.
    """

    form: OutputFormat
    schemas: Mapping[str, Mapping[str, Any]]
    demand: StructuredOutputs | None
    kwargs: dict[str, Any]

    def render(self, text: TextSide, request: ChatRequest) -> tuple[str, list[int]]:
        """The prompt and its ids. Raises InvalidRequest."""
        continues, adds_prompt = request.continue_final_message, request.add_generation_prompt
        return text.chat_prompt(
            request.messages,
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=bool(continues),
            tools=request.tools if self.schemas else None,
            kwargs=self.kwargs,
            add_special_tokens=bool(request.add_special_tokens),
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
    if request.separate_reasoning is False:
        if form.is_harmony:
            raise unsupported("separate_reasoning", "the messages of gpt-oss are no one text")
        form = dataclasses.replace(form, thinking=None)
    choice = check_tools(request.tools, request.tool_choice)
    is_unknown = form.tools is None and not form.is_harmony and config.tool_call_parser == AUTO
    if choice.schemas and not choice.forced and is_unknown and text.template.reads("tools"):
        raise unsupported(
            "tools",
            "the chat template shows no call format known here: --tool-call-parser names it",
        )
    if choice.forced and not form.is_harmony and not (form.tools and form.tools.spelling):
        form = dataclasses.replace(form, tools=HERMES)  # a form that any model can be held to
    if not choice.schemas:
        form = dataclasses.replace(form, tools=None)
    return ChatPlan(
        form=form,
        schemas=choice.schemas,
        demand=_demand(form, choice, request),
        kwargs=_kwargs(text.template, form, request),
    )


def _demand(
    form: OutputFormat, choice: ToolChoice, request: ChatRequest
) -> StructuredOutputs | None:
    """Nothing but calls, where one is forced; no call that breaks a schema, where it is strict."""
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
    is_one = bool(choice.forced) and request.tool_choice != "required"  # a function is named
    calls = ToolCalls(
        format=spelling,
        tools=tuple((name, _schema(choice, name)) for name in names),
        required=bool(choice.forced),
        parallel=not (is_one or form.is_harmony or request.parallel_tool_calls is False),
    )
    return StructuredOutputs(tool_calls=calls)


def _schema(choice: ToolChoice, name: str) -> str:
    """As text; "" for any object. The arguments of a forced call are always held to it."""
    is_held = bool(choice.forced) or name in choice.strict
    return json.dumps(choice.schemas[name]) if is_held and choice.schemas[name] else ""


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
