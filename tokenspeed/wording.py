"""Words that messages to people share."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 request`, `2 requests`; `noun` in the singular, of those that take an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
