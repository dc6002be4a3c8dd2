"""Which of FlashInfer's kernels come built, found without importing it: that takes seconds. And
what it builds, once it is imported (0.6.11).

FlashInfer loads a module that comes built as it is; of any other it asks ninja, each time, which
may compile for minutes, and needs the CUDA toolkit. So a build that is kept is offered to it as one
that came with it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tokenspeed import ledger

_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_CAUSE = "no build of it comes with the package or is kept"

_kept: Path | None = None


def is_installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def prefill_name(dtype: torch.dtype, head_dim: int) -> str:
    """FlashInfer's name (0.6.11) of its FlashAttention-3 prefill: no window, no cap of logits."""
    return _prefill(_NAMES[dtype], _NAMES[dtype], head_dim) + "_sm90"


def fp8_prefill_name(dtype: torch.dtype, head_dim: int) -> str:
    """As `prefill_name`, of its FlashAttention-2 prefill over pages of float8_e4m3fn."""
    return _prefill(_NAMES[dtype], "e4m3", head_dim)


def _prefill(short: str, kv: str, head_dim: int) -> str:
    return (
        f"batch_prefill_with_kv_cache_dtype_q_{short}_dtype_kv_{kv}_dtype_o_{short}"
        f"_dtype_idx_i32_head_dim_qk_{head_dim}_head_dim_vo_{head_dim}_posenc_0_use_swa_False"
        "_use_logits_cap_False_f16qk_False"
    )


def is_built(name: str) -> bool:
    """Is a kernel there, so that its first use does not compile it?"""
    folders = [*_folders(), *([] if _kept is None else [_kept])]
    return any((folder / name / f"{name}.so").is_file() for folder in folders)


def use_kept(folder: Path | None) -> None:
    """From now on builds below `folder`, each as NAME/NAME.so, count as built. To be said before
    FlashInfer is imported.
    """
    global _kept
    _kept = folder


def offer_kept(environment: Any) -> None:
    """Have FlashInfer (`flashinfer.jit.env`) find the kept builds beside those that come with it.
    It has one folder for both, so the others are linked into that of the kept ones.
    """
    if _kept is None or not any(_kept.iterdir()):
        return
    packaged = Path(environment.FLASHINFER_AOT_DIR)
    if packaged == _kept:
        return
    for path in packaged.iterdir() if packaged.is_dir() else ():
        if path.is_dir() and not (_kept / path.name).exists():
            (_kept / path.name).symlink_to(path, target_is_directory=True)
    environment.FLASHINFER_AOT_DIR = _kept


def watch(spec: Any) -> None:
    """Report to the ledger what a class of FlashInfer's specs (`flashinfer.jit.core.JitSpec`)
    builds. What ninja finds to be built already is not counted.
    """
    build = spec.build

    def reported(self: Any, verbose: bool, need_lock: bool = True) -> None:
        before = _changed_at(self.jit_library_path)
        if before is None:
            ledger.require_allowed("flashinfer", self.name, _CAUSE)
        began = time.monotonic()
        build(self, verbose, need_lock)
        if _changed_at(self.jit_library_path) != before:
            ledger.report("flashinfer", self.name, time.monotonic() - began, _CAUSE)

    spec.build = reported


def _changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _folders() -> Iterator[Path]:
    """Where FlashInfer looks for builds: the package of builds if there is one, else its own."""
    for package, *inside in (("flashinfer_jit_cache", "jit_cache"), ("flashinfer", "data", "aot")):
        if found := importlib.util.find_spec(package):
            yield from (Path(each, *inside) for each in found.submodule_search_locations or ())
            return
