"""Fill a model: choose where the weights come from, check that they fit, copy tensor by tensor."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tokenspeed.kernels.block_formats import row_size
from tokenspeed.kv.specs import LayerScales
from tokenspeed.loader.dummy import DummyWeights
from tokenspeed.loader.gguf import GgufFile
from tokenspeed.loader.kv_scales import is_kv_scale, read_kv_scales
from tokenspeed.loader.safetensors import SafetensorsFolder
from tokenspeed.loader.slots import WeightTable, slot_formats, weight_slots
from tokenspeed.text.errors import ModelError
from tokenspeed.text.source import ModelSource


class Weights(Protocol):
    """What a source of weights offers: names with shapes, and one tensor at a time on request."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def num_bytes(self, name: str) -> int: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was read: bytes as stored, and wall-clock seconds. `kv_scales`: by layer, of keys and
    values in a cache of fp8, if the checkpoint has some.
    """

    num_tensors: int
    bytes: int
    seconds: float
    kv_scales: LayerScales | None = None


def load_weights(
    model: nn.Module,
    weights: WeightTable,
    source: ModelSource,
    *,
    load_format: str = "auto",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Fill every parameter of `model` exactly once, converting to its dtype and device. A module
    with a `format` takes blocks as they are stored.

    `progress(done, total)` is called in stored bytes, after each tensor. One tensor at a time is in
    memory beside the model. Raises ModelError, naming file or tensor, if the weights do not fit.
    """
    began = time.perf_counter()
    slots = weight_slots(model, weights)
    formats = slot_formats(model, weights)
    stored = open_weights(source, slots, formats, load_format, seed)
    check_fit(stored.shapes, _shapes(slots, formats), source.name)
    scales = read_kv_scales(stored.shapes, stored.read, slots, source.name)
    names = [name for name in stored.shapes if name in slots]
    total = sum(stored.num_bytes(name) for name in names)
    done = 0
    with torch.no_grad():
        for name in names:
            slots[name].copy_(stored.read(name))
            done += stored.num_bytes(name)
            if progress is not None:
                progress(done, total)
    _give_back_memory()
    seconds = time.perf_counter() - began
    return LoadReport(num_tensors=len(names), bytes=total, seconds=seconds, kv_scales=scales)


def _give_back_memory() -> None:
    """Let the C library return what tensors in passing took (30 MB for a model of 500): it would
    keep it for allocations that never come. Only glibc has the call.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def open_weights(
    source: ModelSource,
    slots: Mapping[str, Tensor],
    formats: Mapping[str, str],
    load_format: str,
    seed: int,
) -> Weights:
    """The weights that `load_format` names; "auto" goes by what the source is."""
    if load_format == "dummy":
        return DummyWeights(slots, seed)
    stored = "gguf" if source.kind == "gguf" else "safetensors"
    if load_format not in ("auto", stored):
        raise ModelError(f"--load-format {load_format} does not fit {source.path}: it is {stored}")
    if stored == "gguf":
        return GgufFile(source.path, formats)
    quantization = source.config.get("quantization_config")
    if quantization is not None and not _leaves_weights(quantization):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelError(f"{source.name}: weights quantised with {method!r} cannot be loaded")
    return SafetensorsFolder(source.path)


def _leaves_weights(quantization: Any) -> bool:
    """Is the cache all that it quantises?"""
    if not isinstance(quantization, dict) or quantization.get("config_groups") != {}:
        return False
    return quantization.get("quant_method") == "compressed-tensors"


def _shapes(slots: Mapping[str, Tensor], formats: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """What the slots hold, in elements."""
    shapes = {name: tuple(slot.shape) for name, slot in slots.items()}
    for name, format in formats.items():
        if name in shapes:  # a tied head is no slot of its own
            num_rows, num_bytes = shapes[name]
            shapes[name] = num_rows, row_size(format, num_bytes)
    return shapes


def check_fit(
    shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], model_name: str
) -> None:
    """Raise ModelError naming what is missing, surplus or of the wrong shape."""
    tied = "lm_head.weight" not in wanted
    surplus = [n for n in shapes if n not in wanted and not _is_ignorable(n, tied)]
    wrong = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    faults = {
        "missing tensors": [name for name in wanted if name not in shapes],
        "unknown tensors": surplus,
        "tensors of the wrong shape": wrong,
    }
    lines = [f"{what}: {_some(names)}" for what, names in faults.items() if names]
    if lines:
        raise ModelError(f"{model_name}: the weights do not fit config.json; {'; '.join(lines)}")


def _is_ignorable(name: str, tied: bool) -> bool:
    """Stored by older writers, and known to us from the config: rope tables, a tied head's copy.
    Or no weights: scales of the cache.
    """
    return (
        is_kv_scale(name)
        or name.endswith(".rotary_emb.inv_freq")
        or (tied and name == "lm_head.weight")
    )


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
