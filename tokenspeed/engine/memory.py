"""How many pages the KV pool gets: what was asked for, or what the machine has to spare."""

from __future__ import annotations

from pathlib import Path

import torch

from tokenspeed.config import CacheConfig
from tokenspeed.options import ConfigError

CPU_CAP_BYTES = 4 << 30
"""The pool of a CPU engine is never larger unless --max-total-tokens asks for it: the machine is
shared, and a CPU cannot fill more in useful time.
"""

SHORTEST = 2
"""Tokens of the shortest request: one of a prompt, and one of output."""


def count_pages(
    cache: CacheConfig,
    page_bytes: int,
    *,
    useful_tokens: int,
    needed_tokens: int,
    device: torch.device,
    reserved: int = 0,
) -> int:
    """Pages of `cache.block_size` tokens, `page_bytes` each. `reserved` bytes of the budget are for
    other things.

    `useful_tokens` is the most that all running requests can hold. Raises ConfigError, with a value
    that works, if memory has no room for `needed_tokens`: one request of the asked length, or the
    shortest.
    """
    size = cache.block_size
    if cache.max_total_tokens is not None:
        return -(-cache.max_total_tokens // size)
    budget = max(0, _budget(cache.gpu_memory_utilization, device) - reserved)
    num_pages = min(-(-useful_tokens // size), budget // page_bytes)
    num_needed = -(-needed_tokens // size)
    if num_pages < num_needed:
        remedy = f"lower --max-model-len to {num_pages * size} or " if num_pages else ""
        raise ConfigError(
            f"the KV cache needs {num_needed * size} tokens ({_mib(num_needed * page_bytes)}) for "
            f"one request of full length, but has {num_pages * size} ({_mib(budget)} of memory for "
            f"it); {remedy}give it more with --max-total-tokens or --gpu-memory-utilization"
        )
    return num_pages


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"


def _budget(share: float, device: torch.device) -> int:
    """Bytes for the pool and what is reserved, measured when the weights are in place. On a GPU the
    share is of all of its memory; on a CPU it is of what is free.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1.0 - share) * total))
    return min(int(share * available_ram()), CPU_CAP_BYTES)


def available_ram(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: free on the machine, and within its cgroups (v2)."""
    fields = dict(
        line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if line
    )
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for group in _own_cgroups(root):
        try:
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text()) - _file_cache(group)
        except (OSError, ValueError):  # no such files, or "max": no limit here
            continue
        available = min(available, limit - used)
    return max(0, available)


def _own_cgroups(root: Path) -> list[Path]:
    """Our cgroup and those around it, whose limits hold too. In a container our own is the root."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _file_cache(group: Path) -> int:
    """Bytes of files that the kernel drops before memory runs out. They count as used, and after
    the weights have been read they are most of it.
    """
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
