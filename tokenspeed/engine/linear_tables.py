"""Which kernel serves which linear layer on a CPU: the model's table, read, measured or assumed.

A table is measured once, on the model's own weights, and kept with the entry of the compile cache.
It is assumed where measuring is not worth its seconds: small models, weights that are made up, and
folders that keep nothing, where every start would measure anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tokenspeed import ledger
from tokenspeed.compile.entry import Entry
from tokenspeed.kernels import linear_cpu_choices
from tokenspeed.kernels.linear_cpu import Linear
from tokenspeed.kernels.linear_cpu_tuning import (
    LinearTable,
    Shape,
    default_table,
    linear_weights,
    tune,
)
from tokenspeed.kernels.native import Native
from tokenspeed.log import logger
from tokenspeed.spans import span

_BUDGET_S = 4.0
_WORTH_BYTES = 64 << 20
"""Weights of less than this are read in a few milliseconds by any kernel."""


@dataclass(frozen=True)
class LinearKernels:
    """What a compiled program's linear layers choose from: torch's kernels and those built here, if
    any; and the entry of the cache that keeps their table.
    """

    native: Native | None
    entry: Entry

    def install(
        self, parameters: Iterable[Tensor], are_real: bool, progress: Callable[[str, str], None]
    ) -> None:
        """Have `linear` choose for these weights, which are in place (`are_real`: from a
        checkpoint). Nothing else should run meanwhile: it may be measured.
        """
        weights = linear_weights(parameters)
        if not weights:
            return
        kernels = linear_cpu_choices.kernels(None if self.native is None else self.native.rows)
        table = _kept(self.entry, weights.keys(), kernels)
        if table is None:
            if why := _why_assumed(weights, self.entry, are_real):
                logger.debug("linear kernels: the default table is used: %s", why)
                table = default_table(weights)
            else:
                table = _measured(weights, kernels, self.entry, progress)
        linear_cpu_choices.install(table, kernels)


def _kept(
    entry: Entry, shapes: Collection[Shape], kernels: Mapping[str, Linear]
) -> LinearTable | None:
    """The entry's table, if it has one that fits."""
    data = entry.read_tuning()
    if data is None:
        return None
    try:
        table = LinearTable.from_json(data)
        why = table.why_unfit(shapes, kernels)
    except (ValueError, RecursionError) as error:  # the latter: brackets without end
        why = str(error)
    if why is not None:
        logger.info("linear kernels: the table in the compile cache is ignored: %s", why)
        return None
    return table


def _why_assumed(
    weights: Mapping[Shape, Sequence[Tensor]], entry: Entry, are_real: bool
) -> str | None:
    """Why measuring is not worth it, or None."""
    num_bytes = sum(tensor.nbytes for tensors in weights.values() for tensor in tensors)
    if not are_real:
        return "the weights are made up"
    if num_bytes < _WORTH_BYTES:
        return f"the weights are small ({num_bytes >> 10} KiB)"
    if not entry.can_keep_tuning:
        return f"{entry.folder} cannot be written"
    return None


def _measured(
    weights: Mapping[Shape, Sequence[Tensor]],
    kernels: Mapping[str, Linear],
    entry: Entry,
    progress: Callable[[str, str], None],
) -> LinearTable:
    progress("tune", f"linear kernels, {len(weights)} shapes")
    began = time.monotonic()
    cause = "the cache entry has no table for these weights"
    with span("kernels.warmup"), ledger.compiling("tuning", "linear kernels", cause):
        table = tune(weights, kernels, _BUDGET_S)
    kept = "kept with the compile cache" if entry.write_tuning(table.to_json()) else "not kept"
    logger.info("linear kernels: measured in %.1f s, %s", time.monotonic() - began, kept)
    for each in table.entries:
        choices = (f"{choice.kernel} up to {choice.max_tokens}" for choice in each.choices)
        logger.debug("linear kernels: %dx%d: %s", each.num_rows, each.size, ", ".join(choices))
    return table
