"""Limits that hold for a request's JSON as it comes, whichever API it is for."""

from __future__ import annotations

from typing import Any

from tokenspeed.server.errors import bad_request
from tokenspeed.server_config import ServerConfig


def check_limits(limits: ServerConfig, value: Any) -> None:
    """Raise APIError if a decoded body is nested too deeply, or a list in it is too long."""
    _check_depth(value, limits.max_json_depth)
    if not isinstance(value, dict):
        return
    counts = {
        "messages": (limits.max_messages, "--max-messages"),
        "input": (limits.max_messages, "--max-messages"),
        "tools": (limits.max_tools, "--max-tools"),
        "prompt": (limits.max_prompts, "--max-prompts"),
    }
    for name, (most, flag) in counts.items():
        given = value.get(name)
        if not isinstance(given, list) or len(given) <= most:
            continue
        if name == "prompt" and type(given[0]) is int:  # one prompt of token ids
            continue
        raise bad_request(f"{name} has {len(given)} entries; {most} are taken ({flag})", name)


def check_messages(limits: ServerConfig, count: int, name: str, why: str) -> None:
    """Raise APIError if there are too many messages in all; `why` there are more than were sent."""
    most = limits.max_messages
    if count > most:
        raise bad_request(
            f"{name} has {count} entries, {why}; {most} are taken (--max-messages)", name
        )


def _check_depth(value: Any, most: int) -> None:
    """Level by level, and no deeper than the limit: nothing here recurses. A prompt of a hundred
    thousand token ids is passed over without a look at each.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        inner = [node.values() if isinstance(node, dict) else node for node in level]
        level = [
            child
            for children in inner
            if not {dict, list}.isdisjoint(map(type, children))
            for child in children
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise bad_request(
        f"The JSON is nested more than {most} levels deep (--max-json-depth).", None, "invalid_json"
    )
