"""Prompts as callers in Python give them: texts, token ids, or lists of these. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, cast

Prompt = str | Sequence[int]
Message = dict[str, Any]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list; TypeError for what is neither a text nor token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise TypeError(f"prompts are texts or lists of token ids, not {type(prompts).__name__}")
    if len(prompts) and all(_is_token(each) for each in prompts):
        return [cast(Sequence[int], prompts)]
    for each in prompts:
        if not isinstance(each, str) and not _is_token_list(each):
            shown = " ".join(repr(each).split())
            raise TypeError(f"a prompt is a text or a list of token ids, not {shown:.60}")
    return list(cast(Sequence[Prompt], prompts))


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[list[Message]]:
    """One conversation or several as a list; TypeError for what is none. Their messages are not
    looked at.
    """
    if not _is_list(messages):
        raise TypeError(f"messages are a list of dicts, not {type(messages).__name__}")
    if len(messages) and isinstance(messages[0], dict):
        return [list(cast(Sequence[Message], messages))]
    for each in messages:
        if not _is_list(each):
            raise TypeError(f"a conversation is a list of dicts, not {type(each).__name__}")
    return [list(each) for each in cast(Sequence[Sequence[Message]], messages)]


def _is_list(value: object) -> bool:
    """A list or tuple, or an array that has items (NumPy's numbers are arrays without): not what
    iterates over keys, bytes or in no order.
    """
    if isinstance(value, list | tuple):
        return True
    return hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0


def _is_token_list(value: Any) -> bool:
    # Types first: that settles nearly all prompts, in less than half the time.
    return _is_list(value) and (set(map(type, value)) == {int} or all(map(_is_token, value)))


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
