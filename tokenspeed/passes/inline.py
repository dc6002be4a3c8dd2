"""Lower fused ops back to their references, where no kernel serves them.

Before: rms_norm        After: pow -> mean -> add eps -> rsqrt -> mul -> mul weight
Why: on a CPU a fused op has no kernel of its own, and would only keep Inductor from fusing what it
is made of with its neighbours in C++. What the other passes matched is counted by then.
"""

from __future__ import annotations

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
from tokenspeed.passes.rewrite import Inline

PASS = Inline(
    name="inline",
    references={
        rms_norm: rms_norm_reference,
        add_rms_norm: add_rms_norm_reference,
        rope: rope_reference,
        qk_norm_rope: qk_norm_rope_reference,
        silu_mul: silu_mul_reference,
        norm_linear: norm_linear_reference,
        linear_add: linear_add_reference,
        norm_gate_up: norm_gate_up_reference,
        small_linear: small_linear_reference,
    },
)
