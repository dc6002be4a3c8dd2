"""Where each checkpoint tensor goes: the parameter, or the part of a merged one, that it fills.

The model's table names modules: `model.layers.*.mlp.up_proj` -> (`layers.*.mlp.gate_up_proj`, 1).
A module with `sizes` is merged: its slot i is `sizes[i]` rows, in order. Any other module has slot
0 alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tokenspeed.loader.names import fill_numbers, split_numbers

WeightTable = Mapping[str, tuple[str, int]]
"""Module in the checkpoint -> (module here, slot)."""


def weight_slots(model: nn.Module, table: WeightTable) -> dict[str, Tensor]:
    """Checkpoint tensor name -> the view it is copied into. Together they are all parameters, once.

    A table that leaves a parameter out, or fills a slot twice, is a bug in the model's file.
    """
    sources: dict[str, dict[int, str]] = defaultdict(dict)
    for source, (target, slot) in table.items():
        assert slot not in sources[target], f"two rows of the table fill slot {slot} of {target}"
        sources[target][slot] = source
    slots: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        pattern, numbers = split_numbers(module)
        sizes = getattr(model.get_submodule(module), "sizes", None)
        views = torch.split(parameter.detach(), sizes or parameter.shape[0])
        rows = sources[pattern]
        assert sorted(rows) == list(range(len(views))), f"the table fills {sorted(rows)} of {name}"
        for slot, source in rows.items():
            slots[f"{fill_numbers(source, numbers)}.{leaf}"] = views[slot]
    return slots


def slot_formats(model: nn.Module, table: WeightTable) -> dict[str, str]:
    """Checkpoint tensor name -> format, for the weights that modules keep in blocks: those with a
    `format`.
    """
    sources: dict[str, list[str]] = defaultdict(list)
    for source, (target, _) in table.items():
        sources[target].append(source)
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if (format := getattr(module, "format", None)) is not None:
            pattern, numbers = split_numbers(path)
            found |= {f"{fill_numbers(each, numbers)}.weight": format for each in sources[pattern]}
    return found
