"""Paged attention kernels on a CPU, in Triton's interpreter, which a process asks for at its start;
and what needs no kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenspeed.kernels import paged_decode


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
