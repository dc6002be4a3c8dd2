"""What the machine has, as far as settings hang on it. Data only: `engine/facts.py` finds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class FlashInferFacts:
    """What FlashInfer needs, and whether it is there. `built`: dtypes whose kernel is compiled;
    `built_fp8`: those whose kernel for an fp8 cache is, too.
    """

    is_installed: bool = False
    built: Sequence[str] = ()
    built_fp8: Sequence[str] = ()
    dtypes: Sequence[str] = ("bfloat16", "float16")
    head_dim: int = 128


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What the machine has. `capability`: of its GPU. `has_kernels`: whether Triton's run."""

    has_cuda: bool
    capability: tuple[int, int] | None = None
    has_kernels: bool = False
    flashinfer: FlashInferFacts = field(default_factory=FlashInferFacts)
    cache_root: str | None = None
