"""The tools of a chat and the choice among them, as clients of the OpenAI API write both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.request import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """`schemas` are the tools that may be called: name -> schema of the arguments. One of `forced`
    must be. Arguments of `strict` ones are held to their schema.
    """

    schemas: Mapping[str, Mapping[str, Any]]
    forced: tuple[str, ...] = ()
    strict: frozenset[str] = frozenset()


def check_tools(tools: list[Any] | None, choice: Any) -> ToolChoice:
    """What a chat says of its tools. Raises InvalidRequest."""
    schemas: dict[str, Mapping[str, Any]] = {}
    strict: set[str] = set()
    for index, tool in enumerate(tools or ()):
        at = f"tools[{index}]"
        name, schema = _check_tool(tool, at)
        if name in schemas:
            raise InvalidRequest(f"{at}: there are two tools with the name {name}", at)
        schemas[name] = schema
        if tool["function"].get("strict"):
            strict.add(name)
    forced = _check_choice(choice, schemas)
    if choice == "none":
        return ToolChoice(schemas={})
    return ToolChoice(schemas=schemas, forced=forced, strict=frozenset(strict))


def unsupported(param: str, why: str) -> InvalidRequest:
    """Something that is known, but that this model cannot do: refused, never dropped."""
    return InvalidRequest(f"{param} is not supported: {why}", param, "unsupported_parameter")


def _check_tool(tool: Any, at: str) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise InvalidRequest(
            f'{at} must be {{"type": "function", "function": {{"name": ...}}}}', at
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{at}.function.name has 1 to 128 letters, digits and . _ -", f"{at}.function.name"
        )
    if not isinstance(function.get("description") or "", str):
        raise InvalidRequest(
            f"{at}.function.description must be text", f"{at}.function.description"
        )
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, dict):
        raise InvalidRequest(
            f"{at}.function.parameters must be a JSON schema", f"{at}.function.parameters"
        )
    if not isinstance(function.get("strict") or False, bool):
        raise InvalidRequest(f"{at}.function.strict must be true or false", f"{at}.function.strict")
    return name, schema or {}


def _check_choice(choice: Any, schemas: Mapping[str, Any]) -> tuple[str, ...]:
    """The tools of which one must be called."""
    if choice in (None, "none", "auto"):
        return ()
    if not schemas:
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    if choice == "required":
        return tuple(schemas)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        raise unsupported("tool_choice", "send only the tools that are allowed")
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise InvalidRequest(
            'tool_choice must be "none", "auto", "required" or name a function', "tool_choice"
        )
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in schemas:
        raise InvalidRequest("tool_choice names a function that is not in tools", "tool_choice")
    return (name,)
