"""Paged attention kernels on a CPU, in Triton's interpreter, which a process asks for at its start;
and what needs no kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.config import OPTIONS
from tokenspeed.kernels import paged_decode, paged_prefill
from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.kernels.paged_layer import PagedLayer


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("interpreted_paged.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_partial_results_fit_into_the_workspace_whatever_the_batch() -> None:
    room = len(paged_decode.workspace_for(1, 1, torch.device("cpu")).arrived)
    for pairs in range(1, 2000):
        splits = paged_decode.num_splits(pairs, 1 << 20)
        assert splits == 1 or pairs * splits <= room


def test_short_contexts_are_not_split() -> None:
    assert paged_decode.num_splits(1, 64) == 1
    assert paged_decode.num_splits(1, 65) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_step_fits_a_grid(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """CUDA takes 65535 along all axes of a grid but the first."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(paged_prefill, "_kernel", Kernel())
    chunk = OPTIONS["chunked_prefill_size"].high
    assert isinstance(chunk, int)
    with torch.device("meta"):
        pages = torch.empty(2, 16, 2, 8, dtype=dtype)
        layer = PagedLayer(pages, pages, torch.zeros(1, 2, dtype=torch.int32), 1.0)
        step = DeviceStep(
            num_rows=1,
            num_tokens=chunk,
            max_query_len=chunk,
            max_context_len=chunk,
            slots=torch.empty(1, dtype=torch.int32),
            query_starts=torch.empty(2, dtype=torch.int32),
            context_lens=torch.empty(1, dtype=torch.int32),
            positions=torch.empty(chunk, dtype=torch.int64),
            token_rows=torch.empty(chunk, dtype=torch.int32),
        )
        paged_prefill.launch(torch.empty(chunk, 16, 8, dtype=dtype), layer, step)
    ((first, *others),) = grids
    assert first >= 2 * chunk / 16 and first < 1 << 31
    assert all(size <= 65535 for size in others)
