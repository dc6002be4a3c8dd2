"""The figures of known records, by hand; and the text and JSON that scripts read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.bench import serve_report
from tokenspeed.bench.answer import Record
from tokenspeed.bench.metrics import Summary, summarize
from tokenspeed.bench.serve_options import LoadOptions, OutputOptions, ServeOptions


def record(start: float, times: list[float], tokens: int, **keys: object) -> Record:
    fields = {"session": 0, "turn": 0, "input_len": 10, "max_tokens": tokens}
    fields |= {"chunk_times": times, "chunk_tokens": [0] * len(times)}
    fields |= {"latency": times[-1] if times else 0.0, "output_len": tokens}
    return Record(start=start, **{"is_counted_by_usage": True, **fields, **keys})


FOUR = [
    record(0.0, [0.1, 0.2, 0.3], 3),
    record(0.5, [0.2, 0.6], 5),
    record(1.0, [0.3], 1, is_counted_by_usage=False),
    record(1.1, [0.4], 0, failure="HTTP 500", detail="no\nroom"),
]


def summary(**limits: float) -> Summary:
    return summarize(FOUR, 2.0, percentiles=[50, 90], limits_ms=limits)


def test_figures_of_known_records() -> None:
    found = summary()
    assert (found.completed, found.failed, found.failures) == (3, 1, {"HTTP 500": 1})
    assert (found.total_input_tokens, found.total_output_tokens) == (30, 9)
    assert (found.num_counted_by_chunks, found.num_good) == (1, None)
    assert found.rate(found.completed) == 1.5
    ttft, tpot = found.times["ttft"], found.times["tpot"]
    assert (ttft.mean, ttft.median) == pytest.approx((200, 200))
    assert dict(ttft.percentiles) == pytest.approx({50: 200, 90: 280})
    assert tpot.mean == pytest.approx((100 + 100) / 2)  # the answer of one token has none
    assert found.times["itl"].mean == pytest.approx((100 + 100 + 400) / 3)
    assert found.times["e2el"].mean == pytest.approx((300 + 600 + 300) / 3)


def test_peaks() -> None:
    found = summary()
    # In the first second: 3 tokens of the first answer, 2.5 of the second.
    assert found.peak_output_tokens_per_s == pytest.approx(5.5)
    assert found.peak_concurrency == 2


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 250}, 2),
        ({"ttft": 250, "e2el": 400}, 1),
        ({"tpot": 50}, 1),  # only the answer without one
        ({"tpot": 100.1}, 3),
        ({"ttft": 0}, 0),
    ],
)
def test_goodput_keeps_all_limits(limits: dict[str, float], good: int) -> None:
    assert summary(**limits).num_good == good


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.001, 9)), min_size=1, max_size=30))
def test_peak_concurrency_is_the_most_at_any_start(spans: list[tuple[float, float]]) -> None:
    records = [record(start, [length], 1) for start, length in spans]
    found = summarize(records, 60.0, percentiles=[], limits_ms={}).peak_concurrency
    ends = [(start, start + length) for start, length in spans]
    assert found == max(sum(a <= at < b for a, b in ends) for at, _ in ends)


def test_nothing_measured_is_no_error() -> None:
    found = summarize([], 0.0, percentiles=[99], limits_ms={"ttft": 1})
    assert (found.completed, found.times, found.rate(3), found.num_good) == (0, {}, 0.0, 0)
    assert "Successful requests:" in serve_report.text(found, ServeOptions(), ["ttft"])


def test_labels_and_keys_are_those_that_scripts_know() -> None:
    options = ServeOptions(
        load=LoadOptions(max_concurrency=4, request_rate=2.0),
        output=OutputOptions(metadata=("gpu=none",)),
    )
    text = serve_report.text(summary(ttft=250), options, ["ttft", "e2el"])
    lines = dict(line.rsplit(maxsplit=1) for line in text.splitlines() if ":" in line)
    assert lines["Successful requests:"] == "3"
    assert lines["Failed requests:"] == "1"
    assert lines["Maximum request concurrency:"] == "4"
    assert lines["Request rate configured (RPS):"] == "2.00"
    assert lines["Request goodput (req/s):"] == "1.00"
    assert lines["Output token throughput (tok/s):"] == "4.50"
    assert lines["Total Token throughput (tok/s):"] == "19.50"
    assert lines["P90 TTFT (ms):"] == "280.00"
    assert "Mean TPOT (ms):" not in lines
    result = serve_report.as_json(summary(), options, "m", 0.5)
    result |= serve_report.details(FOUR)
    json.dumps(result, allow_nan=False)
    assert (result["completed"], result["request_throughput"], result["gpu"]) == (3, 1.5, "none")
    assert result["p90_ttft_ms"] == pytest.approx(280)
    assert result["errors"] == ["", "", "", "HTTP 500: no\nroom"]
    assert result["requests"][1]["chunk_times"] == [0.2, 0.6]


def test_a_reader_is_told_what_to_doubt() -> None:
    told = serve_report.notes(summary(), FOUR, client_share=0.95)
    assert told[0] == "failed: 1 x HTTP 500, such as: no room"
    assert "chunks were counted" in told[1] and "95%" in told[2]
    assert not serve_report.notes(summarize(FOUR[:1], 1, percentiles=[], limits_ms={}), [], 0.2)
