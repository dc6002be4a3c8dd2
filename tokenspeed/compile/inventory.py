"""What a cache holds, for people: what there is, whether it is whole and fits, and what may go.

That is entries, and sets of compiled GPU kernels (`kernel_store.py`): a set is all that are kept
for one environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.entry import READY, Damaged, Manifest, read_entry, read_manifest
from tokenspeed.compile.kernel_store import (
    environment_of,
    environments,
    kernel_folders,
    read_kernel,
)
from tokenspeed.compile.key import (
    FORMAT,
    Change,
    Facts,
    differences,
    digest_of,
    installed_sources,
    surroundings,
)
from tokenspeed.log import logger


@dataclass(frozen=True)
class Item:
    """An entry as `ls` shows it. `made` is in seconds since 1970. `problem` says in a line why it
    cannot be used, whatever it holds; then there may be no manifest.
    """

    folder: Path
    bytes: int
    made: float
    manifest: Manifest | None
    problem: str | None

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class KernelSet:
    """A set of kernels as `ls` shows it; `made` is when the last was. `problem` names the first
    that cannot be used, if any was found.
    """

    folder: Path
    count: int
    bytes: int
    made: float
    problem: str | None

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def fits(self) -> bool:
        """Is it for this machine and this installation?"""
        is_cuda = torch.cuda.is_available()
        return is_cuda and self.folder.name == environment_of(surroundings("cuda"))


def items(cache: CompileCache) -> list[Item]:
    """All entries by name; files are not read, but their manifests are. Raises OSError where the
    cache as a whole cannot be used.
    """
    return [_item(folder, read_manifest) for folder in cache.entry_folders()]


def verified(cache: CompileCache) -> list[Item]:
    """All entries, each read whole and every digest checked. Raises OSError as `items`."""
    return [_item(folder, lambda at: read_entry(at).manifest) for folder in cache.entry_folders()]


def kernel_sets(cache: CompileCache) -> list[KernelSet]:
    """All sets by name; their files are not read. Raises OSError as `items`."""
    return [_kernel_set(folder, is_read=False) for folder in environments(cache.root)]


def verified_kernels(cache: CompileCache) -> list[KernelSet]:
    """All sets, each kernel read and every digest checked. Raises OSError as `items`."""
    return [_kernel_set(folder, is_read=True) for folder in environments(cache.root)]


def misfits(facts: Facts) -> list[Change]:
    """Why an entry is of no use to this machine and this installation, whatever the model. Empty if
    it fits.
    """
    device = group(facts, "compile").get("device")
    here: Facts = {"format": FORMAT, "sources": installed_sources(group(facts, "sources"))}
    if device == "cuda" and not torch.cuda.is_available():
        here |= surroundings("cpu") | {"machine": {}}
    else:
        here |= surroundings("cuda" if device == "cuda" else "cpu")
    return differences(here, {name: facts.get(name) for name in here})


def group(facts: Facts, name: str) -> Facts:
    """A group of facts; empty where a manifest of unknown origin has none."""
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Limits:
    """What `prune` keeps: entries younger than `max_age_s`, and of the youngest as many as have
    `max_bytes` together. None is no limit.
    """

    max_age_s: float | None = None
    max_bytes: int | None = None


def beyond(entries: Iterable[Item | KernelSet], limits: Limits) -> list[Item | KernelSet]:
    """The entries and sets that the limits do not keep, oldest first."""
    doomed, total, now = [], 0, time.time()
    for item in sorted(entries, key=lambda item: item.made, reverse=True):
        total += item.bytes
        is_old = limits.max_age_s is not None and now - item.made > limits.max_age_s
        is_too_much = limits.max_bytes is not None and total > limits.max_bytes
        if is_old or is_too_much:
            doomed.append(item)
            total -= item.bytes
    return doomed[::-1]


def _item(folder: Path, read: Callable[[Path], Manifest]) -> Item:
    manifest, problem = None, None
    try:
        manifest = read(folder)
        _check_facts(folder, manifest)
    except (Damaged, OSError) as error:
        logger.debug("compile cache: %s", folder, exc_info=True)
        problem = str(error)
    num_bytes, made = _size(folder)
    return Item(folder, num_bytes, made, manifest, problem)


def _kernel_set(folder: Path, *, is_read: bool) -> KernelSet:
    problems, num_bytes, made = [], 0, 0.0
    try:
        folders = kernel_folders(folder)
    except OSError as error:
        return KernelSet(folder, 0, *_size(folder), str(error))
    for each in folders:
        size, when = _size(each)
        num_bytes, made = num_bytes + size, max(made, when)
        try:
            if is_read:
                read_kernel(each)
        except (Damaged, OSError) as error:
            problems.append(f"{each.name}: {error}")
    more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
    problem = f"{problems[0]}{more}" if problems else None
    return KernelSet(folder, len(folders), num_bytes, made, problem)


def _check_facts(folder: Path, manifest: Manifest) -> None:
    if folder.name.rpartition("-")[2] != digest_of(manifest.facts):
        raise Damaged("its facts are not those of its name")


def _size(folder: Path) -> tuple[int, float]:
    """Bytes of all files, and when the entry was finished; what cannot be read counts nothing."""
    total, made = 0, 0.0
    try:
        made = folder.lstat().st_mtime
        if not folder.is_symlink():
            total = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
            made = (folder / READY).lstat().st_mtime
    except OSError:
        pass
    return total, made
