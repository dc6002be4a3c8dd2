"""Ninety seconds of what `make soak` does for ten minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("bundled")]


def test_ninety_seconds_of_everything_leave_nothing() -> None:
    script = Path(__file__).with_name("soak.py")
    command = [sys.executable, str(script), "--seconds", "90", "--round", "12"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout)
    assert "Paris" in summary["answer"] and summary["counts"]["form streamed"] > 0
    assert "Traceback" not in done.stderr
