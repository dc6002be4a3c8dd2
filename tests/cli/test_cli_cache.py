"""`tokenspeed warmup` and `cache` as they read their words: settings, limits, digests, refusals."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed.cli.cache import ACTIONS
from tokenspeed.cli.main import main

DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was handed over; the work itself is not done."""
    found: list[tuple[Any, ...]] = []
    runner = SimpleNamespace(
        run=lambda action, config, **arguments: found.append((action, config, arguments)) or 5,
        warmup=lambda configs, export, **options: found.append((configs, export, options)) or 6,
    )
    monkeypatch.setitem(sys.modules, "tokenspeed.engine.cache_commands", runner)
    monkeypatch.setitem(sys.modules, "tokenspeed.engine.cache_upkeep", runner)
    monkeypatch.setitem(sys.modules, "tokenspeed.engine.warmup", runner)
    return found


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("ls", {"as_json": False}),
        ("ls --json", {"as_json": True}),
        ("verify --json", {"as_json": True}),
        ("why m --dtype bfloat16 --port 1", {"as_json": False}),
        ("export m --output f", {"output": "f"}),
        (f"import {__file__} --sha256 {DIGEST}", {"path": __file__, "sha256": DIGEST}),
        (f"import {__file__} --trust", {"path": __file__, "sha256": None}),
        ("prune --all", {"max_age_s": None, "max_bytes": 0, "is_dry": False}),
        ("prune --older-than 2h", {"max_age_s": 7200, "max_bytes": None, "is_dry": False}),
        ("prune --max-size 2K --dry-run", {"max_age_s": None, "max_bytes": 2048, "is_dry": True}),
    ],
)
def test_an_action_gets_its_arguments(
    calls: list[tuple[Any, ...]], words: str, arguments: dict[str, Any]
) -> None:
    assert main(["cache", *words.split(), "--cache-dir", "/c"]) == 5
    ((action, config, given),) = calls
    assert (action, given) == (words.split()[0], arguments)
    assert config.compile.cache_dir == "/c"
    assert config.model.model == ("m" if " m " in words else "smollm2")


def test_a_real_action_takes_them() -> None:
    real = {name: importlib.import_module(action.runner) for name, action in ACTIONS.items()}
    assert sum(len(module.ACTIONS) for module in set(real.values())) == len(ACTIONS)
    for name, arguments in {
        "ls": ["as_json"],
        "why": ["as_json"],
        "verify": ["as_json"],
        "prune": ["max_age_s", "max_bytes", "is_dry"],
        "export": ["output"],
        "import": ["path", "sha256"],
    }.items():
        function = inspect.signature(real[name].ACTIONS[name])
        config = [None] if "config" in function.parameters else []
        function.bind(None, *config, **dict.fromkeys(arguments))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "cache lss",
            "comes first, one of ls, why, prune, verify, export, import; lss is none; did you",
        ),
        ("cache", "what is to be done comes first, one of ls, why, "),
        ("cache ls x", "ls: takes no words, got 'x'"),
        ("cache ls --port 1", "ls: unknown flag --port"),
        ("cache prune", "needs --older-than AGE, --max-size SIZE or --all"),
        ("cache prune --older-than 3", "must be a number and s, m, h, d or w"),
        ("cache prune --older-than -3d", "--older-than needs a value"),
        ("cache prune --max-size lots", "--max-size must be a whole number"),
        ("cache prune x --all", "takes no words"),
        ("cache export m", "export: needs --output FILE"),
        ("cache import", "import: takes one FILE, got 0"),
        ("cache import a b --trust", "import: takes one FILE, got 2"),
        (
            f"cache import {__file__}",
            "an archive is code, which starts will run as you: give --sha256",
        ),
        (f"cache import {__file__} --sha256 abc", "must be 64 hexadecimal digits, got 'abc'"),
        ("warmup --levels 7", "--levels must be one of: 0, 1, 2, 3; got 7"),
        ("warmup --dtype int8", "--dtype must be one of: auto, "),
        ("warmup a b", "takes one model"),
        ("warmup --port 1", "unknown flag --port"),
        ("warmup --dump-passes d --dtype float32 half", "one program: give one --dtype"),
    ],
)
def test_refusals_are_one_line(
    calls: list[tuple[Any, ...]], words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not calls


def test_a_warmup_is_for_each_dtype_and_level(calls: list[tuple[Any, ...]]) -> None:
    words = "warmup m --dtype float32 --levels 1 --dtype bfloat16 half --export f"
    assert main(words.split()) == 6
    ((configs, export, options),) = calls
    assert options == {"autotune": False}
    assert [each.model.dtype for each in configs] == ["float32", "bfloat16", "half"]
    assert {(each.model.model, each.compile.level) for each in configs} == {("m", 1)}
    assert export == "f"


def test_a_warmup_takes_what_serve_takes(
    calls: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.yaml").write_text("dtype: bfloat16\nmodel: m\nport: 1\n")
    monkeypatch.setenv("TOKENSPEED_CACHE_DIR", "/c")
    assert main(["warmup", "--config", str(tmp_path / "s.yaml"), "-O0"]) == 6
    (((config,), export, _),) = calls
    assert (config.model.dtype, config.model.model, config.compile.level) == ("bfloat16", "m", 0)
    assert (config.compile.cache_dir, export) == ("/c", None)


def test_a_warmup_measures_and_dumps_if_asked_to(calls: list[tuple[Any, ...]]) -> None:
    assert main("warmup m --autotune --dump-passes d --compile-ranges 8".split()) == 6
    (((config,), _, options),) = calls
    assert options == {"autotune": True}
    assert (config.compile.dump_passes, config.compile.compile_ranges) == ("d", (8,))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("warmup --help", "--levels N ..."),
        ("warmup --help", "--autotune"),
        ("help cache", "import FILE"),
        ("cache --help", "--older-than AGE"),
        ("cache import --help", "--sha256 DIGEST"),
        ("cache why --help=dtype", "TOKENSPEED_DTYPE"),
        ("cache ls --print-config", "cache_dir: "),
    ],
)
def test_help(
    calls: list[tuple[Any, ...]], words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert says in text and all(len(line) <= 100 for line in text.splitlines())
    assert not calls


@pytest.mark.parametrize("name", ACTIONS)
def test_the_help_of_an_action_is_about_it_alone(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: tokenspeed cache {name} ")
    assert set(re.findall(r"tokenspeed cache (\w+)", text)) == {name}
    examples = text[text.index("Examples") :].splitlines()[1:]
    assert examples[0].startswith(f"  tokenspeed cache {name}")
    own = {flag.split()[0] for flag in ACTIONS[name].own}
    others = {flag.split()[0] for action in ACTIONS.values() for flag in action.own} - own
    shown = set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE))
    assert own <= shown and not others & shown
    assert ("The HTTP face" in text) == ACTIONS[name].takes_model
    assert {"--cache-dir", "--log-level"} <= shown
