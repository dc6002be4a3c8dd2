"""Calls in the answers of chat."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


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
