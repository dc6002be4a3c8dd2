"""Figures of a run out of its records. Definitions of a request's times are in `answer.py`.

Only requests that succeeded count, in every figure but the number of failures. Throughputs are over
the whole duration, from the first request sent to the last that ended. Percentiles interpolate
linearly. The peak of output tokens is over whole seconds, a request's tokens spread evenly over its
chunks; that of requests is over instants.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from tokenspeed.bench.answer import Record
from tokenspeed.bench.serve_options import METRICS


class Spread(msgspec.Struct, frozen=True):
    """One figure over all requests, in ms. `percentiles` as (p, value)."""

    mean: float
    median: float
    std: float
    percentiles: list[tuple[float, float]]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    duration: float
    completed: int
    failed: int
    failures: dict[str, int]
    """Failed requests by kind."""
    total_input_tokens: int
    total_output_tokens: int
    num_counted_by_chunks: int
    """Completed requests whose output tokens no usage told: their chunks were counted."""
    num_good: int | None
    """Requests within all limits of goodput; None: no limits were given."""
    peak_output_tokens_per_s: float
    peak_concurrency: int
    times: dict[str, Spread]
    """By name: ttft, tpot, itl, e2el. A figure that no request has is not there."""

    def rate(self, count: float) -> float:
        return count / self.duration if self.duration > 0 else 0.0


def summarize(
    records: Sequence[Record],
    duration: float,
    *,
    percentiles: Sequence[float],
    limits_ms: Mapping[str, float],
) -> Summary:
    """The figures; `limits_ms` are those of goodput, by name."""
    good = [record for record in records if record.failure is None]
    values = {
        name: [each for record in good for each in times_ms(record, name)] for name in METRICS
    }
    return Summary(
        duration=duration,
        completed=len(good),
        failed=len(records) - len(good),
        failures=dict(Counter(each.failure for each in records if each.failure is not None)),
        total_input_tokens=sum(record.input_len for record in good),
        total_output_tokens=sum(record.output_len for record in good),
        num_counted_by_chunks=sum(not record.is_counted_by_usage for record in good),
        num_good=sum(is_within(record, limits_ms) for record in good) if limits_ms else None,
        peak_output_tokens_per_s=_peak_tokens(good),
        peak_concurrency=_peak_requests(records),
        times={name: _spread(found, percentiles) for name, found in values.items() if found},
    )


def times_ms(record: Record, name: str) -> list[float]:
    """The values of one figure that a request adds: none or one; of itl each gap."""
    match name:
        case "ttft":
            return [1e3 * record.ttft]
        case "tpot":
            return [] if record.tpot is None else [1e3 * record.tpot]
        case "itl":
            return [1e3 * gap for gap in record.itls]
        case "e2el":
            return [1e3 * record.latency]
    raise ValueError(f"{name} is none of {', '.join(METRICS)}")


def is_within(record: Record, limits_ms: Mapping[str, float]) -> bool:
    """Whether a request that succeeded keeps all limits. It keeps one on what it does not have."""
    return all(
        value <= limit for name, limit in limits_ms.items() for value in times_ms(record, name)
    )


def _spread(values: list[float], percentiles: Sequence[float]) -> Spread:
    found = np.asarray(values)
    return Spread(
        mean=float(found.mean()),
        median=float(np.median(found)),
        std=float(found.std()),
        percentiles=[(p, float(np.percentile(found, p))) for p in percentiles],
    )


def _peak_tokens(records: Iterable[Record]) -> float:
    seconds: defaultdict[int, float] = defaultdict(float)
    for record in records:
        for at in record.chunk_times:
            seconds[math.floor(record.start + at)] += record.output_len / len(record.chunk_times)
    return max(seconds.values(), default=0.0)


def _peak_requests(records: Iterable[Record]) -> int:
    edges = [(each.start, 1) for each in records]
    edges += [(each.start + each.latency, -1) for each in records]
    open_now = most = 0
    for _, step in sorted(edges):
        open_now += step
        most = max(most, open_now)
    return most
