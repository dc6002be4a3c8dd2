"""The record format of start-up timing, as the specification of its lines has it."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed import ledger, spans
from tokenspeed.spans import carried, process_import, span

COMMON = {"phase", "pid", "rank", "role", "span_id", "parent_id", "event", "wall_time_ns"}
END = COMMON | {"duration_s", "status", "error_type", "triton_compiles", "triton_compile_s"}


@pytest.fixture
def lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[list[dict[str, Any]]]:
    """Timing is on; the records are filled in when the test asks for their number."""
    monkeypatch.setattr(spans, "_enabled", True)
    caplog.set_level(logging.INFO, logger="tokenspeed")

    class Lines(list[dict[str, Any]]):
        def read(self) -> list[dict[str, Any]]:
            texts = [record.getMessage() for record in caplog.records]
            self[:] = [json.loads(text.removeprefix("startup_timing ")) for text in texts]
            return self

    yield Lines()


def test_two_compact_lines_with_exactly_these_keys(
    lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = time.time_ns()
    with span("weights.target"):
        pass
    start, end = lines.read()
    assert set(start) == COMMON and set(end) == END
    assert (start["event"], end["event"]) == ("start", "end")
    assert (start["phase"], start["pid"], start["rank"]) == ("weights.target", os.getpid(), 0)
    assert start["role"] is None and start["parent_id"] is None
    assert before <= start["wall_time_ns"] <= end["wall_time_ns"] <= time.time_ns()
    assert 0 <= end["duration_s"] < 10
    assert (end["status"], end["error_type"]) == ("ok", None)
    for record in caplog.records:
        text = record.getMessage()
        assert record.levelno == logging.INFO and text.startswith("startup_timing {")
        assert ": " not in text and "\n" not in text


def test_children_inherit_rank_and_role_and_name_their_parent(lines: Any) -> None:
    with span("scheduler.init", rank=3, role="prefill"), span("model.config"):
        with span("distributed.init", rank=4):
            pass
    with span("kv.build"):
        pass
    outer, middle, inner, _, _, _, after, _ = lines.read()
    assert [each["parent_id"] for each in (outer, middle, inner, after)] == [
        *(None, outer["span_id"], middle["span_id"], None)
    ]
    assert (middle["rank"], middle["role"]) == (3, "prefill")
    assert (inner["rank"], inner["role"]) == (4, "prefill")
    assert (after["rank"], after["role"]) == (0, None)


def test_a_thread_knows_its_parent_where_it_is_carried(lines: Any) -> None:
    with span("scheduler.init", rank=2):
        for target in (carried(span("compile.cache_load")(int)), span("compile.key")(int)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    outer, load, _, key, *_ = lines.read()
    assert (load["parent_id"], load["rank"]) == (outer["span_id"], 2)
    assert (key["parent_id"], key["rank"]) == (None, 0)


def test_each_call_of_a_decorated_function_is_a_span(lines: Any) -> None:
    @span("compile.key")
    def twice(number: int) -> int:
        return 2 * number

    assert [twice(1), twice(2)] == [2, 4]
    assert len({each["span_id"] for each in lines.read()}) == 2


@pytest.mark.parametrize("error", [ValueError("why"), KeyboardInterrupt()])
def test_an_exception_passes_and_is_named(lines: Any, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, span("kv.build"):
        raise error
    assert caught.value is error
    end = lines.read()[-1]
    assert (end["status"], end["error_type"]) == ("error", type(error).__name__)


def test_a_broken_log_hides_nothing(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(spans.logger, "info", broken)
    with pytest.raises(ValueError, match="the phase's own"), span("kv.build"):
        raise ValueError("the phase's own")


def test_a_cache_is_named_where_one_took_part(lines: Any) -> None:
    with span("compile.cache_load") as found:
        found.cache = "miss"
    start, end = lines.read()
    assert end["cache"] == "miss" and "cache" not in start


def test_triton_is_null_unless_somebody_watches(
    lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_counts", {})
    with span("kv.build"):
        ledger.report("triton", "k", 1.0, "")
    monkeypatch.setattr(ledger, "_watches_triton", True)
    with span("graph.capture"):
        ledger.report("triton", "k", 0.5, "")
        ledger.report("tuning", "t", 9.0, "")
    ends = [each for each in lines.read() if each["event"] == "end"]
    found = [(each["triton_compiles"], each["triton_compile_s"]) for each in ends]
    assert found == [(None, None), (1, 0.5)]


def test_the_first_span_begins_with_the_process(lines: Any) -> None:
    process_import()
    start, end = lines.read()
    assert start["phase"] == "process.import" and set(end) == END
    age = (end["wall_time_ns"] - start["wall_time_ns"]) / 1e9
    assert age == pytest.approx(end["duration_s"], abs=0.01)
    assert age >= time.process_time() * 0.2  # this process did not start a moment ago


def test_off_reads_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_enabled", False)
    monkeypatch.setattr(spans, "time", SimpleNamespace())  # any use is an AttributeError
    monkeypatch.setattr(ledger, "triton_totals", None)
    monkeypatch.setattr(spans.logger, "info", None)
    with span("kv.build") as own:
        own.cache = "hit"
    process_import()
    assert carried(int) is int
