"""`tokenspeed cache ls|why|export|import`, which have to know this machine: each a function that
prints, and answers with the exit code. What needs no torch is in `cache_upkeep.py`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenspeed.compile.archive import ArchiveError, read_archive
from tokenspeed.compile.cache import CompileCache, cache_root
from tokenspeed.compile.entry import Damaged, Entry, read_entry
from tokenspeed.compile.facts import Change, group
from tokenspeed.compile.fitness import fits, misfits
from tokenspeed.compile.inventory import Item, KernelSet, items, kernel_sets
from tokenspeed.compile.transfer import (
    Bundle,
    install,
    install_device_kernels,
    install_kernels,
    unpack,
)
from tokenspeed.config import Config
from tokenspeed.engine.cache_upkeep import print_json, size_text
from tokenspeed.engine.warmup import wanted, write_entries
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.output_file import check_target
from tokenspeed.text.errors import ModelError
from tokenspeed.wording import counted


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


def _ls(cache: CompileCache, config: Config, *, as_json: bool) -> int:
    """Print every entry, and every set of GPU kernels."""
    rows = [_row(item) for item in items(cache)]
    sets = kernel_sets(cache)
    if as_json:
        kernels = [_kernel_row(each) for each in sets]
        print_json({"root": str(cache.root), "entries": rows, "kernels": kernels})
    elif rows:
        _print_table(
            ["ENTRY", "SIZE", "AGE", "USED", "DTYPE", "DEVICE", "TORCH", "FITS THIS MACHINE"],
            [
                [
                    *(row["entry"], size_text(row["bytes"])),
                    *(_age(row["age_s"]), _age(row["used_s"])),
                    *(str(row[name] or "?") for name in ("dtype", "device", "torch")),
                    _fit(row),
                ]
                for row in rows
            ],
        )
    else:
        print(f"no entry in {cache.root}")
    for each in () if as_json else sets:
        what = each.problem or f"{counted(each.count, 'kernel')}, {size_text(each.bytes)}"
        print(f"{each.name}: {what}, for {'this' if fits(each) else 'another'} machine")
    return 0


def _why(cache: CompileCache, config: Config, *, as_json: bool) -> int:
    """Print whether a start would find its program, or what keeps it from it."""
    if config.compile.level == 0:
        raise ConfigError("-O0 compiles nothing and looks into no cache; ask without it")
    _, facts = wanted(config)
    entry: Entry | None = None
    found: list[Change] = []
    try:
        if entry := cache.look(facts):
            reason = f"hit: {entry.folder}"
        elif nearest := cache.nearest(facts):
            name, found = nearest
            reason = f"miss: the nearest entry, {name}, differs in {len(found)} of its facts"
        else:
            reason = f"miss: no entry in {cache.root}; {_warmup(config)} makes one"
    except (Damaged, OSError) as error:
        reason = f"miss: the entry cannot be used: {error}"
    if as_json:
        facts_found = [change._asdict() for change in found]
        path = str(entry.folder) if entry else None
        print_json({"hit": entry is not None, "path": path, "why": reason, "facts": facts_found})
    else:
        print(reason)
        _print_changes(found)
    return 0 if entry else 1


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
    useless = 0
    for parcel in bundle.parcels:
        if changes := misfits(parcel.manifest.facts):
            useless += 1
            print(f"{parcel.name} is of no use to this machine as it is:")
            _print_changes(changes)
    if useless == len(bundle.parcels):
        logger.warning("nothing in %s fits this machine: a start here takes none of it", path)
    return 0


def _install(cache: CompileCache, bundle: Bundle) -> None:
    for parcel in bundle.parcels:
        is_new = install(cache, parcel)
        print(f"{parcel.name}: {'imported' if is_new else 'is there already: nothing to do'}")
    for name in install_kernels(cache, bundle.kernels):
        print(f"{name}: imported")
    for kind, count in install_device_kernels(cache, bundle.device_kernels).items():
        print(f"{kind}: {count} compiled kernels imported")


ACTIONS: dict[str, Callable[..., int]] = {
    "ls": _ls,
    "why": _why,
    "export": _export,
    "import": _import,
}


def _row(item: Item) -> dict[str, Any]:
    facts = item.manifest.facts if item.manifest else {}
    return {
        "entry": item.name,
        "model": item.name.rpartition("-")[0],
        "bytes": item.bytes,
        "age_s": max(0.0, time.time() - item.made),
        "used_s": max(0.0, time.time() - item.last),
        "dtype": group(facts, "compile").get("dtype"),
        "device": group(facts, "compile").get("device"),
        "torch": str(group(facts, "versions").get("torch", "")).split(" ")[0],
        "problem": item.problem,
        "misfits": [change._asdict() for change in misfits(facts)] if facts else [],
    }


def _kernel_row(each: KernelSet) -> dict[str, Any]:
    return {
        "set": each.name,
        "kernels": each.count,
        "bytes": each.bytes,
        "age_s": max(0.0, time.time() - each.made),
        "fits": fits(each),
        "problem": each.problem,
    }


def _fit(row: dict[str, Any]) -> str:
    if row["problem"]:
        return f"damaged: {row['problem']}"
    if not row["misfits"]:
        return "yes"
    first, *more = row["misfits"]
    rest = f"; and {len(more)} more" if more else ""
    return f"no: {first['name']} {first['here']} (there {first['there']}){rest}"


def _print_changes(changes: Sequence[Change]) -> None:
    if changes:
        rows = [[*change, change.set_by] for change in changes]
        _print_table(["FACT", "HERE", "THERE", "SET BY"], rows)


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        plain = (cell if cell.isprintable() else ascii(cell) for cell in row)
        cells = (f"{cell:{width}}" for cell, width in zip(plain, widths, strict=True))
        print("  ".join(cells).rstrip())


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
