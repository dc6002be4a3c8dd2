"""The many fields that demand a form of the output, as the one that the engine knows.

OpenAI: `response_format`. vLLM: `structured_outputs`, and before it `guided_*`. SGLang:
`json_schema`, `regex`, `ebnf`. A request has at most one of them. What they hold is compiled before
anything is generated, so that a client hears of an unusable schema with a 400.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.server.errors import bad_request, overloaded
from tokenspeed.structured.pool import GrammarPool
from tokenspeed.wording import type_error

MAX_WAITING = 256
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05

FORMS = {
    "response_format": "",
    "structured_outputs": "",
    **{"guided_json": "json", "json_schema": "json"},
    **{"guided_regex": "regex", "regex": "regex"},
    "guided_choice": "choice",
    **{"guided_grammar": "grammar", "ebnf": "grammar"},
}
"""The fields; and what those demand that hold one kind of form."""


def structured_outputs(fields: Mapping[str, Any]) -> StructuredOutputs | None:
    """What the fields of `FORMS` among `fields` demand; None if nothing. Raises APIError naming the
    field.
    """
    given: dict[str, StructuredOutputs] = {}
    for name, value in fields.items():
        try:
            asked = None if value is None else _convert(name, value)
        except msgspec.ValidationError as error:
            what = str(error).partition(" - at ")[0] if FORMS[name] else str(error)
            raise bad_request(type_error(what, name), name) from None
        except ValueError as error:
            raise bad_request(f"{name}: {error}", name) from None
        if asked is not None:
            given[name] = asked
    if len(given) > 1:
        names = [*given]
        raise bad_request(f"{' and '.join(names)} each demand a form; send one of them", names[1])
    return next(iter(given.values()), None)


def _convert(name: str, value: Any) -> StructuredOutputs | None:
    if name == "response_format":
        return _response_format(value)
    fields = {FORMS[name]: value} if FORMS[name] else value
    asked = msgspec.convert(fields, StructuredOutputs)
    if asked.tool_calls is not None:
        raise ValueError("tool_calls are demanded with tool_choice")
    if asked.reasoning_end:
        raise ValueError("reasoning_end follows from the model's way of reasoning (chat)")
    return asked


def _response_format(value: Any) -> StructuredOutputs | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise ValueError(f"type must be one of {', '.join(_RESPONSE_TYPES)}")
    wrapper = value.get("json_schema")
    if not isinstance(wrapper, dict) or not isinstance(wrapper.get("schema"), dict | bool):
        raise ValueError(
            'the JSON schema is missing: send {"type": "json_schema", "json_schema": {"name": ..., '
            '"schema": {...}}}'
        )
    return StructuredOutputs(json=wrapper["schema"])


_RESPONSE_TYPES = ("text", "json_object", "json_schema")


async def check_grammar(
    pool: GrammarPool, fields: Mapping[str, Any], asked: StructuredOutputs | None
) -> None:
    """Wait until what the fields demand has been compiled. Raises APIError naming the field. What
    nobody waits for any more is not compiled any further.
    """
    if asked is None:
        return
    demanding = (name for name, value in fields.items() if structured_outputs({name: value}))
    name = next(demanding, "tools")  # which have no field of their own for it
    if pool.num_waiting >= MAX_WAITING:
        raise overloaded("Too many grammars wait to be compiled. Retry later.")
    grammar, pause_s = pool.get(asked), _FIRST_PAUSE_S
    grammar.num_waiting += 1
    try:
        while not grammar.is_settled:
            pool.poll(grammar)
            await asyncio.sleep(pause_s)
            pause_s = min(1.3 * pause_s, _LAST_PAUSE_S)
    finally:
        grammar.num_waiting -= 1
        if not grammar.num_waiting:
            pool.release(grammar)
    if grammar.error is not None:
        raise bad_request(grammar.error, name)
