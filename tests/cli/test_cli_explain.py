"""`tokenspeed explain` as it reads its words: what is handed over to whom, and what is refused."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed.cli.main import main


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was handed over; the work itself is not done."""
    found: list[tuple[Any, ...]] = []

    def record(name: str) -> Any:
        return lambda config, **arguments: found.append((name, config, arguments)) or 5

    for name in ("explain", "verify"):
        runner = SimpleNamespace(**{name: record(name)})
        monkeypatch.setitem(sys.modules, f"tokenspeed.engine.{name}", runner)
    return found


VERIFIED = {"as_json": False, "quarantine": False, "settings_file": None}


@pytest.mark.parametrize(
    ("words", "name", "arguments"),
    [
        ("m", "explain", {"as_json": False, "html": None}),
        ("m --json --dtype bfloat16", "explain", {"as_json": True, "html": None}),
        ("m --html page.html", "explain", {"as_json": False, "html": "page.html"}),
        ("m --verify", "verify", VERIFIED),
        ("m --verify --json", "verify", VERIFIED | {"as_json": True}),
        ("m --verify --quarantine", "verify", VERIFIED | {"quarantine": True}),
    ],
)
def test_what_is_handed_over(
    calls: list[tuple[Any, ...]], words: str, name: str, arguments: dict[str, Any]
) -> None:
    assert main(["explain", *words.split()]) == 5
    ((found, config, given),) = calls
    assert (found, given) == (name, arguments)
    assert config.model.model == "m"


def test_a_settings_file_is_written_only_for_a_quarantine(
    calls: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("dtype: float32\n")
    for extra in ([], ["--quarantine"]):
        assert main(["explain", "m", "--config", str(path), "--verify", *extra]) == 5
    assert [given["settings_file"] for _, _, given in calls] == [None, str(path)]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("m --quarantine", "--quarantine needs --verify"),
        ("m --verify --html f", "--html shows the receipt"),
        ("m --jsno", "unknown flag --jsno; did you mean --json?"),
        ("m n", "takes one model"),
        ("m --html", "--html needs a value"),
    ],
)
def test_what_is_refused(
    calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], words: str, error: str
) -> None:
    assert main(["explain", *words.split()]) == 2
    message = capsys.readouterr().err
    assert error in message and message.count("\n") == 1
    assert not calls


def test_real_runners_take_these_arguments() -> None:
    for name, given in (("explain", {"as_json", "html"}), ("verify", set(VERIFIED))):
        runner = getattr(importlib.import_module(f"tokenspeed.engine.{name}"), name)
        assert set(inspect.signature(runner).parameters) == {"config"} | given


def test_help_names_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--html FILE", "--json", "--verify", "--quarantine"))
