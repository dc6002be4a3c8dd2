"""Whatever steps come after readiness, nothing is compiled for them any more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
from gpu_engines import GPU_ENGINE_MARKS, write_small_qwen3
from random_shapes import ASKED, Report

pytestmark = GPU_ENGINE_MARKS

PROGRAM = Path(__file__).with_name("random_shapes.py")
SHAPES = 500


def test_random_steps_compile_nothing(tmp_path: Path) -> None:
    options = {
        "model": str(write_small_qwen3(tmp_path)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "jit_after_ready": "error",
        "max_num_seqs": 64,
        "max_total_tokens": 32000,  # too few for all: some wait, some are preempted
    }
    command = [sys.executable, str(PROGRAM), json.dumps(options), str(SHAPES)]
    paths = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    report = msgspec.json.decode(done.stdout.splitlines()[-1], type=Report)
    print(
        f"{report.summary}: {report.steps} steps of {report.requests} requests, {report.shapes} "
        f"distinct (tokens, rows), {report.preemptions} preemptions; compiled until ready: "
        f"{report.startup}, for later graphs: {report.compiled_between}"
    )
    log = done.stderr[-3000:]
    assert not report.compiled, "\n".join([*report.compiled, log])
    assert not report.errors, "\n".join([*report.errors, log])
    assert "CUDA graphs" in report.summary and report.shapes >= SHAPES // 2
    assert set(report.asked) == ASKED.keys() and report.cached_tokens > 0
