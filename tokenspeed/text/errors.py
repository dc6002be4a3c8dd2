"""The one error of this room that concerns the operator rather than a request."""

from __future__ import annotations


class ModelError(ValueError):
    """A model, tokenizer or template that cannot be used. One line: what, why, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
