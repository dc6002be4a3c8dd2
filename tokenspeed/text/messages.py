"""Chat messages as templates expect them: checked, with text content, known roles and plain JSON.

Content parts are joined with nothing between them, for every role alike, so ["a", "b"] as parts
gives the same prompt as "ab". `developer` becomes `system` for templates that do not know it.
"""

from __future__ import annotations

import json
from typing import Any

from tokenspeed.request import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_SYSTEM_JOIN = "\n\n"


def speaks_of_calls(messages: Any) -> bool:
    """Whether a chat holds calls or their results. What is no chat does not."""
    return isinstance(messages, list) and any(
        isinstance(each, dict) and (each.get("role") == "tool" or bool(each.get("tool_calls")))
        for each in messages
    )


def normalize_messages(
    messages: list[dict[str, Any]], *, knows_developer: bool
) -> list[dict[str, Any]]:
    """A fresh, checked copy; InvalidRequest names the message and part at fault."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", "messages")
    checked = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return checked if knows_developer else _developer_as_system(checked)


def _message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{at} must be an object with role and content", at)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{at}.role is {str(role)[:40]!r}, which is not known (known: {', '.join(ROLES)})",
            f"{at}.role",
        )
    # Templates crash on, or print, the None that clients send for absent fields.
    result = {key: value for key, value in message.items() if value is not None}
    if role == "assistant":
        _assistant_fields(result, at)
    elif "content" not in result:
        raise InvalidRequest(f"{at}.content is missing", f"{at}.content")
    result["content"] = content_text(result.get("content", ""), f"{at}.content")
    return result


def content_text(content: Any, at: str) -> str:
    """A content as text, its parts joined; InvalidRequest names the part at fault."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{at} must be text or a list of parts", at)
    return "".join(part_text(part, f"{at}[{i}]") for i, part in enumerate(content))


def part_text(part: Any, at: str) -> str:
    """The text of one part; InvalidRequest for one of another kind."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        shown = repr(kind)[:40] if isinstance(part, dict) else type(part).__name__
        raise InvalidRequest(
            f"{at} is a part of type {shown}; this model reads text parts only "
            '({"type": "text", "text": ...})',
            at,
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{at}.{_TEXT_PARTS[kind]} must be text", at)
    return text


def _assistant_fields(message: dict[str, Any], at: str) -> None:
    """Tool calls with their arguments as objects, and reasoning under each name templates use."""
    if not message.keys() & {"content", "refusal", "tool_calls", *_REASONING}:
        raise InvalidRequest(f"{at}.content is missing", f"{at}.content")
    if "content" not in message and "refusal" in message:
        message["content"] = message["refusal"]
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise InvalidRequest(f"{at}.reasoning_content must be text", at)
        message.setdefault("thinking", reasoning)
        message["reasoning_content"] = reasoning
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{at}.tool_calls")


def _tool_calls(calls: Any, at: str) -> list[dict[str, Any]]:
    """OpenAI sends a call's arguments as JSON text; templates write them with `tojson`."""
    if not isinstance(calls, list):
        raise InvalidRequest(f"{at} must be a list", at)
    return [_tool_call(call, f"{at}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{at}.function must be an object with a name", at)
    arguments = call_arguments(function.get("arguments", {}), f"{at}.function.arguments", at)
    return {**call, "function": {**function, "arguments": arguments}}


def call_arguments(given: Any, at: str, param: str) -> dict[str, Any]:
    """A call's arguments, which may be JSON text; InvalidRequest for what is no object."""
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{at} is not a JSON object", param)
    return arguments


def _developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer text joins the first system message, which stays or becomes the first of all."""
    extra = [message["content"] for message in messages if message["role"] == "developer"]
    if not extra:
        return messages
    rest = [message for message in messages if message["role"] != "developer"]
    first = next((i for i, message in enumerate(messages) if message["role"] == "system"), None)
    system = {"role": "system"} if first is None else dict(messages[first])
    own = [] if first is None else [system["content"]]
    if first is not None:
        rest.remove(messages[first])
    system["content"] = _SYSTEM_JOIN.join([*own, *extra])
    return [system, *rest]
