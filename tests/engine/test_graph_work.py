"""Which graphs are recorded when, and what happens where one cannot be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from engine_tiny import request, tiny_engine
from test_decode_graphs import make_worker, prompts
from test_worker import decode, step

from tokenspeed.compile.cudagraph import GraphPool, Recording
from tokenspeed.config import CompileConfig, Config, SchedulerConfig
from tokenspeed.engine import graph_work
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.graph_work import GraphWork
from tokenspeed.engine.worker import Worker


def make_work(**settings: Any) -> tuple[GraphWork, Worker]:
    worker, attention = make_worker()
    worker.slots.max_len = 100  # steps with prompt tokens: 32, 64, 96
    config = Config(
        compile=CompileConfig(level=2, cudagraph_capture_sizes=(1, 2, 4, 6), **settings),
        scheduler=SchedulerConfig(chunked_prefill_size=8192),
    )
    work = GraphWork(config, worker._executable, attention, worker.slots)  # type: ignore[arg-type]
    return work, worker


def silent(phase: str, detail: str) -> None:
    pass


def sizes(work: GraphWork) -> tuple[list[int], list[int]]:
    return work.graphs.prefill.sizes, work.graphs.decode.sizes


def test_the_largest_and_the_smallest_come_first() -> None:
    work, _ = make_work()
    work.record_first(silent)
    assert sizes(work) == ([96], [1, 6]) and work.num_later == 4
    work.record_rest(silent)
    assert sizes(work) == ([32, 64, 96], [1, 2, 4, 6]) and work.num_later == 0


def test_without_prompts_only_decodes_are_recorded() -> None:
    work, _ = make_work(disable_prefill_graph=True)
    work.record_first(silent)
    work.record_rest(silent)
    assert sizes(work) == ([], [1, 2, 4, 6])


def test_what_steps_missed_most_comes_next() -> None:
    work, worker = make_work()
    work.record_first(silent)
    worker._graphs = work.graphs
    prompts(worker, 4)
    step(worker, *(decode(slot, 3) for slot in range(2)))
    for position in (4, 5):
        step(worker, *(decode(slot, position - slot // 2) for slot in range(3)))
    order = []
    while work.num_later:
        before = sizes(work)
        work.record_next()
        order += [new for old, new in zip(before, sizes(work), strict=True) if old != new]
    assert order == [[1, 4, 6], [1, 2, 4, 6], [32, 96], [32, 64, 96]]


def test_a_recording_waits_for_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    work, _ = make_work()
    now = 100.0
    monkeypatch.setattr(graph_work.time, "monotonic", lambda: now)
    work.record_first(silent)
    assert work.may_record(is_idle=False) and work.may_record(is_idle=True)
    work.record_next()
    assert not work.may_record(is_idle=False) and work.may_record(is_idle=True)
    now += 1.0
    assert work.may_record(is_idle=False)
    work.record_rest(silent)
    assert not work.may_record(is_idle=True)


def test_what_has_no_memory_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a graph that does not fit nor one of whose three parts one does not."""
    recordings = itertools.count()

    class Full(Recording):
        def __init__(self, run: Any, pool: GraphPool) -> None:
            if (number := next(recordings)) in (0, 5):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if number == 9:
                raise RuntimeError("CUDA error: out of memory")
            super().__init__(run, pool)

    for module in ("decode_graphs", "prefill_graphs"):
        monkeypatch.setattr(f"tokenspeed.engine.{module}.Recording", Full)
    work, worker = make_work()
    work.record_first(silent)
    assert sizes(work) == ([], [6]) and "no memory" not in caplog.text
    work.record_rest(silent)
    assert sizes(work) == ([32, 64], [2, 6])
    assert "no memory for 3 of 7 CUDA graphs" in caplog.text
    worker._graphs = work.graphs
    prompts(worker, 3)
    fresh, _ = make_worker()
    prompts(fresh, 3)
    for rows in ([decode(1, 3)], [decode(0, 3), decode(1, 4), decode(2, 3)]):
        assert step(worker, *rows) == step(fresh, *rows)


def test_a_recording_that_fails_otherwise_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graphs: DecodeGraphs, size: int) -> None:
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(DecodeGraphs, "record", fail)
    work, _ = make_work(disable_prefill_graph=True)
    with pytest.raises(RuntimeError, match="misaligned"):
        work.record_first(silent)


class Spare:
    """Three pieces of work, and what the engine asked."""

    def __init__(self) -> None:
        self.num_later = 3
        self.asked: list[bool] = []

    def may_record(self, is_idle: bool) -> bool:
        self.asked.append(is_idle)
        return is_idle and self.num_later > 0

    def record_next(self) -> None:
        self.num_later -= 1


def test_an_engine_prepares_while_nobody_waits(tiny_model: str) -> None:
    engine = tiny_engine(tiny_model, max_num_seqs=1)
    assert not engine.has_spare_work and not engine.prepare() and not engine.stats.graphs_to_come
    engine._spare_work = spare = Spare()
    assert engine.has_spare_work and engine.stats.graphs_to_come == 3
    assert engine.prepare() and engine.stats.graphs_to_come == 2
    engine.add(request("a", [1, 2], max_tokens=3))
    engine.step()
    assert not engine.prepare() and spare.asked == [True, False]
    engine.add(request("b", [3], max_tokens=1))
    assert not engine.prepare() and spare.asked == [True, False], "b waits"
    while engine.has_work:
        engine.step()
    assert engine.prepare() and engine.prepare() and not engine.prepare()
    assert not engine.has_spare_work


def test_a_recording_that_fails_ends_no_request(tiny_model: str) -> None:
    engine = tiny_engine(tiny_model)
    engine._spare_work = spare = Spare()
    engine.add(request("a", [1, 2], max_tokens=3))
    engine.step()

    def fail() -> None:
        raise RuntimeError("misaligned address")

    spare.record_next = fail  # type: ignore[method-assign]
    spare.may_record = lambda is_idle: True  # type: ignore[method-assign]
    assert engine.prepare() and not engine.has_spare_work and not engine.prepare()
    deltas = [delta for _ in range(10) if engine.has_work for delta in engine.step()]
    assert deltas[-1].finish_reason is not None and deltas[-1].error is None
