"""`tokenspeed cache ls`: every entry and every set of GPU kernels, and whether they fit here.

No torch is imported for it: what only torch could tell of this machine is named instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.facts import Facts, group
from tokenspeed.compile.fitness import Fitness
from tokenspeed.compile.inventory import Item, KernelSet, items, kernel_sets
from tokenspeed.compile.kernel_store import ENVIRONMENT, environment_of
from tokenspeed.engine.cache_output import age_text, print_json, print_table, size_text
from tokenspeed.wording import counted

_HEAD = ["ENTRY", "SIZE", "AGE", "USED", "DTYPE", "DEVICE", "TORCH", "FITS THIS MACHINE"]
_CONDITIONS = {"threads": "with {} threads", "gpu": "on {}"}
"""Fact that is left open -> what it has to be."""


def list_cache(cache: CompileCache, *, as_json: bool) -> int:
    """Print every entry, and every set of GPU kernels."""
    found = items(cache)
    known = [item.manifest.facts for item in found if item.manifest]
    fitness = Fitness(known)
    rows = [_row(item, fitness) for item in found]
    sets = [_kernel_row(each, known, fitness) for each in kernel_sets(cache)]
    if as_json:
        print_json({"root": str(cache.root), "entries": rows, "kernels": sets})
        return 0
    if rows:
        print_table(_HEAD, [_cells(row) for row in rows])
    else:
        print(f"no entry in {cache.root}")
    for row in sets:
        what = f"{counted(row['kernels'], 'kernel')}, {size_text(row['bytes'])}"
        print(f"{row['set']}: {what}, {_kernels_fit(row)}")
    return 0


def _row(item: Item, fitness: Fitness) -> dict[str, Any]:
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
        **_fit(facts, fitness),
    }


def _kernel_row(each: KernelSet, known: Sequence[Facts], fitness: Fitness) -> dict[str, Any]:
    """What a set is for is known from an entry for the same environment, if there is one."""
    facts: Facts = next((facts for facts in known if environment_of(facts) == each.folder.name), {})
    return {
        "set": each.name,
        "kernels": each.count,
        "bytes": each.bytes,
        "age_s": max(0.0, time.time() - each.made),
        "problem": each.problem,
        **_fit(facts, fitness, ENVIRONMENT),
    }


def _fit(facts: Facts, fitness: Fitness, groups: Sequence[str] = ()) -> dict[str, Any]:
    """`fits` is null where nothing is known. `if`: facts of the machine that decide it then."""
    changes = fitness.misfits(facts) if facts else []
    kept = [each for each in changes if not groups or each.name.split(".")[0] in groups]
    return {
        "fits": not kept if facts else None,
        "if": fitness.open(facts),
        "misfits": [change._asdict() for change in kept],
    }


def _cells(row: dict[str, Any]) -> list[str]:
    texts = [row["entry"], size_text(row["bytes"]), age_text(row["age_s"]), age_text(row["used_s"])]
    texts += [str(row[name] or "?") for name in ("dtype", "device", "torch")]
    return [*texts, f"damaged: {row['problem']}" if row["problem"] else _fits(row)]


def _fits(row: dict[str, Any]) -> str:
    return ", ".join(["yes", *_conditions(row)]) if row["fits"] else f"no: {_first_misfit(row)}"


def _kernels_fit(row: dict[str, Any]) -> str:
    if row["problem"]:
        return f"damaged: {row['problem']}"
    if row["fits"] is None:
        return "for an environment that no entry here is for"
    if not row["fits"]:
        return f"do not fit this machine: {_first_misfit(row)}"
    return ", ".join(["fit this machine", *_conditions(row)])


def _first_misfit(row: dict[str, Any]) -> str:
    first, *more = row["misfits"]
    rest = f"; and {len(more)} more" if more else ""
    return f"{first['name']} {first['here']} (there {first['there']}){rest}"


def _conditions(row: dict[str, Any]) -> list[str]:
    return [_CONDITIONS[name].format(value) for name, value in row["if"].items()]
