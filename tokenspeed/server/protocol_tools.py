"""Tools of a chat request, with what is checked of them, and calls in its answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tokenspeed.server.errors import bad_request, unsupported

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NO_FORCE = "a call cannot be forced without structured output, which chat does not have yet"


class FunctionCall(msgspec.Struct, frozen=True):
    """`arguments` is JSON as text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The first of a call has its id and name, the later ones a piece of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


def check_tools(tools: list[Any] | None, choice: Any) -> dict[str, Mapping[str, Any]]:
    """The tools that may be called: name -> schema of the arguments. Raises APIError."""
    schemas: dict[str, Mapping[str, Any]] = {}
    if len(tools or ()) > MAX_TOOLS:
        raise bad_request(f"tools takes at most {MAX_TOOLS} entries", "tools")
    for index, tool in enumerate(tools or ()):
        at = f"tools[{index}]"
        name, schema = _check_tool(tool, at)
        if name in schemas:
            raise bad_request(f"{at}: there are two tools with the name {name}", at)
        schemas[name] = schema
    _check_choice(choice, schemas)
    return {} if choice == "none" else schemas


def _check_tool(tool: Any, at: str) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise bad_request(f'{at} must be {{"type": "function", "function": {{"name": ...}}}}', at)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"{at}.function.name has 1 to 128 letters, digits and . _ -", f"{at}.function.name"
        )
    if not isinstance(function.get("description") or "", str):
        raise bad_request(f"{at}.function.description must be text", f"{at}.function.description")
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, dict):
        raise bad_request(
            f"{at}.function.parameters must be a JSON schema", f"{at}.function.parameters"
        )
    if function.get("strict") not in (None, False):
        raise unsupported(
            f"{at}.function.strict", "arguments are not held to their schema yet; send false"
        )
    return name, schema or {}


def _check_choice(choice: Any, schemas: Mapping[str, Any]) -> None:
    """ "none" and "auto" are taken. Of the others it is said first what is wrong with them."""
    if choice in (None, "none", "auto"):
        return
    if not schemas:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if not isinstance(function, dict) or function.get("name") not in schemas:
            raise bad_request("tool_choice names a function that is not in tools", "tool_choice")
    elif choice != "required" and not (
        isinstance(choice, dict) and choice.get("type") == "allowed_tools"
    ):
        raise bad_request(
            'tool_choice must be "none", "auto", "required" or name a function', "tool_choice"
        )
    raise unsupported("tool_choice", f'{_NO_FORCE}; send "auto"')
