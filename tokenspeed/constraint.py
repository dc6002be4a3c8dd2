"""What a request may demand of the form of its output: data only, which `structured` understands.

`StructuredOutputs` travels with the sampling parameters. `ToolCallFormat` says how a model family
spells tool calls, as data that grammars are built from. `Constraint` is what the engine holds for a
sequence under a grammar.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

MAX_GRAMMAR_CHARS = 128 << 10
MAX_CHOICES = 10_000
MAX_REASONING_END = 16

Kind = Literal["json", "regex", "choice", "grammar", "tool_calls"]

NAME, ARGUMENTS, NUMBER = "\0name", "\0arguments", "\0number"
_TOOL_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


class ToolCallFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a list of tool calls is spelled: `begin`, calls with `separator` between them, `end`.

    `call` is text, in which NAME stands for the function's name, ARGUMENTS for its arguments as one
    JSON object, NUMBER for a number. Text may hold special tokens, which are then matched as
    tokens, not as text.
    """

    begin: str = ""
    call: tuple[str, ...]
    separator: str = ""
    end: str = ""


class ToolCalls(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Calls of `tools`: names with the JSON schema of their arguments as text, "" for any object.

    `required`: nothing but calls, at least one. Otherwise free text with calls in it, none of them
    malformed. Not `parallel`: one call at most where they are required, one at a time elsewhere.
    """

    format: ToolCallFormat
    tools: tuple[tuple[str, str], ...]
    required: bool = True
    parallel: bool = True

    def __post_init__(self) -> None:
        if not self.tools or not all(_TOOL_NAME.fullmatch(name) for name, _ in self.tools):
            raise ValueError("a tool's name has 1 to 128 letters, digits, dots, `-` and `_`")
        if ARGUMENTS not in self.format.call or self.format.call[0] in _FIELDS:
            raise ValueError("a call begins with text, and has arguments")


_FIELDS = (NAME, ARGUMENTS, NUMBER)


class StructuredOutputs(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Exactly one of a JSON schema (`json`: its text, or the value), any JSON object
    (`json_object`), a regular expression (of the whole output), a `choice` of texts, and a
    `grammar` (Lark, or GBNF), and `tool_calls`. ValueError for anything else.

    `disable_any_whitespace` writes JSON without white space between its tokens; None is the
    server's default. With `reasoning_end` the grammar begins behind the first such sequence of
    token ids in the output: what comes before is free, but does not end.
    """

    json: Any = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    tool_calls: ToolCalls | None = None
    disable_any_whitespace: bool | None = None
    reasoning_end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.json is not None and not isinstance(self.json, str):
            try:
                text = msgspec.json.encode(self.json).decode()
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"json is no JSON schema: {error}") from None
            msgspec.structs.force_setattr(self, "json", text)
        if self.choice is not None:
            choice: Sequence[str] = self.choice
            if isinstance(choice, str) or not all(isinstance(each, str) for each in choice):
                raise ValueError("choice is a list of texts")
            msgspec.structs.force_setattr(self, "choice", tuple(choice))
            if not 0 < len(choice) <= MAX_CHOICES:
                raise ValueError(f"choice takes 1 to {MAX_CHOICES} texts")
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"takes exactly one of {', '.join(_FORMS)}; got {' and '.join(given) or 'none'}"
            )
        size = len(self.text) if self.choice is None else sum(map(len, self.choice))
        if size > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"{given[0]} has {size} characters; at most {MAX_GRAMMAR_CHARS} are taken"
            )
        if not all(0 <= token < 1 << 31 for token in self.reasoning_end):
            raise ValueError("reasoning_end takes token ids")
        if len(self.reasoning_end) > MAX_REASONING_END:
            raise ValueError(f"reasoning_end takes at most {MAX_REASONING_END} token ids")

    @property
    def kind(self) -> Kind:
        if self.regex is not None:
            return "regex"
        if self.choice is not None:
            return "choice"
        if self.tool_calls is not None:
            return "tool_calls"
        return "json" if self.grammar is None else "grammar"

    @property
    def text(self) -> str:
        """The schema, regular expression or grammar; all else as JSON."""
        if self.choice is not None or self.tool_calls is not None:
            return msgspec.json.encode(self.choice or self.tool_calls).decode()
        if self.json_object:
            return '{"type":"object"}'
        given = (self.json, self.regex, self.grammar)
        text: str = next(each for each in given if each is not None)
        return text


_FORMS = ("json", "json_object", "regex", "choice", "grammar", "tool_calls")


class Constraint(Protocol):
    """The place of one sequence in its grammar; it moves with committed tokens only."""

    @property
    def error(self) -> str | None:
        """Why this sequence cannot go on."""

    def want(self, output_ids: Sequence[int]) -> None:
        """Have the mask of the token behind `output_ids` made, which begin with those wanted
        before.
        """
