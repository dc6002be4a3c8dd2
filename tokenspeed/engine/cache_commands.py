"""`tokenspeed cache why|export|import`, which have to know this machine: each a function that
prints, and answers with the exit code. What needs no torch is in `cache_upkeep.py`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

from tokenspeed.compile.archive import ArchiveError, read_archive
from tokenspeed.compile.cache import CompileCache, cache_root
from tokenspeed.compile.causes import Explained, explained
from tokenspeed.compile.entry import Damaged, Entry, read_entry
from tokenspeed.compile.fitness import Fitness
from tokenspeed.compile.key import machine_facts
from tokenspeed.compile.transfer import (
    Bundle,
    install,
    install_device_kernels,
    install_kernels,
    unpack,
)
from tokenspeed.config import OPTIONS, Config
from tokenspeed.engine.cache_output import print_json, print_table
from tokenspeed.engine.warmup import wanted, write_entries
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.output_file import check_target
from tokenspeed.text.errors import ModelError


def run(action: str, config: Config, **arguments: Any) -> int:
    """Do one of `ACTIONS`; the exit code. Raises ConfigError for what cannot be asked for."""
    cache = CompileCache(cache_root(config.compile.cache_dir))
    try:
        return ACTIONS[action](cache, config, **arguments)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    except (ArchiveError, Damaged, OSError) as error:
        logger.error("%s", error)
        return 1


def _why(cache: CompileCache, config: Config, *, as_json: bool) -> int:
    """Print whether a start would find its program, or what keeps it from it."""
    if config.compile.level == 0:
        raise ConfigError("-O0 compiles nothing and looks into no cache; ask without it")
    _, facts = wanted(config)
    entry: Entry | None = None
    found: list[Explained] = []
    try:
        if entry := cache.look(facts):
            reason = f"hit: {entry.folder}"
        elif nearest := cache.nearest(facts):
            name, changes = nearest
            found = explained(changes, _given(config))
            reason = f"miss: the nearest entry, {name}, differs in {len(found)} of its facts"
        else:
            reason = f"miss: no entry in {cache.root}; {_warmup(config)} makes one"
    except (Damaged, OSError) as error:
        reason = f"miss: the entry cannot be used: {error}"
    if as_json:
        told = [{**change._asdict(), "set_by": set_by} for change, set_by, _ in found]
        path = str(entry.folder) if entry else None
        print_json({"hit": entry is not None, "path": path, "why": reason, "facts": told})
    else:
        print(reason)
        _print_changes(found)
    return 0 if entry else 1


def _given(config: Config) -> Set[str]:
    """The options that somebody set, however, and the variables."""
    values = {name: value for group in vars(config).values() for name, value in vars(group).items()}
    changed = {each.flag for each in OPTIONS.values() if values[each.name] != each.default}
    return changed | os.environ.keys()


def _warmup(config: Config) -> str:
    return f"tokenspeed warmup {shlex.quote(config.model.model)}"


def _export(cache: CompileCache, config: Config, *, output: str) -> int:
    """Write an archive of one entry: the model is its name, or the settings are those it is for."""
    check_target("--output", output)
    named = [path for path in cache.entry_folders() if path.name == config.model.model]
    if named:
        entry = read_entry(named[0])
    else:
        found = cache.find(wanted(config)[1])
        if not isinstance(found, Entry):
            command = f"{_warmup(config)} --export {shlex.quote(output)}"
            raise ArchiveError(f"{found.reason}; {command} makes the entry (with the same options)")
        entry = found
    write_entries(cache, [entry], output)
    return 0


def _import(cache: CompileCache, config: Config, *, path: str, sha256: str | None) -> int:
    """Put what an archive holds into the cache, once every digest in it has matched."""
    bundle = unpack(read_archive(Path(path), sha256))
    _install(cache, bundle)
    fitness = Fitness((packed.manifest.facts for packed in bundle.entries), machine_facts)
    useless = 0
    for packed in bundle.entries:
        if changes := fitness.misfits(packed.manifest.facts):
            useless += 1
            print(f"{packed.name} is of no use to this machine as it is:")
            _print_changes(explained(changes, os.environ))
    if useless == len(bundle.entries):
        logger.warning("nothing in %s fits this machine: a start here takes none of it", path)
    return 0


def _install(cache: CompileCache, bundle: Bundle) -> None:
    for packed in bundle.entries:
        is_new = install(cache, packed)
        print(f"{packed.name}: {'imported' if is_new else 'is there already: nothing to do'}")
    for name in install_kernels(cache, bundle.kernels):
        print(f"{name}: imported")
    for kind, count in install_device_kernels(cache, bundle.device_kernels).items():
        print(f"{kind}: {count} compiled kernels imported")


ACTIONS: dict[str, Callable[..., int]] = {
    "why": _why,
    "export": _export,
    "import": _import,
}


def _print_changes(changes: Sequence[Explained]) -> None:
    if changes:
        rows = [[*change, set_by] for change, set_by, _ in changes]
        print_table(["FACT", "HERE", "THERE", "SET BY"], rows)
