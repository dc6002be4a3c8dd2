"""An engine on Triton's attention, with and without recorded steps, beside the torch backend: run
by test_engine_interpreted.py in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
from engine_tiny import Outcome, request, run, tiny_engine

from tokenspeed.compile.cudagraph import GraphPool
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.piece_graphs import PieceGraphs
from tokenspeed.engine.prefill_graphs import PrefillGraphs
from tokenspeed.engine.worker import Graphs, Worker

# Triton's interpreter turns a one-element array of numpy into a number.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def record(engine: Engine, prefill_sizes: tuple[int, ...]) -> None:
    """What is recorded on a GPU before it is ready. Steps with prompt tokens for which there is no
    whole recording are recorded piece by piece.
    """
    worker = engine._worker
    assert isinstance(worker, Worker)
    model, attention, slots = worker._executable, worker._attention, worker.slots
    pool = GraphPool(slots.device)
    pieces = PieceGraphs(model, attention, slots, pool, 12)  # type: ignore[arg-type]
    graphs = Graphs(
        DecodeGraphs(model, attention, slots, (2, 4), pool),  # type: ignore[arg-type]
        PrefillGraphs(model, attention, slots, pool),  # type: ignore[arg-type]
        pieces,
    )
    for size in (12, 6):
        pieces.record(size)
    for size in prefill_sizes:
        graphs.prefill.record(size)
    for size in (4, 2):
        graphs.decode.record(size)
    worker._graphs = graphs


def outcomes(
    folder: str, backend: str, prefill_sizes: tuple[int, ...] | None = None
) -> dict[str, Outcome]:
    engine = tiny_engine(folder, attention_backend=backend, level=0, chunked_prefill_size=12)
    if prefill_sizes is not None:
        record(engine, prefill_sizes)
    prompts = [[(7 * i + j) % 50 + 1 for j in range(3 + 6 * i)] for i in range(3)]
    return run(engine, [request(f"r{i}", ids, max_tokens=5) for i, ids in enumerate(prompts)])


@pytest.mark.parametrize(
    "prefill_sizes", [None, (16, 8), ()], ids=["launched", "recorded", "in pieces"]
)
def test_triton_gives_the_tokens_of_torch(
    tiny_model: str, prefill_sizes: tuple[int, ...] | None
) -> None:
    want = outcomes(tiny_model, "torch")
    got = outcomes(tiny_model, "triton", prefill_sizes)
    assert {k: v.token_ids for k, v in got.items()} == {k: v.token_ids for k, v in want.items()}
    for name, outcome in got.items():
        for ours, theirs in zip(outcome.logprobs, want[name].logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
