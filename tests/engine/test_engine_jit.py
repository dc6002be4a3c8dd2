"""A compile after readiness: a warning by default; on demand an error that ends one request."""

from __future__ import annotations

import logging

import pytest
from engine_tiny import request, run, tiny_engine
from torch import Tensor, nn

from tokenspeed import ledger
from tokenspeed.compile.plan import Program
from tokenspeed.compile.runner import Executable
from tokenspeed.engine import build

RARE = 198
"""A step with this token needs a kernel that nobody has warmed up."""


class Compiling:
    """The real program, but for steps that hold the rare token: those compile something first."""

    def __init__(self, program: Program, module: nn.Module) -> None:
        self._real = Executable(program, module)

    def embed(self, ids: Tensor) -> Tensor:
        if bool((ids == RARE).any()):
            with ledger.compiling("triton", "rare_kernel", f"{len(ids)} ids"):
                pass
        return self._real.embed(ids)

    def forward(self, x: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        return self._real.forward(x, positions, rows)

    def head(self, rows: Tensor) -> Tensor:
        return self._real.head(rows)


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "Executable", Compiling)
    monkeypatch.setattr(ledger, "_counts", {})


def requests() -> list[object]:
    return [request("a", [1, 2, 3]), request("rare", [4, RARE]), request("b", [5, 6])]


@pytest.mark.parametrize("serial", [True, False])
def test_an_error_ends_the_request_that_needs_the_compile_and_no_other(
    tiny_model: str, serial: bool
) -> None:
    engine = tiny_engine(
        tiny_model, level=0, jit_after_ready="error", disable_overlap_schedule=serial
    )
    found = run(engine, requests())  # type: ignore[arg-type]
    assert found["rare"].finish_reason == "error" and found["rare"].token_ids == []
    assert "JitAfterReady: triton would compile rare_kernel" in str(found["rare"].error)
    assert {len(found[name].token_ids) for name in "ab"} == {12}
    assert found["a"].finish_reason == found["b"].finish_reason == "length"
    assert engine.stats.jit == ()


def test_a_warning_names_the_shapes_and_stats_count_it(
    tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine(tiny_model, level=0)
    caplog.set_level(logging.WARNING, logger="tokenspeed")
    found = run(engine, requests())  # type: ignore[arg-type]
    assert all(len(outcome.token_ids) == 12 for outcome in found.values())
    (count,) = engine.stats.jit
    assert (count.kind, count.phase, count.count) == ("triton", "serving", 1)
    assert "of 7 tokens in 3 rows" in caplog.text and "7 ids" in caplog.text
