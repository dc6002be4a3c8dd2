"""Records out of logs, and traces and reports out of records."""

from __future__ import annotations

import json
from typing import Any

from tokenspeed.bench.child_server import READY
from tokenspeed.bench.records import Timed, parse, timed
from tokenspeed.bench.startup import Start
from tokenspeed.bench.startup_report import summarize, text
from tokenspeed.bench.trace import chrome_trace


def line(event: str, span_id: int, wall: float, phase: str = "p", **keys: Any) -> str:
    fields = {"phase": phase, "pid": 5, "rank": 0, "role": None, "span_id": span_id}
    fields |= {"parent_id": None, "event": event, "wall_time_ns": int(wall * 1e9)}
    return "12:00:00 INFO startup_timing " + json.dumps(fields | keys)


def test_spans_are_told_from_the_rest_of_a_log() -> None:
    log = [
        "12:00:00 INFO loading",
        line("start", 1, 10, "scheduler.init"),
        line("start", 2, 11, "kv.build", parent_id=1),
        line("end", 2, 12.5, "kv.build", parent_id=1, duration_s=1.5, status="ok"),
        line("end", 1, 13, "scheduler.init", duration_s=3.0),
        line("start", 1, 10, "process.import", pid=6),  # another process, never ended
        line("end", 9, 10, "no start"),
        "startup_timing {not json",
        "startup_timing " + json.dumps({"phase": "p"}),
        line("start", 3, 10, pid=-4),
    ]
    outer, inner = timed(parse(log))
    assert (outer.phase, outer.seconds, outer.is_leaf) == ("scheduler.init", 3.0, False)
    assert (inner.phase, inner.seconds, inner.is_leaf) == ("kv.build", 1.5, True)


def test_a_clock_that_was_set_back_gives_no_negative_time() -> None:
    (span,) = timed(parse([line("start", 1, 10), line("end", 1, 9)]))
    assert span.seconds == 0


def test_the_line_of_readiness_is_recognised() -> None:
    found = READY.search("12:00:00 INFO ready in 2.1 s at http://127.0.0.1:41, model smollm2 (x)")
    assert found and found[1] == "http://127.0.0.1:41"


def spans(pid: int, *rows: tuple[str, float, float, bool]) -> list[Timed]:
    return [
        Timed(phase=phase, pid=pid, start=start, end=end, is_leaf=leaf)
        for phase, start, end, leaf in rows
    ]


def start(kind: str, stretch: float) -> Start:
    found = spans(
        5,
        ("process.import", 100, 100 + stretch, True),
        ("http.ready", 100 + stretch, 104, False),
        ("first_token", 104.5, 105, True),
    )
    found += spans(6, ("scheduler.init", 100 + stretch, 104, True))
    return Start(kind, found, 100.0, 104.0, 105.0, {5: "http", 6: "engine"})


def test_a_report_has_medians_path_and_what_is_missing() -> None:
    cold, warm = summarize([start("cold", 3), start("warm", 1), start("warm", 2), start("warm", 3)])
    assert (cold.kind, cold.num_starts, warm.num_starts) == ("cold", 1, 3)
    assert (warm.wall_s, warm.ready_s) == (5.0, 4.0)
    assert (warm.unaccounted_s, warm.unaccounted_share) == (0.5, 0.1)
    rows = {(row.process, row.phase): row for row in warm.phases}
    assert rows["http", "process.import"].seconds == 2.0
    assert rows["engine", "scheduler.init"].critical_s == 2.0
    assert rows["http", "http.ready"].critical_s == 0.0 and not rows["http", "http.ready"].is_leaf
    assert [(phase, end) for _, phase, _, end in cold.critical_path] == [
        *(("process.import", 3), ("scheduler.init", 4), ("(not covered)", 4.5), ("first_token", 5)),
    ]
    shown = text([cold, warm])
    assert "unaccounted 0.500 s (10.0%)" in shown and "http.ready +" in shown


def test_a_trace_has_lanes_for_what_overlaps() -> None:
    found = spans(5, ("a", 1, 5, True), ("b", 2, 3, True), ("c", 2.5, 6, True), ("d", 5.5, 7, True))
    events = json.loads(chrome_trace({"cold 1": found}, {5: "engine"}))["traceEvents"]
    lanes = {each["name"]: each["tid"] for each in events if each["ph"] == "X"}
    assert lanes == {"a": 0, "b": 0, "c": 1, "d": 0}
    first = events[0]
    assert (first["ts"], first["dur"], first["cat"]) == (0.0, 4e6, "cold 1")
    assert events[-1]["args"] == {"name": "cold 1: engine 5"}
