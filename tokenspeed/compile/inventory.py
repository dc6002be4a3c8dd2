"""What a cache holds, for people: what there is, whether it is whole and fits, and what may go.

That is entries, and sets of compiled GPU kernels (`kernel_store.py`): a set is all that are kept
for one environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.compile.cache import CompileCache, last_used
from tokenspeed.compile.entry import READY, Damaged, Manifest, read_entry, read_manifest
from tokenspeed.compile.facts import digest_of
from tokenspeed.compile.kernel_store import (
    environments,
    kernel_folders,
    read_kernel,
)
from tokenspeed.log import logger


@dataclass(frozen=True)
class Item:
    """An entry as `ls` shows it. `made` is in seconds since 1970. `problem` says in a line why it
    cannot be used, whatever it holds; then there may be no manifest. `used`: when a start last took
    it.
    """

    folder: Path
    bytes: int
    made: float
    manifest: Manifest | None
    problem: str | None
    used: float = 0.0

    @property
    def last(self) -> float:
        """When it was last of use."""
        return max(self.made, self.used)

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
    def last(self) -> float:
        """When it was last of use, as far as is known: starts copy kernels and leave no trace."""
        return self.made


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


@dataclass(frozen=True)
class Limits:
    """What `prune` keeps: entries used within `max_age_s`, and of those used last as many as have
    `max_bytes` together: none, if the last alone has more. None is no limit.
    """

    max_age_s: float | None = None
    max_bytes: int | None = None


def beyond(entries: Iterable[Item | KernelSet], limits: Limits) -> list[Item | KernelSet]:
    """The entries and sets that the limits do not keep, those longest unused first."""
    doomed, total, now = [], 0, time.time()
    for item in sorted(entries, key=lambda item: item.last, reverse=True):
        total += item.bytes
        is_old = limits.max_age_s is not None and now - item.last > limits.max_age_s
        is_too_much = limits.max_bytes is not None and total > limits.max_bytes
        if is_old or is_too_much:
            doomed.append(item)
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
    return Item(folder, num_bytes, made, manifest, problem, last_used(folder))


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
