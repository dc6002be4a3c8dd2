"""Which kernel and tile for which linear layer on this GPU (-O3): the entry's table, or one
that is measured now and kept there.

The layers are those that the passes gave to these kernels, as the entry's receipt has them. They
are measured on made-up weights, since times do not hang on values, one after the other, so that
little memory is needed beside the model. Whatever fails costs speed, and a warning.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed import ledger
from tokenspeed.compile import graph_receipt
from tokenspeed.compile.entry import GRAPHS, Entry
from tokenspeed.compile.graph_receipt import GraphReceipt
from tokenspeed.engine.device_kernels import trying_kernels
from tokenspeed.kernels import linear_tiles
from tokenspeed.kernels.linear_tiles import Site, TileTable
from tokenspeed.kernels.linear_tuning import TOKENS, made_up_weights, tune
from tokenspeed.log import logger
from tokenspeed.spans import span

_WEIGHT_AT = {"norm_linear": 2, "linear_add": 1, "norm_gate_up": 2, "gate_up": 1, "linear": 1}
"""Op -> which of its operands is the weight."""

_MATRIX = re.compile(r"(\w+) \[(\d+), (\d+)\]")

Sites = Mapping[Site, int]
"""A site, and the largest token count for which its kernels are asked."""

Measure = Callable[[Site, Sequence[int]], TileTable]
"""Times a site's kernels at some token counts."""


def sites_of(pictures: GraphReceipt) -> Sites:
    """The linear layers in a program that go by tables of tiles."""
    found: dict[Site, int] = {}
    for ranges in pictures.pieces.values():
        for token_range, piece in ranges.items():
            last = int(token_range.partition("-")[2] or TOKENS[-1])
            values = {op.name: op.value for op in piece.after}
            for op in piece.after:
                kind = op.op.removeprefix("tokenspeed.")
                if kind in _WEIGHT_AT and (
                    site := _site(kind, values[op.inputs[_WEIGHT_AT[kind]]])
                ):
                    found[site] = max(last, found.get(site, 0))
    return found


def _site(kind: str, weight: str) -> Site | None:
    matched = _MATRIX.fullmatch(weight)
    return Site(kind, int(matched[2]), int(matched[3]), matched[1]) if matched else None


def measured(site: Site, tokens: Sequence[int]) -> TileTable:
    """Time a site's kernels here."""
    with torch.inference_mode():
        weights = made_up_weights(site, torch.device("cuda"))
        return tune({site: weights}, machine_name(), tokens)


def machine_name() -> str:
    """What a table of this machine says it was measured on."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


@dataclass(frozen=True)
class TileKernels:
    """What the linear layers of a program on CUDA choose from, and the entry that keeps the
    choices.
    """

    entry: Entry
    machine: str
    measure: Measure = measured

    def install(
        self, parameters: Iterable[Tensor], are_real: bool, progress: Callable[[str, str], None]
    ) -> None:
        """Have the layers choose by this machine's table. Neither the weights' values nor whether
        they are real matters. Nothing else should run meanwhile: it may be measured.
        """
        try:
            # Receipts that cannot be read raise ValueError.
            sites = sites_of(graph_receipt.decode(self.entry.files.get(GRAPHS, b"")))
            table = self._kept(sites) or self._measured(sites, progress)
        except (ValueError, RuntimeError) as error:  # the latter: CUDA's, and no memory
            lines = str(error).strip().splitlines() or [type(error).__name__]
            logger.warning("tiles are not measured, the default table is used: %s", lines[0])
            return
        linear_tiles.install(table.entries)

    def _kept(self, sites: Sites) -> TileTable | None:
        """The entry's table, if it has one that fits."""
        data = self.entry.read_tuning()
        if data is None:
            return None
        try:
            table = TileTable.from_json(data)
            why = self._why_unfit(table, sites)
        except (ValueError, RecursionError) as error:
            why = str(error)
        if why is not None:
            logger.info("tiles: the table in the compile cache is ignored: %s", why)
            return None
        return table

    def _why_unfit(self, table: TileTable, sites: Sites) -> str | None:
        if table.machine != self.machine:
            return f"it was measured on {table.machine:.80}"
        missing = sites.keys() - {entry.site for entry in table.entries}
        return f"it lacks {len(missing)} of {len(sites)} layers" if missing else None

    def _measured(self, sites: Sites, progress: Callable[[str, str], None]) -> TileTable:
        began = time.monotonic()
        entries: list[linear_tiles.Entry] = []
        cause = "the cache entry has no table of this GPU's tiles"
        compiles = ledger.compiling("tuning", "linear tiles", cause)
        with span("kernels.warmup"), compiles, trying_kernels():
            for number, (site, last) in enumerate(sites.items(), 1):
                what = f"{site.kind} {site.num_rows}x{site.size}"
                progress("tune", f"tiles {number} of {len(sites)}: {what}")
                tokens = [*(count for count in TOKENS if count < last), last]
                entries += self.measure(site, tokens).entries
        table = TileTable(self.machine, tuple(entries))
        is_kept = self.entry.write_tuning(table.to_json())
        kept = "kept with the compile cache" if is_kept else "not kept"
        seconds = time.monotonic() - began
        logger.info("tiles: %d layers measured in %.1f s, %s", len(sites), seconds, kept)
        return table
