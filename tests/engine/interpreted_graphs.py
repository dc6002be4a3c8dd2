"""An engine on Triton's attention, with and without recorded steps, beside the torch backend: run
by test_engine_interpreted.py in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
from engine_tiny import Outcome, request, run, tiny_engine

from tokenspeed.compile.cudagraph import GraphPool
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.prefill_graphs import PrefillGraphs
from tokenspeed.engine.worker import Graphs, Worker

# Triton's interpreter turns a one-element array of numpy into a number.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def record(engine: Engine) -> None:
    """What is recorded on a GPU before it is ready."""
    worker = engine._worker
    assert isinstance(worker, Worker)
    model, attention, slots = worker._executable, worker._attention, worker.slots
    pool = GraphPool(slots.device)
    graphs = Graphs(
        DecodeGraphs(model, attention, slots, (2, 4), pool),  # type: ignore[arg-type]
        PrefillGraphs(model, attention, slots, pool),  # type: ignore[arg-type]
    )
    for size in (16, 8):
        graphs.prefill.record(size)
    for size in (4, 2):
        graphs.decode.record(size)
    worker._graphs = graphs


def outcomes(folder: str, backend: str, is_recorded: bool) -> dict[str, Outcome]:
    engine = tiny_engine(folder, attention_backend=backend, level=0, chunked_prefill_size=12)
    if is_recorded:
        record(engine)
    prompts = [[(7 * i + j) % 50 + 1 for j in range(3 + 6 * i)] for i in range(3)]
    return run(engine, [request(f"r{i}", ids, max_tokens=5) for i, ids in enumerate(prompts)])


@pytest.mark.parametrize("is_recorded", [False, True], ids=["launched", "recorded"])
def test_triton_gives_the_tokens_of_torch(tiny_model: str, is_recorded: bool) -> None:
    want = outcomes(tiny_model, "torch", False)
    got = outcomes(tiny_model, "triton", is_recorded)
    assert {k: v.token_ids for k, v in got.items()} == {k: v.token_ids for k, v in want.items()}
    for name, outcome in got.items():
        for ours, theirs in zip(outcome.logprobs, want[name].logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
