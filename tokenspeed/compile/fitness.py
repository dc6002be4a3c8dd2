"""Is what a cache holds of use to this machine and this installation, whatever the model?"""

from __future__ import annotations

import torch

from tokenspeed.compile.facts import FORMAT, Change, Facts, differences, group
from tokenspeed.compile.inventory import KernelSet
from tokenspeed.compile.kernel_store import environment_of
from tokenspeed.compile.key import installed_sources, surroundings


def fits(kernels: KernelSet) -> bool:
    """Is a set of GPU kernels for this machine and this installation?"""
    is_cuda = torch.cuda.is_available()
    return is_cuda and kernels.folder.name == environment_of(surroundings("cuda"))


def misfits(facts: Facts) -> list[Change]:
    """Why an entry with these facts is of no use here. Empty if it fits."""
    device = group(facts, "compile").get("device")
    here: Facts = {"format": FORMAT, "sources": installed_sources(group(facts, "sources"))}
    if device == "cuda" and not torch.cuda.is_available():
        here |= surroundings("cpu") | {"machine": {}}
    else:
        here |= surroundings("cuda" if device == "cuda" else "cpu")
    return differences(here, {name: facts.get(name) for name in here})
