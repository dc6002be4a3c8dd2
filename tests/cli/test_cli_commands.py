"""The commands as a person meets them: help, errors, exit status, `env`."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed.cli import env, pages
from tokenspeed.cli.main import COMMANDS, main
from tokenspeed.config import OPTIONS, Config
from tokenspeed.options import ConfigError

EVERY = list(OPTIONS.values())


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sreve"], "unknown command sreve; did you mean serve? (known: serve, "),
        (["serve", "--prot", "1"], "serve: unknown flag --prot; did you mean --port?"),
        (["serve", "--help=prot"], "serve: no option prot; did you mean --port?"),
        (["batch"], "batch: needs -i FILE"),
        (["batch", "-i", "in"], "batch: needs -o FILE"),
        (["batch", "-i", "in", "-o", "out", "--port", "1"], "batch: unknown flag --port"),
        (["batch", "-i", "in", "-o", "out", "--enable-metrics"], "unknown flag --enable-metrics"),
        (["batch", "-i", "in", "-o", "out", "--concurrency", "0"], "must be from 1 to 65536"),
        (["batch", "-i", "in", "-o", "out", "--concurrency", "9" * 99], "must be from 1 to 65536"),
        (["batch", "-i", "in", "-o", "out", "--concurrency", "-1"], "must be from 1 to 65536"),
        (["version", "now"], "version: takes no options"),
        (["env", "--all"], "env: takes no options"),
    ],
)
def test_errors_are_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("tokenspeed: error: ")
    assert captured.err.count("\n") == 1 and not captured.out


def test_commands_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives its settings to the function that does the work, and its status back."""
    calls: list[tuple[Any, ...]] = []
    runner = SimpleNamespace(
        serve=lambda config: calls.append((config,)) or 3,
        batch=lambda config, *files, **options: calls.append((config, *files, options)) or 4,
    )
    monkeypatch.setitem(sys.modules, "tokenspeed.server.serve", runner)
    monkeypatch.setitem(sys.modules, "tokenspeed.server.batch", runner)
    assert main(["serve", "m", "--port", "1"]) == 3
    assert main(["batch", "m", "-i", "in", "--output-file", "out", "--concurrency", "5"]) == 4
    (served,), (config, *rest) = calls
    assert (served.model.model, served.server.port, config.model.model) == ("m", 1, "m")
    assert rest == ["in", "out", {"concurrency": 5}]


def test_a_runner_that_matches_the_real_one() -> None:
    serve = inspect.signature(importlib.import_module("tokenspeed.server.serve").serve)
    serve.bind(Config())
    batch = inspect.signature(importlib.import_module("tokenspeed.server.batch").batch)
    batch.bind(Config(), "in", "out", concurrency=None)


def test_serve_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for option in EVERY:
        flag = "--[no-]" + option.flag[2:] if option.kind is bool else option.flag
        assert flag in text
    assert "Examples" in text
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize("topic", ["max-model-len", "max_model_len", "--context-length"])
def test_help_of_one_option(topic: str) -> None:
    text = pages.explain(topic, EVERY)
    for fact in ("1 to 16777216", "TOKENSPEED_MAX_MODEL_LEN", "4k is 4000", "--context-length"):
        assert fact in text


@pytest.mark.parametrize(
    ("words", "topic"),
    [
        (["--port", "1"], None),
        (["--port", "-h"], ""),
        (["--help=tp"], "tp"),
        (["--", "--help"], None),
    ],
)
def test_help_is_found_anywhere(words: list[str], topic: str | None) -> None:
    assert pages.wanted(words) == topic


def test_help_of_an_unknown_option() -> None:
    with pytest.raises(ConfigError, match="did you mean --port"):
        pages.explain("prot", EVERY)


def test_env_prints_a_fact_a_line_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("TOKENSPEED_API_KEY", "hunter2")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "hunter2" not in text
    facts = dict(line.partition(": ")[::2] for line in text.splitlines() if line[0] != " ")
    for key in ("TokenSpeed", "Python", "PyTorch", "CUDA available", "GPUs", "Driver", "msgspec"):
        assert facts[key]
    assert facts["HF_TOKEN"] == "(set, not shown)"


def test_env_survives_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(env, "_TORCH_ERROR", "cannot be imported: OSError: libcuda.so.1")
    monkeypatch.setattr(env.Path, "read_text", broken)
    monkeypatch.setattr(env.subprocess, "run", broken)
    facts = dict(env.facts())
    assert facts["PyTorch"].startswith("cannot be imported")
    assert facts["CPU"] == "not found (OSError)"
