"""From what is asked to a matcher at the beginning of its grammar, or to a line that says why not.

Runs in the process of a grammar, in a thread with a stack for it: the grammar engine recurses as
deep as a grammar is long.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from tokenspeed.constraint import StructuredOutputs, ToolCalls
from tokenspeed.request import InvalidRequest
from tokenspeed.structured.narrow import narrow
from tokenspeed.structured.schema import locate, mend, parse_schema
from tokenspeed.structured.tokens import TokenTable
from tokenspeed.structured.tools import tool_call_grammar

MAX_GRAMMAR_TEXT = 64 << 10
"""Characters of a Lark or GBNF grammar, and of a regular expression."""
MAX_GBNF_RULES = 500
_WHITE_SPACE = r"[ \t\n\r]{1,40}"
"""Between two tokens of JSON at most this much: a weak model would go on with it for ever."""
_REHEARSED = 4
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""A state takes one or two kilobytes, and a grammar keeps those it came by."""


def compile_grammar(
    asked: StructuredOutputs, table: TokenTable, *, any_whitespace: bool
) -> LLMatcher:
    """Raises InvalidRequest."""
    compiler = _Compiler(table, any_whitespace)
    if asked.tool_calls is not None:
        return compiler.tool_calls(asked.tool_calls)
    if asked.kind == "json":
        return compiler.schema(asked.text)
    if asked.kind != "choice" and len(asked.text) > MAX_GRAMMAR_TEXT:
        raise InvalidRequest(
            f"the {asked.kind} has {len(asked.text)} characters; at most {MAX_GRAMMAR_TEXT} are "
            "taken"
        )
    if asked.kind == "regex":
        return compiler.grammar("regex", LLMatcher.grammar_from_regex(asked.text))
    lark = _choice(asked.choice) if asked.choice is not None else _lark(asked.text)
    return compiler.grammar(asked.kind, LLMatcher.grammar_from_lark(lark))


class _Compiler:
    def __init__(self, table: TokenTable, any_whitespace: bool) -> None:
        self._table = table
        self._any_whitespace = any_whitespace

    def grammar(self, kind: str, grammar: str) -> LLMatcher:
        matcher, error = _begin(grammar, self._table.tokens)
        if error:
            raise InvalidRequest(f"the {kind} cannot be used: {plain(error)}")
        return matcher

    def schema(self, text: str) -> LLMatcher:
        return self._schema(_narrowed(text), "")

    def _schema(self, schema: dict[str, Any], owner: str) -> LLMatcher:
        """`owner` is whose schema it is."""
        matcher, error = self._begin(mend(schema, _is_dead))
        if error:
            path, error = locate(schema, error, lambda part: self._begin(part)[1])
            where = f"{owner}at {path[:200]}"
            raise InvalidRequest(f"the JSON schema cannot be used, {where}: {plain(error)}")
        return matcher

    def tool_calls(self, asked: ToolCalls) -> LLMatcher:
        def arguments(name: str, text: str) -> str:
            schema = _narrowed(text or '{"type":"object"}', closes=True)
            self._schema(schema, f"in tool {name}, ")
            options = _with_options(mend(schema, _is_dead), self._any_whitespace)
            return f"%json {json.dumps(options)}"

        lark = tool_call_grammar(asked, self._table.special, arguments)
        return self.grammar("tool calls", LLMatcher.grammar_from_lark(lark))

    def _begin(self, schema: Any) -> tuple[LLMatcher, str]:
        return _begin(_json_grammar(schema, self._any_whitespace), self._table.tokens)


def _narrowed(text: str, *, closes: bool = False) -> dict[str, Any]:
    schema: dict[str, Any] = parse_schema(text)
    narrow(schema, closes=closes)
    return schema


def _json_grammar(schema: dict[str, Any], any_whitespace: bool) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_with_options(schema, any_whitespace)))


def _with_options(schema: dict[str, Any], any_whitespace: bool) -> dict[str, Any]:
    """The schema with the grammar engine's options, whatever it says of them itself."""
    white = {"whitespace_pattern": _WHITE_SPACE} if any_whitespace else {}
    return schema | {"x-guidance": {"whitespace_flexible": any_whitespace, **white}}


def _is_dead(names: list[str], pattern: str) -> bool:
    """Does `pattern` match no name beside `names`? Asked of the grammar engine: an object that has
    all these already is brought to where the next name begins.
    """
    probe = {
        "type": "object",
        "properties": {name: {"const": 0} for name in names},
        "patternProperties": {pattern: {}},
        "additionalProperties": False,
    }
    matcher = LLMatcher(_bytes(), _json_grammar(probe, False), log_level=0, limits=_LIMITS)
    written = "".join(f"{json.dumps(name, ensure_ascii=False)}:0," for name in names)
    taken = matcher.try_consume_tokens([*f"{{{written}".encode()])
    if matcher.is_error() or taken < len(written.encode()) + 1:
        return False  # no such pattern, or names that it forbids: the whole schema will tell
    matcher.compute_bitmask()
    return matcher.is_error()


@functools.cache
def _bytes() -> LLTokenizer:
    """A vocabulary of single bytes."""
    return LLTokenizer("byte")


def _begin(grammar: str, table: LLTokenizer) -> tuple[LLMatcher, str]:
    """A matcher at the beginning, and its error, "" without one. An output is rehearsed for a few
    tokens, which finds grammars that compile but are too large to be followed.
    """
    matcher = LLMatcher(table, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        return matcher, matcher.get_error()
    rehearsal = matcher.deep_copy()
    for _ in range(_REHEARSED):
        mask = int.from_bytes(rehearsal.compute_bitmask(), "little")
        lowest = (mask & -mask).bit_length() - 1
        if rehearsal.is_error() or lowest in table.eos_tokens:
            break
        rehearsal.consume_token(lowest)
    return matcher, rehearsal.get_error()


def _choice(texts: tuple[str, ...]) -> str:
    """One terminal: as a rule, thousands of alternatives would all be parsed at once."""
    quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return f"start: CHOICE\nCHOICE: {quoted}"


def _lark(text: str) -> str:
    """GBNF (`root ::= ...`) is translated."""
    if "::=" not in text:
        return text
    if text.count("::=") > MAX_GBNF_RULES:
        raise InvalidRequest(f"a GBNF grammar has at most {MAX_GBNF_RULES} rules; write it in Lark")
    try:
        return any_to_lark(text)
    except RecursionError:
        raise InvalidRequest("the GBNF grammar is nested too deeply") from None
    except Exception as error:  # the translator raises bare Exception too
        raise InvalidRequest(f"the GBNF grammar cannot be used: {plain(str(error))}") from None


def plain(error: str) -> str:
    """The engine's many lines as one: what is wrong, without a copy of the grammar."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["no reason given"]
    if lines[0].startswith("panic"):
        return "it is too large for the grammar engine"
    if lines[0] == "NoExtensionBias":
        return "no output can satisfy it"
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (causes or lines)[0][:300]
