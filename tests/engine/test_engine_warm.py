"""A warm start of a whole engine, in a fresh process: no frame goes through Dynamo, nothing is
compiled, and the tokens are those of the cold start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_tiny import request, run

from tokenspeed.engine.engine import Engine

PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [9, 8, 7], "c": list(range(20, 60))}
LOADED = {"inductor"}
"""Dynamo's book, in which loaded pieces enter what compiling them had counted."""

HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "flashinfer", "transformers")
"""What takes seconds to import, and a start whose pieces are calls does without."""

FRESH = """
import json, sys, threading
import test_engine_warm as t
from engine_tiny import tiny_engine
from tokenspeed.engine import program

is_all_else_done, before_pieces = threading.Event(), []
load, result = program.load_program, program.PendingProgram.result

def load_last(entry):
    is_all_else_done.wait()
    before_pieces.extend(name for name in t.HEAVY if name in sys.modules)
    return load(entry)

def let_load(pending, progress):
    is_all_else_done.set()
    return result(pending, progress)

program.load_program, program.PendingProgram.result = load_last, let_load
engine = tiny_engine(sys.argv[1], level=int(sys.argv[2]), cache_dir=sys.argv[3])
tokens = t.tokens(engine)
from torch._dynamo.utils import counters
compiler = ("torch._inductor.compile_fx", "tokenspeed.compile.pipeline", "tokenspeed.compile.cold")
print(json.dumps({
    "summary": engine.ready.summary,
    "tokens": tokens,
    "dynamo": {name: dict(found) for name, found in counters.items() if found},
    "compiler": [name for name in compiler if name in sys.modules],
    "before_pieces": before_pieces,
}))
"""


def tokens(engine: Engine) -> dict[str, list[int]]:
    outcomes = run(engine, [request(name, ids) for name, ids in PROMPTS.items()])
    return {name: outcome.token_ids for name, outcome in outcomes.items()}


def start(model: str, level: int, cache: Path, home: Path, **env: str) -> dict[str, Any]:
    """Start and generate in a fresh process; what it says of itself."""
    names = ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")
    for name in names:
        (home / name).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", FRESH, model, str(level), str(cache)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent,
        env=os.environ | {name: str(home / name) for name in names} | env,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def test_a_warm_start_runs_no_dynamo(
    tiny_model: str, tiny_cold: tuple[Path, Engine], tmp_path: Path
) -> None:
    cache, cold = tiny_cold
    said = start(tiny_model, 1, cache, tmp_path)
    assert "level 1 (compile cache hit)" in said["summary"]
    assert said["tokens"] == tokens(cold)
    assert said["dynamo"].keys() <= LOADED
    assert said["compiler"] == []
    assert said["before_pieces"] == [], "imported for more than loading Inductor's artifacts"


@pytest.mark.parametrize("env", [{"PATH": "/nowhere"}, {"CXX": "/no/such/compiler"}])
def test_a_warm_start_needs_no_compiler(
    tiny_model: str, tiny_cold: tuple[Path, Engine], tmp_path: Path, env: dict[str, str]
) -> None:
    """Nor does it matter which one there is: what was compiled is found by the name it was given
    when it was.
    """
    cache, cold = tiny_cold
    said = start(tiny_model, 1, cache, tmp_path, **env)
    assert "level 1 (compile cache hit)" in said["summary"]
    assert said["tokens"] == tokens(cold)


def test_an_eager_start_is_noticed(tiny_model: str, tmp_path: Path) -> None:
    """So what is asserted above can fail: a capture shows in both."""
    said = start(tiny_model, 0, tmp_path / "none", tmp_path)
    assert said["dynamo"]["stats"]["unique_graphs"] == 3
    assert said["compiler"] == ["tokenspeed.compile.pipeline"]
