"""What a benchmark says of the machine, and what its GPU reaches in the same run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokenspeed import __version__

COPY_BYTES = 8 << 30
MATMUL_SIZE = 8192
_ROWS, _CALLS = 4, 10
_GPU_PACKAGES = {"triton": "triton", "flashinfer": "flashinfer-python"}


def facts(threads: int | None = None, **more: Any) -> dict[str, Any]:
    """The processor, the GPU if there is one, the versions, the command; `more` is added."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads() if threads is None else threads,
        "capability": torch.backends.cpu.get_cpu_capability(),
        **(_gpu() if torch.cuda.is_available() else {}),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "tokenspeed": __version__,
        **more,
        "command": _command(),
    }


def gpu_speed() -> dict[str, float]:
    """What the card reaches now: a copy of 8 GiB on it (bytes read and written), and a product of
    two square bfloat16 matrices of 8192. 16 GiB are taken for a moment.
    """
    found = {
        "copy_tb_s": 2 * COPY_BYTES / _copy_s() / 1e12,
        "matmul_tflop_s": 2 * MATMUL_SIZE**3 / _matmul_s() / 1e12,
    }
    torch.cuda.empty_cache()
    return found


def _copy_s() -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return _best_seconds(lambda: target.copy_(source))


def _matmul_s() -> float:
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    return _best_seconds(lambda: torch.mm(a, a, out=out))


def _best_seconds(call: Callable[[], object]) -> float:
    """Of one call, in the best of some rows of calls, the first of which warms up."""
    best = float("inf")
    for _ in range(_ROWS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_CALLS):
            call()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / _CALLS)
    return best


def _gpu() -> dict[str, Any]:
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "gpu_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }
    for name, package in _GPU_PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _command() -> str:
    program = sys.argv[0]
    first = ["python", program] if program.endswith(".py") else [Path(program).name]
    return " ".join([*first, *sys.argv[1:]])
