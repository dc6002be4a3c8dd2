"""From a request of Anthropic's messages API to the chat request that it means."""

from __future__ import annotations

import json
from typing import Any

from tokenspeed.server.errors import bad_request, unsupported
from tokenspeed.server.protocol_chat import ChatRequest
from tokenspeed.server.protocol_messages import MessagesRequest, PromptFields
from tokenspeed.text.messages import content_text, part_text

FIELD_NAMES = {
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "thinking",
    "response_format": "output_config",
    "stop": "stop_sequences",
}
"""Fields of the chat request that have another name in this API."""

_SAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"),
    *("ignore_eos", "cache_salt", "priority", "chat_template_kwargs"),
)
"""Fields that mean in a chat request what they mean here."""

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_ROLES = ("user", "assistant", "system")


def chat_request(request: MessagesRequest) -> ChatRequest:
    """Raises APIError."""
    fields = {name: getattr(request, name) for name in _SAME}
    fields |= _prompt_fields(request)
    chat = ChatRequest(
        max_completion_tokens=request.max_tokens, stop=request.stop_sequences, **fields
    )
    chat.check()
    return chat


def prompt_request(request: PromptFields) -> ChatRequest:
    """A chat request with the same prompt. Raises APIError."""
    chat = ChatRequest(model=request.model, **_prompt_fields(request))
    chat.check()
    return chat


def _prompt_fields(request: PromptFields) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if request.system is not None:
        messages.append({"role": "system", "content": content_text(request.system, "system")})
    for index, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{index}]")
    is_prefilled = bool(request.messages) and request.messages[-1].get("role") == "assistant"
    choice = request.tool_choice or {}
    return {
        "messages": messages,
        "tools": None if request.tools is None else _tools(request.tools),
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "response_format": _form(request.form),
        "reasoning_effort": _effort(request),
        "continue_final_message": is_prefilled or None,
    }


def _effort(request: PromptFields) -> str | None:
    thinking, config = request.thinking, request.output_config
    if thinking is not None and thinking.type == "disabled":
        return "none"
    if config is not None and config.effort is not None:
        if config.effort not in _EFFORTS:
            raise bad_request(
                f"output_config.effort is one of {', '.join(_EFFORTS)}", "output_config"
            )
        return _EFFORTS[config.effort]
    return "medium" if thinking is not None else None


def _form(form: Any) -> Any:
    if form is None:
        return None
    if form.get("type") != "json_schema":
        raise bad_request("output_config.format.type must be json_schema", "output_config")
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools of the client's own; their inside is checked with those of chat."""
    for index, tool in enumerate(tools):
        if tool.get("type", "custom") != "custom":
            kind = repr(tool["type"])[:40]
            raise unsupported(f"tools[{index}]", f"tools of type {kind} do not run here")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    names["strict"] = "strict"
    return [
        {
            "type": "function",
            "function": {
                told: tool[name] for name, told in names.items() if tool.get(name) is not None
            },
        }
        for tool in tools
    ]


def _tool_choice(choice: dict[str, Any]) -> Any:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise bad_request(
            f"tool_choice.type is one of {', '.join([*_CHOICES, 'tool'])}", "tool_choice"
        )
    return _CHOICES[kind]


def _messages(message: dict[str, Any], at: str) -> list[dict[str, Any]]:
    """A message as chat messages: results of tools are messages of their own. What is wrong with
    its content is found here, where its place in the request is known.
    """
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise bad_request(f"{at}.role is one of {', '.join(_ROLES)}", f"{at}.role")
    if not isinstance(content, list):
        return [{"role": role, "content": content_text(content, f"{at}.content")}]
    if not all(isinstance(block, dict) for block in content):
        raise bad_request(f"{at}.content must be text or a list of blocks", f"{at}.content")
    if role == "assistant":
        return [_assistant(content, f"{at}.content")]
    found: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        if block.get("type") == "tool_result":
            found.append(_result(block, f"{at}.content[{index}]"))
            continue
        text = part_text(block, f"{at}.content[{index}]")
        if found and found[-1]["role"] == role:
            found[-1]["content"] += text
        else:
            found.append({"role": role, "content": text})
    return found or [{"role": role, "content": ""}]


def _assistant(blocks: list[dict[str, Any]], at: str) -> dict[str, Any]:
    """What the model has said before: thoughts, text and calls in one message."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_text(block, "thinking", f"{at}[{index}]"))
        elif kind == "redacted_thinking":
            raise unsupported(f"{at}[{index}]", "thinking that is not in the clear cannot be read")
        elif kind == "tool_use":
            calls.append(_call(block, f"{at}[{index}]"))
        else:
            texts.append(part_text(block, f"{at}[{index}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], at: str) -> dict[str, Any]:
    if not isinstance(block.get("input"), dict):
        raise bad_request(f"{at}.input must be an object", f"{at}.input")
    function = {"name": _text(block, "name", at), "arguments": json.dumps(block["input"])}
    return {"id": _text(block, "id", at), "type": "function", "function": function}


def _result(block: dict[str, Any], at: str) -> dict[str, Any]:
    content = block.get("content")
    return {
        "role": "tool",
        "tool_call_id": _text(block, "tool_use_id", at),
        "content": "" if content is None else content_text(content, f"{at}.content"),
    }


def _text(block: dict[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{at}.{name} must be text", f"{at}.{name}")
    return value
