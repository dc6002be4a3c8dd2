"""`tokenspeed cache ls|prune|verify`, which need neither torch nor a model, and so answer at once.
Each is a function that prints, and answers with the exit code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenspeed.compile.cache import CompileCache, cache_root
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
from tokenspeed.compile.kernel_store import remove_folder
from tokenspeed.config import Config
from tokenspeed.engine.cache_listing import list_cache
from tokenspeed.engine.cache_output import print_json, size_text
from tokenspeed.log import logger


def run(action: str, config: Config, **arguments: Any) -> int:
    """Do one of `ACTIONS`; the exit code."""
    try:
        return ACTIONS[action](CompileCache(cache_root(config.compile.cache_dir)), **arguments)
    except OSError as error:
        logger.error("%s", error)
        return 1


def _prune(
    cache: CompileCache,
    *,
    max_age_s: float | None,
    max_bytes: int | None,
    is_dry: bool,
) -> int:
    """Remove what is older or more than the limits say, but nothing that is being made."""
    doomed = beyond([*items(cache), *kernel_sets(cache)], Limits(max_age_s, max_bytes))
    status, num_bytes = 0, 0
    for item in doomed:
        try:
            is_gone = is_dry or _remove(cache, item)
        except OSError as error:
            logger.error("%s: cannot be removed: %s", item.name, error)
            status = 1
            continue
        num_bytes += item.bytes if is_gone else 0
        said = "would be removed" if is_dry else "removed" if is_gone else "is being made: it stays"
        print(f"{item.name}: {said}, {size_text(item.bytes)}")
    if not is_dry:
        cache.sweep()
    print(f"{size_text(num_bytes)} {'would be freed' if is_dry else 'freed'}")
    return status


def _remove(cache: CompileCache, item: Item | KernelSet) -> bool:
    """False if somebody is making it. (A set of kernels is in use by nobody: starts copy it.)"""
    if isinstance(item, Item):
        return cache.remove(item.folder)
    remove_folder(item.folder)
    return True


def _verify(cache: CompileCache, *, as_json: bool) -> int:
    """Check every digest of every entry and every GPU kernel."""
    found: list[Item | KernelSet] = [*verified(cache), *verified_kernels(cache)]
    if as_json:
        print_json([{"entry": item.name, "problem": item.problem} for item in found])
    else:
        for item in found:
            print(f"{item.name}: {item.problem or 'whole'}")
        bad = sum(item.problem is not None for item in found)
        print(f"{len(found)} checked, {bad} bad" + ("; a start makes them anew" if bad else ""))
    return 1 if any(item.problem for item in found) else 0


ACTIONS: dict[str, Callable[..., int]] = {"ls": list_cache, "prune": _prune, "verify": _verify}
