"""The closed tables of ops.

`OPS`: fused ops that passes put in the place of what models spell out. `SEQUENCE_CALLS`: ops at
which a captured graph is cut, and which run outside its pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.kernels import linear, qk_norm_rope, rms_norm, rope_angles, silu_mul
from tokenspeed.kernels.attend import run_attend


@dataclass(frozen=True)
class Op:
    """A fused op's functions, of the same arguments (tensors first, then plain numbers).
    `reference` is the same in plain torch: the pattern of the op's pass, the oracle of its kernels,
    and what a CPU's graphs have in its place. `launch` is what CUDA runs: to call it spares the
    dispatcher's cost.
    """

    reference: Callable[..., Any]
    launch: Callable[..., Any]


OPS: dict[Any, Op] = {
    rms_norm.rms_norm: Op(rms_norm.rms_norm_reference, rms_norm.launch_rms_norm),
    rms_norm.add_rms_norm: Op(rms_norm.add_rms_norm_reference, rms_norm.launch_add_rms_norm),
    qk_norm_rope.rope: Op(qk_norm_rope.rope_reference, qk_norm_rope.launch_rope),
    qk_norm_rope.qk_norm_rope: Op(
        qk_norm_rope.qk_norm_rope_reference, qk_norm_rope.launch_qk_norm_rope
    ),
    rope_angles.rope_angles: Op(rope_angles.reference, rope_angles.launch),
    silu_mul.silu_mul: Op(silu_mul.reference, silu_mul.launch),
    linear.norm_linear: Op(linear.norm_linear_reference, linear.run_norm_linear),
    linear.linear_add: Op(linear.linear_add_reference, linear.run_linear_add),
    linear.norm_gate_up: Op(linear.norm_gate_up_reference, linear.run_norm_gate_up),
    linear.gate_up: Op(linear.gate_up_reference, linear.run_gate_up),
    linear.linear: Op(linear.linear_reference, linear.run_linear),
}


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
