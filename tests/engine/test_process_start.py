"""What the engine process does before torch is there, and until it serves."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed.config import Config
from tokenspeed.engine import serving
from tokenspeed.engine.messages import Launch, Ready

PROCESS = """
import gc, json, os, sys
from types import SimpleNamespace
from tokenspeed.config import Config, ModelConfig
from tokenspeed.engine import cuda_context, process
from tokenspeed.engine.messages import Launch
seen = []
def serve(launch, link):
    seen.append("collects" if gc.isenabled() else "collects nothing")
    return 0
config = Config(model=ModelConfig(device=sys.argv[1]))
process.read_orders = lambda kind: Launch("ipc:///nowhere", config)
process.end_with_parent = lambda tidy: None
process.EngineLink = lambda address: SimpleNamespace(wait_for_client=list, close=list)
cuda_context.begin = lambda: seen.append(f"context, torch {'torch' in sys.modules}")
process.importlib.import_module = lambda name: SimpleNamespace(load_and_serve=serve)
assert process.main() == 0
os.write(2, json.dumps(seen).encode())
"""


@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
def test_a_context_is_begun_before_torch_and_not_for_a_cpu(device: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, device], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    begun = [] if device == "cpu" else ["context, torch False"]
    assert json.loads(done.stderr.splitlines()[-1]) == [*begun, "collects nothing"]


def test_garbage_is_collected_once_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"max_model_len": 8, "vocab_size": 8, "num_pages": 1, "block_size": 16}
    ready = Ready(**sizes, seconds=0.0, kv_cache_dtype="bfloat16", settings=Config(), reasons={})
    engine = SimpleNamespace(ready=ready)
    seen: list[bool] = []
    monkeypatch.setattr(serving, "build_engine", lambda *args, **kwargs: engine)
    monkeypatch.setattr(serving, "watch_cores", lambda device: None)
    monkeypatch.setattr(serving.Server, "run", lambda self: seen.append(gc.isenabled()))
    link: Any = SimpleNamespace(announce=lambda message: None)
    gc.disable()
    try:
        assert serving.load_and_serve(Launch("ipc:///nowhere", Config()), link) == 0
    finally:
        gc.enable()
        gc.unfreeze()
    assert seen == [True]
