"""Measured starts as numbers and as text: phases, critical path, what is not accounted for.

All figures are medians over the starts of a kind. A phase's seconds are those during which it ran
in its process at least once; children overlap parents, so a column does not add up to the wall.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from tokenspeed.bench.records import Timed
from tokenspeed.bench.startup import Start
from tokenspeed.bench.timeline import critical_path, unaccounted, union

NOBODY = "(not covered)"
_MIN_SHOWN_S = 0.005


class PhaseRow(msgspec.Struct, frozen=True):
    """One phase in one process. `critical_s` of its seconds were waited for."""

    process: str
    phase: str
    is_leaf: bool
    count: int
    seconds: float
    critical_s: float


class KindReport(msgspec.Struct, frozen=True):
    """All starts of a kind ("cold", "warm"). `critical_path` is that of the median start."""

    kind: str
    num_starts: int
    wall_s: float
    ready_s: float
    unaccounted_s: float
    unaccounted_share: float
    phases: list[PhaseRow]
    critical_path: list[tuple[str, str, float, float]]
    """(process, phase, from, to), seconds from process start."""


def summarize(starts: Sequence[Start]) -> list[KindReport]:
    """A report for each kind, in the order of the starts."""
    kinds = dict.fromkeys(start.kind for start in starts)
    return [_of_kind(kind, [start for start in starts if start.kind == kind]) for kind in kinds]


def text(reports: Sequence[KindReport]) -> str:
    """The reports for people."""
    return "\n\n".join("\n".join(_lines(report)) for report in reports)


def _of_kind(kind: str, starts: list[Start]) -> KindReport:
    gaps = [unaccounted(start.spans, start.began, start.first_token) for start in starts]
    middle = sorted(starts, key=lambda start: start.wall)[(len(starts) - 1) // 2]
    return KindReport(
        kind=kind,
        num_starts=len(starts),
        wall_s=statistics.median(start.wall for start in starts),
        ready_s=statistics.median(start.ready - start.began for start in starts),
        unaccounted_s=statistics.median(gaps),
        unaccounted_share=statistics.median(
            gap / start.wall for gap, start in zip(gaps, starts, strict=True)
        ),
        phases=_phases(starts),
        critical_path=[
            (
                middle.processes[part.span.pid] if part.span else "",
                part.span.phase if part.span else NOBODY,
                part.start - middle.began,
                part.end - middle.began,
            )
            for part in critical_path(middle.spans, middle.began, middle.first_token)
        ],
    )


def _phases(starts: list[Start]) -> list[PhaseRow]:
    """Rows in the order in which phases began in the first start that had them."""
    keys = dict.fromkeys(
        (start.processes[span.pid], span.phase) for start in starts for span in start.spans
    )
    rows = []
    for process, phase in keys:
        chosen = [
            [
                span
                for span in start.spans
                if span.phase == phase and start.processes[span.pid] == process
            ]
            for start in starts
        ]
        median = _over(starts, chosen)
        rows.append(
            PhaseRow(
                process=process,
                phase=phase,
                is_leaf=all(span.is_leaf for spans in chosen for span in spans),
                count=int(statistics.median_high(len(spans) for spans in chosen)),
                seconds=median(lambda _, spans: _length(spans)),
                critical_s=median(_critical),
            )
        )
    return rows


def _over(
    starts: list[Start], chosen: list[list[Timed]]
) -> Callable[[Callable[[Start, list[Timed]], float]], float]:
    def median(of: Callable[[Start, list[Timed]], float]) -> float:
        pairs = zip(starts, chosen, strict=True)
        return statistics.median(of(start, spans) for start, spans in pairs)

    return median


def _length(spans: list[Timed]) -> float:
    return sum(end - start for start, end in union((span.start, span.end) for span in spans))


def _critical(start: Start, spans: list[Timed]) -> float:
    path = critical_path(start.spans, start.began, start.first_token)
    return sum(part.seconds for part in path if part.span in spans)


def _lines(report: KindReport) -> list[str]:
    share = 100 * report.unaccounted_share
    lines = [
        f"{report.kind}: first token after {report.wall_s:.2f} s, ready after "
        f"{report.ready_s:.2f} s, unaccounted {report.unaccounted_s:.3f} s ({share:.1f}%); "
        f"{report.num_starts} starts, medians",
        f"  {'process':9} {'phase':22} {'times':>5} {'seconds':>8} {'waited':>8}",
    ]
    for row in report.phases:
        name = row.phase if row.is_leaf else f"{row.phase} +"
        waited = f"{row.critical_s:8.3f}" if row.critical_s >= _MIN_SHOWN_S else " " * 8
        lines.append(f"  {row.process:9} {name:22} {row.count:5} {row.seconds:8.3f} {waited}")
    lines.append("  critical path of the median start (+ above: has phases of its own within)")
    for process, phase, start, end in report.critical_path:
        if end - start >= _MIN_SHOWN_S:
            lines.append(f"  {start:8.3f} {end - start:8.3f} s  {process:9} {phase}")
    return lines
