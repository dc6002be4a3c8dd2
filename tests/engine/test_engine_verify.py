"""`tokenspeed explain --verify`: right passes pass, and a wrong one is found, named, left out."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tiny import tiny_config
from torch import Tensor

from tokenspeed.compile.replay import LOWERING, Deviation, error_of, worst
from tokenspeed.engine import verify
from tokenspeed.engine.model import resolve_served
from tokenspeed.engine.program import target_of
from tokenspeed.engine.quarantine import disable_passes
from tokenspeed.options import ConfigError

pytestmark = pytest.mark.filterwarnings(  # from inside Inductor
    "ignore:.*torch.jit.script_method.*:DeprecationWarning"
)


def run(
    model: str, cache: Path, capsys: pytest.CaptureFixture[str], **arguments: Any
) -> tuple[int, str]:
    given = {"as_json": False, "quarantine": False, "settings_file": None} | arguments
    config = tiny_config(model, cache_dir=str(cache))
    return verify.verify(config, **given), capsys.readouterr().out


def wrong(name: str, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a pass another replacement, where its row finds it."""
    file = importlib.import_module(f"tokenspeed.passes.{name}")
    monkeypatch.setattr(file, "PASS", dataclasses.replace(file.PASS, replacement=change))


def scaled_silu(gate_up: Tensor) -> Tensor:
    gate, up = torch.split(gate_up, gate_up.shape[-1] // 2, -1)
    return torch.nn.functional.silu(gate) * up * 1.01


def test_right_passes(
    tiny_model: str, tiny_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run(tiny_model, tiny_cache, capsys)
    assert status == 0, text
    assert text.splitlines()[-1] == "all passes compute what the model says"
    rows = {tuple(line.split()[:3]) for line in text.splitlines()}
    assert ("add_rms_norm", "forward", "2") in rows
    assert (LOWERING, "forward", "2") in rows


def test_layers_are_those_of_the_model(tiny_model: str) -> None:
    config = tiny_config(tiny_model)
    model = resolve_served(config)
    found = verify.deviations(model, config, target_of(model, config), None)
    assert {each.layer for each in found if each.piece.startswith("forward")} == {0, 1, 2}


def test_a_wrong_pass_is_found_named_and_left_out(
    tiny_model: str,
    tiny_cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong("silu_mul", scaled_silu, monkeypatch)
    config = tiny_config(tiny_model, cache_dir=str(tiny_cache))
    model = resolve_served(config)
    found = verify.deviations(model, config, target_of(model, config), None)
    at_fault = [each for each in worst(found) if each.is_wrong]
    assert {(each.rule, each.piece) for each in at_fault} == {
        ("silu_mul", "forward 2"),
        ("silu_mul", "forward 3"),
    }
    layers = {each.layer for each in found if each.rule == "silu_mul" and each.is_wrong}
    assert layers == {0, 1, 2}

    monkeypatch.setattr(verify, "deviations", lambda *arguments: found)
    status, text = run(tiny_model, tiny_cache, capsys, quarantine=True)
    assert status == 1
    assert "at fault: silu_mul in forward 2, first in layer 0: off by" in text
    assert text.splitlines()[-1] == "--disable-pass silu_mul"
    path = tmp_path / "settings.yaml"
    path.write_text("dtype: float32  # as trained\n")
    run(tiny_model, tiny_cache, capsys, quarantine=True, settings_file=str(path))
    assert path.read_text() == "dtype: float32  # as trained\ndisable-pass: [silu_mul]\n"


def test_a_disabled_pass_is_not_run(tiny_model: str) -> None:
    config = tiny_config(tiny_model, disable_pass=("silu_mul",))
    model = resolve_served(config)
    found = verify.deviations(model, config, target_of(model, config), None)
    assert "silu_mul" not in {each.rule for each in found}
    assert not any(each.is_wrong for each in found)


def test_errors_are_relative_and_never_lost() -> None:
    one = torch.tensor([1.0, -1.0, 1.0, 100.0])
    assert error_of([one], [one.clone()]) == 0.0
    assert error_of([one * 1.001], [one]) == pytest.approx(0.001 * 100 / 150, rel=0.01)
    assert error_of([one[:3]], [one]) == float("inf")
    assert error_of([one.half()], [one]) == float("inf")
    spoiled = one.clone()
    spoiled[0] = float("nan")
    assert error_of([spoiled], [one]) == float("inf")
    assert error_of([3], [3]) == 0.0 and error_of([3], [4]) == float("inf")
    assert Deviation("a", "b", "all", 1, 0, float("nan"), 1.0).is_wrong


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "disable-pass: [rope]\n"),
        ("a: 1\n", "a: 1\ndisable-pass: [rope]\n"),
        ("disable_pass: [silu_mul]\nb: 2\n", "disable-pass: [silu_mul, rope]\nb: 2\n"),
        ("disable-pass: rope\n", "disable-pass: [rope]\n"),
    ],
)
def test_a_settings_file_keeps_the_rest(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(before)
    disable_passes(path, ["rope"])
    assert path.read_text() == after


def test_a_settings_file_that_cannot_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("disable-pass:\n  - silu_mul\nb: 2\n")
    with pytest.raises(ConfigError, match="is not one line; write there: disable-pass: "):
        disable_passes(path, ["rope"])
    assert path.read_text() == "disable-pass:\n  - silu_mul\nb: 2\n"
    with pytest.raises(ConfigError, match="cannot be changed"):
        disable_passes(tmp_path / "none.yaml", ["rope"])
