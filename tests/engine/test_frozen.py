"""Garbage collection is the whole process's: engines share it with each other and with the program
around them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tokenspeed.engine import frozen
from tokenspeed.engine.frozen import freeze_for, thaw


class Engine:
    """Whatever may be frozen for."""


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is frozen, and engines of other tests are out of the way."""
    monkeypatch.setattr(frozen, "_holders", weakref.WeakSet())
    monkeypatch.setattr(frozen, "_is_ours", False)
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_frozen_for_two_stays_until_both_are_gone(first: int) -> None:
    engines = [Engine(), Engine()]
    for engine in engines:
        freeze_for(engine)
    thaw(engines[first])
    thaw(engines[first])
    assert gc.get_freeze_count()
    thaw(engines[1 - first])
    assert not gc.get_freeze_count()


def test_an_engine_that_was_dropped_holds_up_no_other() -> None:
    dropped, engine = Engine(), Engine()
    freeze_for(dropped)
    freeze_for(engine)
    del dropped
    thaw(engine)
    assert not gc.get_freeze_count()


def test_what_the_program_froze_itself_stays() -> None:
    gc.freeze()
    engine = Engine()
    freeze_for(engine)
    thaw(engine)
    assert gc.get_freeze_count()
