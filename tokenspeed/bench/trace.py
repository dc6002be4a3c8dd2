"""Spans as a Chrome trace: for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tokenspeed.bench.records import Timed

_US = 1e6


def chrome_trace(starts: Mapping[str, Sequence[Timed]], names: Mapping[int, str]) -> bytes:
    """JSON of complete events, times in microseconds from each start's first span. `starts`: the
    spans of each start under its title; `names`: what each process is.

    Spans of one process may overlap without being nested (threads), which a lane cannot show: each
    goes into the first lane where it nests.
    """
    events: list[dict[str, object]] = []
    for title, spans in starts.items():
        zero = min((span.start for span in spans), default=0.0)
        lanes: dict[int, list[list[Timed]]] = {}
        for span in spans:
            lane = _place(span, lanes.setdefault(span.pid, []))
            events.append(
                {
                    "name": span.phase,
                    "cat": title,
                    "ph": "X",
                    "ts": round((span.start - zero) * _US, 1),
                    "dur": round(span.seconds * _US, 1),
                    "pid": span.pid,
                    "tid": lane,
                }
            )
        for pid in lanes:
            label = f"{title}: {names.get(pid, 'process')} {pid}"
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": label}})
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def _place(span: Timed, lanes: list[list[Timed]]) -> int:
    """The number of the first lane whose open spans have ended by then, or enclose this one. Spans
    come in order of their start.
    """
    for number, stack in enumerate(lanes):
        while stack and stack[-1].end <= span.start:
            stack.pop()
        if not stack or span.end <= stack[-1].end:
            stack.append(span)
            return number
    lanes.append([span])
    return len(lanes) - 1
