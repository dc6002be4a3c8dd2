"""The commands as a person meets them: help, errors, exit status, `env`."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed.cli import env, pages
from tokenspeed.cli.main import COMMANDS, main
from tokenspeed.config import OPTIONS, Config
from tokenspeed.options import ConfigError, suggest
from tokenspeed.request import SamplingParams

EVERY = list(OPTIONS.values())


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("max_completion_tokens", SamplingParams.__struct_fields__, "max_tokens"),
        ("max_new_tokens", SamplingParams.__struct_fields__, "max_tokens"),
        ("temprature", SamplingParams.__struct_fields__, "temperature"),
        ("--max-seqs", [each.flag for each in EVERY], "--max-num-seqs"),
        ("prot", [each.flag for each in EVERY], "--port"),
        ("--temperature", [each.flag for each in EVERY], None),
        ("nonsense", [each.flag for each in EVERY], None),
    ],
)
def test_the_nearest_name_is_one_that_could_be_meant(
    name: str, known: Iterable[str], near: str | None
) -> None:
    assert suggest(name, known) == (f"; did you mean {near}?" if near else "")


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["help", "sreve"], "unknown command sreve; did you mean serve?"),
        (["help", "warmup", "--exprot"], "warmup: no option --exprot; did you mean --export?"),
        (["help", "serve", "prot"], "serve: no option prot; did you mean --port?"),
        (["help", "serve", "port", "host"], "help: explains one option at a time, got also 'host'"),
        (["help", "cache", "lss"], "lss is none; did you mean ls?"),
        (["help", "cache", "ls", "older-than"], "cache: no option older-than"),
        (["cache", "import", "./nowhere.tar"], "import: ./nowhere.tar: no such file"),
        (["cache", "import", "/"], "import: /: is a folder"),
        (["--help=nonsense"], "unknown command nonsense (known: serve, "),
        (["--port", "1"], "unknown command --port; options stand behind a command, as in: "),
        (["serve", "--help=nonsense"], "serve: no option nonsense; --help lists them all"),
        (["serve", "smolm2"], "bundled names: smollm2; did you mean smollm2?"),
        (["sreve"], "unknown command sreve; did you mean serve? (known: serve, "),
        (["serve", "--prot", "1"], "serve: unknown flag --prot; did you mean --port?"),
        (["serve", "--help=prot"], "serve: no option prot; did you mean --port?"),
        (["serve", "--help=zzz"], "serve: no option zzz; --help lists them all"),
        (["bench", "serve", "--help=compat"], "bench: no option compat; --help lists them all"),
        (["bench", "--help=num-promts"], "bench: no option num-promts; did you mean --num-prompts"),
        (["bench"], "bench: what is to be measured comes first, one of serve, "),
        (["cache"], "cache: what is to be done comes first, one of ls, "),
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["help", "serve"], "usage: tokenspeed serve"),
        (["help", "cache", "prune"], "--older-than AGE"),
        (["help", "serve", "--port"], "0 to 65535"),
        (["help", "serve", "port"], "0 to 65535"),
        (["--help=serve", "port"], "0 to 65535"),
        (["help", "serve", "compat"], "Flags of vLLM"),
        (["help", "cache", "prune", "older-than"], "12h, 30d"),
        (["help", "cache", "ls", "cache_dir"], "TOKENSPEED_CACHE_DIR"),
        (["help", "bench", "latency", "output-len"], "--output-len"),
        (["help", "warmup", "--export"], "into one archive"),
        (["help", "version"], "usage: tokenspeed version "),
        (["version", "-h"], "Print the version"),
        (["warmup", "--help=--export"], "into one archive"),
        (["warmup", "--help=autotune"], "measure which linear kernel"),
        (["batch", "--help=-i"], "-i, --input-file FILE"),
        (["batch", "--help=input_file"], "-i, --input-file FILE"),
        (["cache", "import", "--help=--sha256"], "anything else is refused"),
        (["explain", "--help=verify"], "load the weights"),
        (["serve", "--help=--config"], "YAML file"),
        (["help", "bench", "serve", "--num-prompts"], "1 to "),
    ],
)
def test_help_knows_every_flag_of_a_command(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("command", ["explain", "warmup", "batch", "cache why", "cache export"])
def test_help_of_what_does_not_serve_lists_no_port(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "--dtype" in text and "--port" not in text and "--api-key" not in text


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
    for fact in ("2 to 16777216", "TOKENSPEED_MAX_MODEL_LEN", "4k is 4000", "--context-length"):
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
    assert facts["PyTorch"] == torch.__version__ and "torch" not in facts, "it is said once"
    assert main(["env", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: tokenspeed env\n")


def test_env_names_every_package_that_is_used() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ours = ("cuda", "gguf", "client")
    extras = (each for name in ours for each in project["optional-dependencies"][name])
    needed = {re.split(r"[^\w-]", each)[0] for each in (*project["dependencies"], *extras)}
    assert needed <= set(env.PACKAGES)


def test_env_names_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # any program that has a --version
    assert dict(env.facts())["C++ compiler"].startswith(f"{sys.executable}: Python 3.")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "/nowhere")
    assert dict(env.facts())["C++ compiler"] == "not found"


def test_env_survives_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(env, "_TORCH_ERROR", "cannot be imported: OSError: libcuda.so.1")
    monkeypatch.setattr(env.Path, "read_text", broken)
    monkeypatch.setattr(env.subprocess, "run", broken)
    facts = dict(env.facts())
    assert facts["PyTorch"].startswith("cannot be imported")
    assert facts["CPU"] == "not found (OSError)"
