"""One book of compiles: what is counted, and what a compile is while requests run."""

from __future__ import annotations

import logging

import pytest

from tokenspeed import ledger
from tokenspeed.ledger import JitAfterReady, JitCount


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_counts", {})


def shapes() -> str:
    return "step 7 of 5 tokens in 2 rows"


def test_compiles_are_counted_by_kind_and_phase(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tokenspeed")
    ledger.report("inductor", "piece a", 2.0, "")
    ledger.report("inductor", "piece b", 1.0, "")
    ledger.report("tuning", "linear", 0.5, "")
    assert not caplog.records  # a start compiles, that is nothing to warn of
    with ledger.serving(shapes, forbid=False):
        ledger.report("inductor", "piece c", 4.0, "")
    assert ledger.totals() == (
        JitCount("inductor", "startup", 2, 3.0),
        JitCount("tuning", "startup", 1, 0.5),
        JitCount("inductor", "serving", 1, 4.0),
    )


def test_a_compile_that_holds_up_a_step_is_a_warning_with_its_shapes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ledger.serving(shapes, forbid=False), ledger.compiling("cpp", "k.so", "x: fp32"):
        pass
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert "cpp compiled k.so" in text and "x: fp32; step 7 of 5 tokens in 2 rows" in text


def test_where_it_is_forbidden_nothing_is_compiled() -> None:
    is_compiled = False
    with ledger.serving(shapes, forbid=True):
        with pytest.raises(JitAfterReady, match=r"tuning.*linear.*step 7 of 5 tokens"):
            with ledger.compiling("tuning", "linear", "no table"):
                is_compiled = True
    assert not is_compiled and ledger.totals() == ()
    with ledger.compiling("tuning", "linear", "no table"):  # after the step all is as before
        pass
    assert ledger.totals()[0].phase == "startup"


def test_a_compile_that_fails_is_not_counted() -> None:
    with pytest.raises(ValueError), ledger.compiling("cpp", "k.so", ""):
        raise ValueError
    assert ledger.totals() == ()


def test_what_a_child_compiled_is_added() -> None:
    ledger.report("inductor", "piece", 1.0, "")
    ledger.add([JitCount("inductor", "startup", 4, 2.5), JitCount("triton", "startup", 1, 0.5)])
    assert ledger.totals() == (
        JitCount("inductor", "startup", 5, 3.5),
        JitCount("triton", "startup", 1, 0.5),
    )
