"""Which of FlashInfer's kernels come built, found without importing it: that takes seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}


def is_installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def prefill_name(dtype: torch.dtype, head_dim: int) -> str:
    """FlashInfer's name (0.6.11) of its FlashAttention-3 prefill: no window, no cap of logits."""
    short = _NAMES[dtype]
    return (
        f"batch_prefill_with_kv_cache_dtype_q_{short}_dtype_kv_{short}_dtype_o_{short}"
        f"_dtype_idx_i32_head_dim_qk_{head_dim}_head_dim_vo_{head_dim}_posenc_0_use_swa_False"
        "_use_logits_cap_False_f16qk_False_sm90"
    )


def is_built(name: str) -> bool:
    """Is a kernel there, so that its first use does not compile it?"""
    return any((folder / name / f"{name}.so").is_file() for folder in _folders())


def _folders() -> Iterator[Path]:
    """Where FlashInfer looks for builds: the package of builds if there is one, else its own."""
    for package, *inside in (("flashinfer_jit_cache", "jit_cache"), ("flashinfer", "data", "aot")):
        if found := importlib.util.find_spec(package):
            yield from (Path(each, *inside) for each in found.submodule_search_locations or ())
            return
