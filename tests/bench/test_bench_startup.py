"""`tokenspeed bench startup`, whole: real servers of a tiny model, their records, a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenspeed.bench.child_server import StartFailed, serving
from tokenspeed.bench.startup import Plan, measure
from tokenspeed.cli.main import main

SMALL = ["--skip-tokenizer-init", "--device", "cpu", "--max-total-tokens", "1024"]


def test_a_start_is_accounted_for(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    words = ["bench", "startup", tiny_model, "-O0", "--runs", "1", "--json", "--trace", str(trace)]
    assert main([*words, *SMALL]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["num_starts"]) == ("warm", 1)
    phases = {(row["process"], row["phase"]) for row in report["phases"]}
    assert phases >= {
        *(("http", phase) for phase in ("process.import", "tokenizer.load", "first_token")),
        *(("engine", phase) for phase in ("process.import", "weights.read_copy", "kv.build")),
    }
    assert 0 <= report["unaccounted_share"] < 0.25  # the aim is 0.05; the machine is shared
    path = report["critical_path"]
    assert path[0][1] == "process.import" and path[-1][3] == pytest.approx(report["wall_s"])
    names = {each["name"] for each in json.loads(trace.read_bytes())["traceEvents"]}
    assert {"scheduler.init", "http.ready", "process_name"} <= names


def test_a_server_that_does_not_start_says_why() -> None:
    plan = Plan({"model": "/nowhere/at/all", "level": 0}, 1, False, [1], None)
    with pytest.raises(StartFailed, match="/nowhere/at/all"):
        measure(plan, lambda line: None)
    with pytest.raises(StartFailed, match="/nowhere/at/all"), serving(plan.settings):
        pytest.fail("it serves")


@pytest.mark.parametrize(
    "words", [[], ["shutdown"], ["startup", "--runs", "0"], ["startup", "--port", "1"]]
)
def test_what_cannot_be_measured_is_refused(words: list[str]) -> None:
    assert main(["bench", *words]) == 2
