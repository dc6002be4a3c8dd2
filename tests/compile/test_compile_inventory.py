"""What people are told of a cache, and what may be removed from it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from compile_entries import FACTS, PIECE, fill, found, missed
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import ENVIRONMENT, KEY, all_kinds, triton_kernel
from test_compile_key import BASE

from tokenspeed.compile import fitness, installation
from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.entry import READY, Contents, Entry
from tokenspeed.compile.fitness import Fitness
from tokenspeed.compile.installation import TorchBuild, torch_build
from tokenspeed.compile.inventory import (
    Item,
    KernelSet,
    Limits,
    beyond,
    items,
    kernel_sets,
    verified,
    verified_kernels,
)
from tokenspeed.compile.kernel_store import SUMS, store_kernel
from tokenspeed.compile.key import machine_facts

TORCH = torch_build() or TorchBuild("", "", None)
OTHER = FACTS | {"compile": {"dtype": "bfloat16"}}


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    """Two entries, and things that are none."""
    cache = CompileCache(tmp_path / "root")
    first = cache.store(FACTS, "first", fill)
    cache.store(OTHER, "second", fill)
    (cache.root / "v1" / "notes").mkdir()
    (cache.root / "v1" / "a-file-0123456789abcdef").write_text("")
    (cache.root / "v1" / "a-link-0123456789abcdef").symlink_to(first.folder)
    return cache


def by_model(found: list[Item]) -> dict[str, Item]:
    return {item.name.rpartition("-")[0]: item for item in found}


def test_entries_are_listed_and_nothing_else(cache: CompileCache) -> None:
    found = by_model(items(cache))
    assert found.keys() == {"first", "second"} == by_model(verified(cache)).keys()
    item = found["first"]
    assert item.bytes == sum(path.stat().st_size for path in item.folder.rglob("*.*")) + 64
    assert time.time() - item.made < 60 and item.problem is None
    assert item.manifest is not None and item.manifest.facts == FACTS


def test_an_empty_cache_has_no_entries(tmp_path: Path) -> None:
    assert items(CompileCache(tmp_path / "none")) == verified(CompileCache(tmp_path / "none")) == []


def test_what_is_damaged_is_named_and_left_alone(cache: CompileCache) -> None:
    first, second = (item.folder for item in items(cache))
    os.truncate(first / PIECE, 3)
    (second / "READY").unlink()
    (cache.root / "v1" / "foreign-0123456789abcdef").mkdir()
    first.rename(first.with_name("first-ffffffffffffffff"))
    found = by_model(verified(cache))
    assert found["first"].problem == f"{PIECE} is not what was written"
    assert found["second"].problem == found["foreign"].problem == "it was never finished"
    assert by_model(items(cache))["first"].problem == "its facts are not those of its name"
    assert len(items(cache)) == 3


def test_what_others_may_write_is_named(cache: CompileCache) -> None:
    (items(cache)[0].folder / PIECE).chmod(0o666)
    assert "others may write" in (verified(cache)[0].problem or "")
    (cache.root / "v1").chmod(0o777)
    with pytest.raises(OSError, match="others may write"):
        items(cache)


def test_sets_of_kernels_are_counted_and_checked(cache: CompileCache) -> None:
    assert kernel_sets(cache) == verified_kernels(cache) == []
    for kernel in (*all_kinds(), triton_kernel(environment="0" * 16)):
        store_kernel(cache.root, kernel)
    found = {each.name: each for each in kernel_sets(cache)}
    assert {name: each.count for name, each in found.items()} == {
        f"triton/{'0' * 16}": 1,
        f"triton/{ENVIRONMENT}": 2,
        f"flashinfer/{ENVIRONMENT}": 1,
    }
    each = found[f"triton/{ENVIRONMENT}"]
    assert each.bytes == sum(path.stat().st_size for path in each.folder.glob("*/*"))
    assert time.time() - each.made < 60
    assert all(each.problem is None for each in verified_kernels(cache))
    os.truncate(each.folder / KEY / "fill.json", 1)
    assert all(each.problem is None for each in kernel_sets(cache)), "files are not read"
    (other,) = (each for each in verified_kernels(cache) if each.problem)
    assert other.problem == f"{KEY}: fill.json is not what was written"
    for folder in each.folder.iterdir():
        (folder / SUMS).unlink()
    (other,) = (each for each in verified_kernels(cache) if each.problem)
    assert other.problem == f"{KEY}: {SUMS} is gone, or no file; and 1 more"
    each.folder.chmod(0o777)
    (other,) = (each for each in kernel_sets(cache) if each.problem)
    assert "others may write" in str(other.problem) and other.count == 0


def test_limits_go_for_sets_as_well() -> None:
    now = time.time()
    entry = Item(Path("a"), 10, now - 9, None, None)
    kernels = KernelSet(Path("triton/b"), 3, 10, now - 99, None)
    found = beyond([entry, kernels], Limits(max_bytes=19))
    assert [each.name for each in found] == ["triton/b"]


def test_limits_keep_the_youngest() -> None:
    now = time.time()
    found = [Item(Path(name), 10, now - age, None, None) for name, age in (("a", 9), ("b", 99))]

    def gone(**limits: int) -> str:
        return "".join(item.name for item in beyond(found, Limits(**limits)))

    assert gone() == ""
    assert (gone(max_age_s=1000), gone(max_age_s=50), gone(max_age_s=1)) == ("", "b", "ba")
    assert (gone(max_bytes=20), gone(max_bytes=19), gone(max_bytes=0)) == ("", "b", "ba")
    assert gone(max_age_s=50, max_bytes=10) == "b"


@given(
    sizes=st.lists(st.integers(0, 4), max_size=6),
    max_bytes=st.integers(0, 12),
)
@example(sizes=[3, 1], max_bytes=2)
def test_what_is_longest_unused_goes_first(sizes: list[int], max_bytes: int) -> None:
    """Of entries, the one used last first, a beginning stays: the longest that is small enough."""
    now = time.time()
    entries = [Item(Path(str(age)), size, now - age, None, None) for age, size in enumerate(sizes)]
    gone = beyond(entries, Limits(max_bytes=max_bytes))
    num_kept = len(entries) - len(gone)
    assert gone == entries[num_kept:][::-1]
    assert sum(sizes[:num_kept]) <= max_bytes
    assert not gone or sum(sizes[: num_kept + 1]) > max_bytes


def test_what_a_start_took_is_young_again(cache: CompileCache) -> None:
    """Limits go by the last use, not by when an entry was made."""
    for item in items(cache):
        for path in (item.folder / READY, item.folder):
            os.utime(path, (0, 0))
    found(cache, FACTS)
    used, unused = sorted(items(cache), key=lambda item: -item.last)
    assert (used.made, unused.made, unused.last) == (0, 0, 0) and time.time() - used.last < 60
    assert beyond([used, unused], Limits(max_age_s=3600)) == [unused]
    assert beyond([used, unused], Limits(max_bytes=used.bytes)) == [unused]


def test_a_removed_entry_is_gone(cache: CompileCache) -> None:
    first, second = (item.folder for item in items(cache))
    assert cache.remove(first) and not first.exists()
    assert isinstance(cache.look(OTHER), Entry) and cache.look(FACTS) is None
    assert not list(first.parent.glob(".aside-*"))
    missed(cache)
    with pytest.raises(ValueError, match="is no entry of this cache"):
        cache.remove(first.parent / "notes")
    with pytest.raises(ValueError, match="is no entry of this cache"):
        cache.remove(Path("/elsewhere") / second.name)


def test_an_entry_that_is_being_made_stays(cache: CompileCache) -> None:
    """A damaged one lies there still, when somebody makes it anew."""
    first = items(cache)[0].folder
    begun, go_on = threading.Event(), threading.Event()

    def slowly(folder: Path) -> Contents:
        first.mkdir()
        begun.set()
        go_on.wait(30)
        first.rmdir()
        return fill(folder)

    os.truncate(first / PIECE, 3)
    maker = threading.Thread(target=cache.store, args=(FACTS, "first", slowly))
    maker.start()
    assert begun.wait(30)
    assert not cache.remove(first)
    go_on.set()
    maker.join(30)
    assert isinstance(cache.look(FACTS), Entry)
    assert cache.remove(first)


def test_an_entry_made_here_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the machine's facts from torch wholly, without as far as threads go."""
    for machine in (None, machine_facts):
        assert Fitness([BASE], machine).misfits(BASE) == []
    assert Fitness([BASE]).open(BASE) == {"threads": torch.get_num_threads()}
    other = TORCH._replace(version="2.99")
    monkeypatch.setattr(installation, "torch_build", lambda: other)
    (change,) = Fitness([BASE]).misfits(BASE)
    assert change.name == "versions.torch" and "2.99" in change.here


def test_another_cpu_is_told_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_cpu_flags", lambda: "sse2 fpu")
    (change,) = Fitness([BASE]).misfits(BASE)
    assert change.name == "machine.instructions"


def test_threads_are_told_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert Fitness([BASE]).misfits(BASE) == []
    (change,) = Fitness([BASE], machine_facts).misfits(BASE)
    assert change.name == "machine.threads"


@pytest.mark.parametrize("has_driver", [True, False])
def test_a_gpu_needs_a_driver(
    has_driver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").write_text("")
    driver = tmp_path / ("there" if has_driver else "absent")
    monkeypatch.setattr(fitness, "_DRIVERS", (tmp_path / "nowhere", driver))
    there = BASE | {"machine": {"gpu": "H200", "capability": "9.0"}}
    there |= {"compile": BASE["compile"] | {"device": "cuda"}}
    names = [change.name for change in Fitness([there]).misfits(there)]
    assert names == ([] if has_driver else ["machine.gpu"])
    assert Fitness([there]).open(there) == {"gpu": "H200"}


def test_an_entry_of_elsewhere_does_not() -> None:
    sources = BASE["sources"] | {"models/llama.py": "0", "models/gone.py": "1", "../../x/y.py": "2"}
    there = BASE | {"sources": sources, "machine": {"gpu": "H200"}}
    there |= {"compile": BASE["compile"] | {"device": "cuda"}}
    both = Fitness([BASE, there], machine_facts)
    changed = {change.name for change in both.misfits(there)}
    assert changed >= {"sources.models/llama.py", "sources.models/gone.py", "machine.gpu"}
    assert both.misfits(BASE) == [], "sources of one are not asked of the other"


@pytest.mark.parametrize("facts", [{}, {"compile": 7, "sources": []}, {"compile": {"device": []}}])
def test_facts_that_are_none_fit_nowhere(facts: dict[str, object]) -> None:
    assert Fitness([facts]).misfits(facts)
    assert Fitness([facts], machine_facts).misfits(facts)
