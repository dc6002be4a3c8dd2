"""From a request of the responses API to the chat request that it means.

Items become messages: what an assistant did in one turn (reasoning, text, calls) is one message.
"""

from __future__ import annotations

from typing import Any

from tokenspeed.server.errors import APIError, bad_request, unsupported
from tokenspeed.server.protocol_chat import ChatRequest
from tokenspeed.server.protocol_responses import ResponsesRequest
from tokenspeed.text.messages import ROLES, call_arguments, content_text

FIELD_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Fields of the chat request that have another name in this API."""

_SAME = (
    *("model", "temperature", "top_p", "parallel_tool_calls", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "ignore_eos"),
    *("cache_salt", "priority", "chat_template_kwargs"),
)
"""Fields that mean in a chat request what they mean here."""


def chat_request(
    request: ResponsesRequest, items: list[dict[str, Any]], *, num_earlier: int
) -> ChatRequest:
    """The chat request. `items` are all that the model is to see, the request's own after
    `num_earlier` of earlier responses. Raises APIError or InvalidRequest.
    """
    fields = {name: getattr(request, name) for name in _SAME}
    messages = _messages(items, num_earlier)
    if request.instructions is not None:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    if items and not messages:
        raise bad_request("input has only reasoning items without text: add a message", "input")
    chat = ChatRequest(
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        tools=None if request.tools is None else _tools(request.tools),
        tool_choice=_tool_choice(request.tool_choice),
        response_format=_form(request),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        logprobs=request.wants_logprobs,
        top_logprobs=request.top_logprobs,
        **fields,
    )
    chat.check()
    return chat


def as_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`input` as items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given


def _messages(items: list[dict[str, Any]], num_earlier: int) -> list[dict[str, Any]]:
    """Messages for the chat template. What is wrong with an item is found here, where its place in
    the request is known; those of earlier responses were checked with theirs.
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items, -num_earlier):
        at = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            if not isinstance(item.get("role"), str):
                raise bad_request(f"{at} must be a message with a role, or have another type", at)
            if item["role"] not in ROLES:
                raise bad_request(f"{at}.role is one of {', '.join(ROLES)}", f"{at}.role")
            content = content_text(item.get("content"), f"{at}.content")
            message = {"role": item["role"], "content": content}
            if item["role"] == "assistant" and _is_thought(messages):
                messages[-1] |= message
            else:
                messages.append(message)
        elif kind == "reasoning":
            if text := _reasoning(item, at):
                messages.append({"role": "assistant", "reasoning_content": text})
        elif kind == "function_call":
            _assistant(messages).setdefault("tool_calls", []).append(_call(item, at))
        elif kind == "function_call_output":
            messages.append(
                {"role": "tool", "tool_call_id": _text(item, "call_id", at)}
                | {"content": content_text(item.get("output"), f"{at}.output")}
            )
        else:
            raise _unknown(kind, at)
    return messages


def _unknown(kind: Any, at: str) -> APIError:
    shown = repr(kind)[:40]
    known = "message, reasoning, function_call and function_call_output"
    return unsupported(at, f"items of type {shown} are not known here, but {known}")


def _is_thought(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is reasoning that its answer has yet to follow."""
    return bool(messages) and messages[-1].keys() == {"role", "reasoning_content"}


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the assistant's turn, which is begun if the last message is not its."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _reasoning(item: dict[str, Any], at: str) -> str:
    """The text of a reasoning item, or of its summary; "" for one that holds none."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise bad_request(f"{at}.{name} must be a list of parts", f"{at}.{name}")
        if text := "".join(str(part.get("text", "")) for part in parts):
            return text
    return ""


def _call(item: dict[str, Any], at: str) -> dict[str, Any]:
    name, arguments = (_text(item, field, at) for field in ("name", "arguments"))
    given = call_arguments(arguments, f"{at}.arguments", f"{at}.arguments")
    function = {"name": name, "arguments": given}
    return {"id": _text(item, "call_id", at), "type": "function", "function": function}


def _text(item: dict[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{at}.{name} must be text", f"{at}.{name}")
    return value


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools are flat here; their inside is checked with those of chat."""
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            kind = repr(tool.get("type"))[:40]
            raise unsupported(f"tools[{index}]", f"functions alone are, tools of type {kind} not")
    names = ("name", "description", "parameters", "strict")
    return [
        {
            "type": "function",
            "function": {name: tool[name] for name in names if tool.get(name) is not None},
        }
        for tool in tools
    ]


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _form(request: ResponsesRequest) -> Any:
    """`text.format` as a response_format; a schema is flat here."""
    form = request.text.format if request.text else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        inner = {name: value for name, value in form.items() if name != "type"}
        return {"type": "json_schema", "json_schema": inner}
    return form
