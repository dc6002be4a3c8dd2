"""The offline definitions, with an engine whose times are known; and both commands, whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenspeed.bench.workloads import (
    latency_workloads,
    measure,
    prompts,
    throughput_workloads,
)
from tokenspeed.cli.main import main

SMALL = ["--device", "cpu", "-O0", "--max-total-tokens", "1024", "--num-iters", "2"]


class Clock:
    """An engine that takes 2 ms a prompt token and 10 ms a step."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def __call__(self, ids: list[list[int]], count: int) -> float:
        (length,) = {len(each) for each in ids}
        self.asked.append((len(ids), length, count))
        return 0.002 * length * len(ids) + 0.01 * (count - 1)


def test_figures_follow_from_times() -> None:
    clock = Clock()
    workloads = latency_workloads([1, 4], 8, 16, [32]) + throughput_workloads(3, 50, 4, 10, 5)
    found = {each.name: each for each in measure(workloads, clock, 500, num_iters=3)}
    medians = {name: each.median for name, each in found.items()}
    assert medians == pytest.approx(
        {
            "decode1": 10,
            "decode4": 10,
            "ttft32": 64,
            "prefill": 3 * 50 / (0.002 * 150),
            "mixed": 4 * 5 / (0.002 * 40 + 0.04),
        }
    )
    assert all(len(each.runs) == 3 for each in found.values())
    # Each is warmed up once; a step takes two calls, of n + 1 tokens and of 1.
    assert clock.asked[:7] == [(1, 8, 4), *[(1, 8, 17), (1, 8, 1)] * 3]
    assert clock.asked.count((1, 32, 1)) == 4


def test_the_median_hides_a_slow_run() -> None:
    times = iter([0.0, 1.0, 9.0, 1.5])
    (workload,) = latency_workloads([], ttft_lens=[4])
    (found,) = measure([workload], lambda ids, count: next(times), 500, num_iters=3)
    assert (found.median, found.runs, found.host_ms) == (1500, [1000, 9000, 1500], None)


def test_the_hosts_part_is_taken_as_the_figure_is() -> None:
    """A run that is not counted is not counted here either; of a speed there is none."""
    stamps = iter([5.0, 5.9, 5.9, 6.0, 7.0, 7.6, 7.6, 7.7, 8.0, 8.25])
    workloads = latency_workloads([2], 8, 16, [32])
    found = measure(workloads[:1], Clock(), 500, 2, lambda: next(stamps))
    assert next(found).host_ms == pytest.approx(1e3 * ((0.9 - 0.1) + (0.6 - 0.1)) / 16 / 2)
    (first,) = latency_workloads([], ttft_lens=[4])
    (result,) = measure([first], Clock(), 500, 1, lambda: next(stamps))
    assert result.host_ms == 250
    result, _ = measure(throughput_workloads(3, 50, 4, 10, 5), Clock(), 500, 1, lambda: 1.0)
    assert result.host_ms is None


def test_the_published_workloads() -> None:
    named = {each.name: each for each in (*latency_workloads(), *throughput_workloads())}
    assert list(named) == [
        *("decode1", "decode8", "decode64", "decode256", "ttft128", "ttft8192"),
        *("prefill", "mixed"),
    ]
    shapes = [(each.num_prompts, each.input_len, each.output_len) for each in named.values()]
    assert shapes[3:6] == [(256, 128, 129), (1, 128, 1), (1, 8192, 1)]
    assert shapes[6:] == [(32, 4096, 1), (256, 1024, 256)]
    assert [each.is_speed for each in named.values()] == [False] * 6 + [True] * 2


def test_prompts_share_no_beginning() -> None:
    found = prompts(256, 128, 150000)
    assert len({tuple(each[:4]) for each in found}) == 256
    assert all(0 <= token < 199 for each in prompts(9, 40, 199) for token in each)


def test_latency_of_a_model(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    words = ["bench", "latency", tiny_model, *SMALL, "--batch-size", "1", "3", "--input-len", "6"]
    words += ["--output-len", "4", "--ttft-len", "9", "999", "--output-json", str(path)]
    assert main(words) == 0
    said = capsys.readouterr()
    report = json.loads(path.read_bytes())
    names = [each["name"] for each in report["results"]]
    assert names == ["decode1", "decode3", "ttft9"]
    assert all(min(each["runs"]) > 0 for each in report["results"])
    assert "ttft999: left out" in said.err and "tokens/s" in said.out
    for each in report["results"]:
        assert 0 < each["host_ms"] and f"host {each['host_ms']:.3f} ms" in said.out
    assert report["machine"]["cores"] and "level 0" in report["engine"]


def test_throughput_of_a_model(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "throughput", tiny_model, *SMALL, "--prefill-prompts", "2", "--json"]
    words += ["--prefill-len", "20", "--num-prompts", "3", "--input-len", "7", "--output-len", "5"]
    assert main(words) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(each["name"], each["unit"]) for each in results] == [
        *(("prefill", "prompt tokens/s"), ("mixed", "output tokens/s")),
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["latency", "--batch-size", "0"],
        ["latency", "--num-iters", "x"],
        ["latency", "--port", "1"],
        ["throughput", "--batch-size", "1"],
        ["throughput", "--output-len", "1"],
    ],
)
def test_what_cannot_be_timed_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "/nowhere/at/all"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
