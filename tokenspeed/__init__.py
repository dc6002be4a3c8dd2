"""TokenSpeed: large language models as plain PyTorch, made fast by a compiler."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed.llm import LLM as LLM
    from tokenspeed.request import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "tokenspeed.llm", "SamplingParams": "tokenspeed.request"}


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562): whoever wants the version does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
