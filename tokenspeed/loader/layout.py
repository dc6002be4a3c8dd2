"""Which matrices of a checkpoint can stay in blocks, as it stores them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from tokenspeed.kernels.block_formats import FORMATS
from tokenspeed.loader.gguf import HF_MODULES
from tokenspeed.loader.names import fill_numbers, rename, split_numbers
from tokenspeed.loader.slots import WeightTable
from tokenspeed.text.gguf import TensorInfo


def block_layout(tensors: Mapping[str, TensorInfo], table: WeightTable) -> dict[str, str]:
    """Module path -> format, from a GGUF's tensor table: those whose whole weight is stored in one
    format that there are kernels for. The others are expanded to the compute dtype.
    """
    num_slots = Counter(target for target, _ in table.values())
    types: dict[tuple[str, str], list[str]] = defaultdict(list)
    for info in tensors.values():
        module, _, leaf = rename(info.name, HF_MODULES).rpartition(".")
        pattern, numbers = split_numbers(module)
        if leaf == "weight" and len(info.shape) == 2 and pattern in table:
            target = table[pattern][0]
            types[target, fill_numbers(target, numbers)].append(info.type)
    return {
        path: found[0]
        for (target, path), found in types.items()
        if found == found[:1] * num_slots[target] and found[0] in FORMATS
    }
