"""Triton's hooks, called as Triton calls them. (A GPU test compiles a real kernel.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed import ledger
from tokenspeed.kernels.triton_watch import watch
from tokenspeed.ledger import JitAfterReady


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ledger, "_counts", {})
    monkeypatch.setattr(ledger, "_watches_triton", False)
    return SimpleNamespace(
        compilation=SimpleNamespace(listener=None), runtime=SimpleNamespace(jit_cache_hook=None)
    )


def compiled(knobs: Any, cache_hit: bool) -> None:
    knobs.compilation.listener(
        src=SimpleNamespace(name="norm", signature={"x": "*fp32", "n": "i32"}),
        metadata={"name": "norm_kernel"},
        metadata_group={},
        times=SimpleNamespace(total=2_500_000),
        cache_hit=cache_hit,
    )


def test_compiles_are_counted_and_loads_are_not(
    knobs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert ledger.triton_totals() is None
    watch(knobs)
    compiled(knobs, cache_hit=True)
    assert ledger.triton_totals() == (0, 0.0)
    with ledger.serving(lambda: "3 rows", forbid=False):
        compiled(knobs, cache_hit=False)
    assert ledger.triton_totals() == (1, 2.5)
    assert "norm_kernel in 2.50 s after readiness: x: *fp32, n: i32; 3 rows" in caplog.text


def test_a_launch_that_would_compile_can_be_forbidden(knobs: Any) -> None:
    watch(knobs)
    hook = {"repr": "norm(x: *fp32)", "fn": SimpleNamespace(name="norm"), "key": "k"}
    assert knobs.runtime.jit_cache_hook(**hook) is None
    with ledger.serving(lambda: "3 rows", forbid=True), pytest.raises(JitAfterReady, match="norm"):
        knobs.runtime.jit_cache_hook(**hook)


def test_hooks_of_others_are_still_called(knobs: Any) -> None:
    called: list[str] = []
    knobs.compilation.listener = lambda **_: called.append("listener")
    knobs.runtime.jit_cache_hook = lambda **_: called.append("hook")
    watch(knobs)
    compiled(knobs, cache_hit=False)
    knobs.runtime.jit_cache_hook(repr="", fn=SimpleNamespace(name="norm"))
    assert called == ["listener", "hook"]
