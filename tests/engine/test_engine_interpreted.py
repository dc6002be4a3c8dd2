"""The engine's way on a GPU, walked on a CPU: see interpreted_graphs.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_engine_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("interpreted_graphs.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
