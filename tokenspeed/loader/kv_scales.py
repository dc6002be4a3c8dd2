"""Scales of keys and values that a checkpoint brings along for a cache of fp8, one of each a layer.

Names: `self_attn.k_proj.k_scale` (ModelOpt), `self_attn.k_scale`, `self_attn.k_proj.output_scale`
(compressed-tensors), and the same of v. A number is stored divided by its scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from tokenspeed.kv.specs import LayerScales
from tokenspeed.text.errors import ModelError

_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:(?:k_proj\.)?(k)_scale|(?:v_proj\.)?(v)_scale|(k)_proj\.output_scale|(v)_proj\.output_scale)"
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def is_kv_scale(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def read_kv_scales(
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    weights: Iterable[str],
    model_name: str,
) -> LayerScales | None:
    """(scale of keys, scale of values) of each layer that `weights` are of, or None where there are
    none. Raises ModelError for scales that are not one positive number, given once, of every layer.
    """
    found: dict[tuple[int, str], float] = {}
    for name in filter(is_kv_scale, shapes):
        layer, *kinds = _matched(name)
        at = int(layer), next(filter(None, kinds))
        if at in found:
            raise ModelError(f"{model_name}: {name} is a second scale of the same layer")
        found[at] = _number(name, shapes[name], read, model_name)
    if not found:
        return None
    layers = sorted({int(match[1]) for match in map(_LAYER.match, weights) if match})
    missing = [f"{kind} of layer {i}" for i in layers for kind in "kv" if (i, kind) not in found]
    if missing or len(found) > 2 * len(layers):
        what = f"no scale of {missing[0]}" if missing else "scales of layers that it has not"
        raise ModelError(f"{model_name}: scales for an fp8 cache are incomplete: {what}")
    return [(found[i, "k"], found[i, "v"]) for i in layers]


def _matched(name: str) -> tuple[str, ...]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return match.groups(default="")


def _number(
    name: str, shape: tuple[int, ...], read: Callable[[str], Tensor], model_name: str
) -> float:
    if math.prod(shape) != 1:
        raise ModelError(f"{model_name}: {name} has {list(shape)}: one scale a layer is understood")
    value = float(read(name).item())
    if not 0.0 < value < math.inf:
        raise ModelError(f"{model_name}: {name} is {value}: a scale is a positive number")
    return value
