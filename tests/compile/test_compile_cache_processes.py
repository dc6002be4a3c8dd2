"""Several processes at one cache: one compiles, the others wait; nobody waits for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from compile_entries import FACTS, fill, found

from tokenspeed.compile import locks
from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.entry import Contents

SLOW = """
import sys, time
from pathlib import Path
import compile_entries as t
from tokenspeed.compile.cache import CompileCache
def fill(folder):
    print("filling", flush=True)
    time.sleep(float(sys.argv[2]))
    return t.fill(folder)
waits = []
CompileCache(Path(sys.argv[1])).store(t.FACTS, "m", fill, lambda: waits.append(1))
print("waited" if waits else "did not wait")
"""


@pytest.fixture
def start() -> Iterator[Callable[[Path, float], subprocess.Popen[str]]]:
    """Start processes that store the same entry, taking their time."""
    processes = []

    def run(root: Path, seconds: float) -> subprocess.Popen[str]:
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", SLOW, str(root), str(seconds)],
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parent,
            )
        )
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_of_two_that_start_together_one_compiles(
    tmp_path: Path, start: Callable[[Path, float], subprocess.Popen[str]]
) -> None:
    both = [start(tmp_path, 1.0) for _ in range(2)]
    said = sorted(process.communicate(timeout=60)[0] for process in both)
    assert said == ["filling\ndid not wait\n", "waited\n"]
    found(CompileCache(tmp_path))


def test_who_was_killed_does_not_block_the_next(
    tmp_path: Path, start: Callable[[Path, float], subprocess.Popen[str]]
) -> None:
    first = start(tmp_path, 60.0)
    assert first.stdout and first.stdout.readline() == "filling\n"
    assert list((tmp_path / "v1").glob(".build-*"))
    first.send_signal(signal.SIGKILL)
    first.wait()
    CompileCache(tmp_path).store(FACTS, "m", fill)
    assert not list((tmp_path / "v1").glob(".build-*"))


def test_without_locks_the_first_that_is_done_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, inner = CompileCache(tmp_path), []

    def no_locks(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)

    def fill_late(folder: Path) -> Contents:
        inner.append(cache.store(FACTS, "m", fill))
        return fill(folder)

    assert cache.store(FACTS, "m", fill_late) == inner[0]
    assert len(list((cache.root / "v1").glob("[!.]*"))) == 1


def test_one_who_holds_the_lock_for_ever_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_MAX_WAIT_S", 0.3)
    monkeypatch.setattr(locks, "_POLL_S", 0.05)
    cache, waits = CompileCache(tmp_path), []

    def fill_meanwhile(folder: Path) -> Contents:
        cache.store(FACTS, "m", fill, lambda: waits.append(1))
        return fill(folder)

    cache.store(FACTS, "m", fill_meanwhile)
    assert waits
