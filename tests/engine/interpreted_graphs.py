"""An engine on Triton's attention, with and without recorded steps, beside the torch backend: run
by test_engine_interpreted.py in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
from engine_tiny import Outcome, request, run, tiny_config, tiny_engine
from interpreted_casts import casts_by_torch
from torch import Tensor

from tokenspeed.compile.cudagraph import GraphPool
from tokenspeed.config import CompileConfig, Config, SchedulerConfig
from tokenspeed.engine import trial
from tokenspeed.engine.attention import PendingAttention
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.kernel_warmup import warm_up_kernels
from tokenspeed.engine.model import resolve_served
from tokenspeed.engine.piece_graphs import PieceGraphs
from tokenspeed.engine.prefill_graphs import PrefillGraphs
from tokenspeed.engine.worker import Graphs, Worker
from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.kv.specs import cache_groups

__all__ = ["casts_by_torch"]

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
    folder: str,
    backend: str,
    prefill_sizes: tuple[int, ...] | None = None,
    cache: str = "auto",
) -> dict[str, Outcome]:
    options = {"level": 0, "chunked_prefill_size": 12, "kv_cache_dtype": cache}
    engine = tiny_engine(folder, attention_backend=backend, **options)
    if prefill_sizes is not None:
        record(engine, prefill_sizes)
    prompts = [[(7 * i + j) % 50 + 1 for j in range(3 + 6 * i)] for i in range(3)]
    return run(engine, [request(f"r{i}", ids, max_tokens=4) for i, ids in enumerate(prompts)])


def assert_alike(got: dict[str, Outcome], want: dict[str, Outcome], close: float = 1e-4) -> None:
    assert {k: v.token_ids for k, v in got.items()} == {k: v.token_ids for k, v in want.items()}
    for name, outcome in got.items():
        for ours, theirs in zip(outcome.logprobs, want[name].logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=close)


@pytest.mark.parametrize(
    ("prefill_sizes", "cache"),
    [((16, 8), "auto"), ((), "auto"), (None, "fp8")],
    ids=["recorded", "in pieces", "launched with a cache of fp8"],
)
def test_triton_gives_the_tokens_of_torch(
    tiny_model: str, prefill_sizes: tuple[int, ...] | None, cache: str
) -> None:
    want = outcomes(tiny_model, "torch", cache=cache)
    got = outcomes(tiny_model, "triton", prefill_sizes, cache)
    assert_alike(got, want, 1e-4 if cache == "auto" else 5e-3)  # a number's next one in fp8


def test_every_kernel_is_launched_before_there_are_requests(tiny_model: str) -> None:
    """And requests find the state as it was: everything stood in scratch."""
    engine = tiny_engine(tiny_model, attention_backend="triton", level=0)
    worker = engine._worker
    assert isinstance(worker, Worker)
    seen: list[tuple[int, int, int]] = []
    attention = worker._attention
    plan = attention.plan_device  # type: ignore[union-attr]

    def heard(step: DeviceStep, results: Tensor | None = None) -> None:
        seen.append((step.num_tokens, step.num_rows, step.num_decodes))
        assert (step.slots == worker.slots.scratch).all()
        plan(step, results)

    attention.plan_device = heard  # type: ignore[union-attr, method-assign]
    warm_up_kernels(
        worker._executable, attention, worker.slots, max_rows=3, token_budget=20, num_kinds=1
    )  # type: ignore[arg-type]
    attention.plan_device = plan  # type: ignore[union-attr, method-assign]
    kinds = {(tokens, rows == decodes, decodes > 0) for tokens, rows, decodes in seen}
    assert {(1, False, False), (17, False, False), (2, True, True)} <= kinds
    assert any(decodes and tokens > rows for tokens, rows, decodes in seen), "a mixed step"
    want = outcomes(tiny_model, "torch")
    prompts = [[(7 * i + j) % 50 + 1 for j in range(3 + 6 * i)] for i in range(3)]
    got = run(engine, [request(f"r{i}", ids, max_tokens=4) for i, ids in enumerate(prompts)])
    assert_alike(got, want)


def test_a_trial_counts_what_is_gone_meanwhile(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch: 10 bytes before, 170 after the largest step, 370 after the first graphs, 380 after one
    more. Outside: once there is less than is thought least of graphs, and once more.
    """
    least = trial._GRAPH
    seen = [(10, 5), (170, 6), (170, 6), (370, 7), (380, 8)]
    greedy = [*seen[:3], (370, 6 + 9 * least), (380, 6 + 10 * least)]
    launched: list[object] = []
    monkeypatch.setattr(trial, "warm_up_kernels", lambda *given, **sizes: launched.append(sizes))
    for used, outside in ((seen, 4 * least), (greedy, 11 * least)):
        taken = iter([trial.Used(*each) for each in used])
        with monkeypatch.context() as patch:
            patch.setattr(trial, "_used", lambda device, taken=taken: next(taken))
            needs = try_out(tiny_model)
        assert {"max_rows": 4, "token_budget": 40, "num_kinds": 1} in launched
        activations = 160 + 160 // trial._FRAGMENTS + trial._SLACK
        assert needs == trial.Needs(activations, graphs=200 + 10 * 2 + outside)
        assert next(taken, None) is None


def try_out(folder: str) -> trial.Needs:
    engine = tiny_engine(folder, attention_backend="triton", level=0)
    config = Config(
        compile=CompileConfig(level=2, cudagraph_capture_sizes=(1, 2, 3, 4)),
        scheduler=SchedulerConfig(max_num_seqs=4, chunked_prefill_size=40),
    )
    worker = engine._worker
    assert isinstance(worker, Worker)
    model = resolve_served(tiny_config(folder, attention_backend="triton"))
    groups = cache_groups(model.family.cache_specs(model.config))
    return trial.try_out(
        *(config, worker._executable, groups, PendingAttention(model)),
        dtype=torch.float32, kv_dtype=torch.float32, device=worker.slots.device,
        vocab_size=model.config.vocab_size, max_model_len=32,
        progress=lambda phase, detail: None,
    )  # fmt: skip
