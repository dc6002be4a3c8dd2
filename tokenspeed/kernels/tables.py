"""The closed tables of ops.

`OPS`: fused ops that passes put in the place of what models spell out. `SEQUENCE_CALLS`: ops at
which a captured graph is cut, and which run outside its pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.kernels.attend import run_attend
from tokenspeed.kernels.qk_norm_rope import (
    qk_norm_rope,
    qk_norm_rope_reference,
    rope,
    rope_reference,
)
from tokenspeed.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from tokenspeed.kernels.rope_angles import reference as rope_angles_reference
from tokenspeed.kernels.rope_angles import rope_angles
from tokenspeed.kernels.silu_mul import reference as silu_mul_reference
from tokenspeed.kernels.silu_mul import silu_mul
from tokenspeed.kernels.small_linear import (
    linear_add,
    linear_add_reference,
    norm_gate_up,
    norm_gate_up_reference,
    norm_linear,
    norm_linear_reference,
    small_linear,
    small_linear_reference,
)

OPS: dict[Any, Callable[..., Any]] = {
    rms_norm: rms_norm_reference,
    add_rms_norm: add_rms_norm_reference,
    rope: rope_reference,
    qk_norm_rope: qk_norm_rope_reference,
    rope_angles: rope_angles_reference,
    silu_mul: silu_mul_reference,
    norm_linear: norm_linear_reference,
    linear_add: linear_add_reference,
    norm_gate_up: norm_gate_up_reference,
    small_linear: small_linear_reference,
}
"""Fused op -> its reference: the same in plain torch, of the same arguments (tensors first, then
plain numbers). It is the pattern of the op's pass, the oracle of its kernels, and what a CPU runs.
"""


@dataclass(frozen=True)
class SequenceCall:
    """`run` takes the op's arguments in schema order, without the dispatcher's cost. Argument
    number `layer_arg` is the layer index, which a plan renumbers.
    """

    run: Callable[..., torch.Tensor]
    layer_arg: int


SEQUENCE_CALLS: dict[str, SequenceCall] = {
    "tokenspeed::attend": SequenceCall(run_attend, layer_arg=3),
}
