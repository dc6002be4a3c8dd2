"""Linear layers by the kernel that is fastest for their shape and the step's tokens.

    norm_linear    rms_norm(x) w^T + bias
    linear_add     x w^T + bias + residual
    norm_gate_up   silu_mul(rms_norm(x) w^T), w gate's rows before up's
    gate_up        silu_mul(x w^T), and
    linear         x w^T + bias, for steps of all sizes; the others are for few tokens

With one token a layer's kernels are too small and too many: the weights of a layer are read in a
fraction of the time that ten launches take. So what comes before and after a product is in one
kernel with it. With many tokens the library's products win, by the algorithm of its that is best,
but where a gate follows, which it cannot apply. So each op is opaque, and picks when it is launched
(or captured) from the real T and a table (`linear_tiles`). On a CPU `linear` goes by a table of its
own (`linear_cpu_choices`), and the others are their references. Functional; shapes: x [T, K], norm
[K], w [N, K], bias [N], residual [T, N], of one dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels import cublas_lt, gated, gemv, linear_cpu_choices, skinny
from tokenspeed.kernels.linear_parts import LinearCall
from tokenspeed.kernels.linear_tiles import Algorithm, Tile, Way, way_for
from tokenspeed.kernels.rms_norm import launch_rms_norm, rms_norm_reference
from tokenspeed.kernels.silu_mul import launch as launch_silu_mul
from tokenspeed.kernels.silu_mul import reference as silu_mul_reference

_KERNELS: Mapping[str, Callable[[LinearCall, Tile, bool], Tensor]] = {
    "gemv": gemv.launch,
    "skinny": skinny.launch,
    "gated": gated.launch,
}


def norm_linear_reference(
    x: Tensor, norm: Tensor, w: Tensor, bias: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    return F.linear(rms_norm_reference(x, norm, eps), w, bias)


def linear_add_reference(
    x: Tensor, w: Tensor, residual: Tensor, bias: Tensor | None = None
) -> Tensor:
    return residual + F.linear(x, w, bias)


def norm_gate_up_reference(x: Tensor, norm: Tensor, w: Tensor, eps: float) -> Tensor:
    return silu_mul_reference(F.linear(rms_norm_reference(x, norm, eps), w))


def gate_up_reference(x: Tensor, w: Tensor) -> Tensor:
    return silu_mul_reference(F.linear(x, w))


def linear_reference(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = F.linear(x, w, bias)
    return out


def reference(call: LinearCall) -> Tensor:
    """Any of them."""
    x = call.x if call.norm is None else rms_norm_reference(call.x, call.norm, call.eps)
    out: Tensor = F.linear(x, call.w, call.bias)
    out = silu_mul_reference(out) if call.gate else out
    return out if call.residual is None else call.residual + out


def by_library(call: LinearCall, algorithm: Algorithm | None = None) -> Tensor:
    """The library's product between kernels of their own."""
    x = call.x if call.norm is None else launch_rms_norm(call.x, call.norm, call.eps)
    if algorithm is not None and call.bias is None:
        found = cublas_lt.run(x, call.w, algorithm, call.residual)
        if found is not None:
            return launch_silu_mul(found) if call.gate else found
    out: Tensor = F.linear(x, call.w, call.bias)
    out = launch_silu_mul(out) if call.gate else out
    return out if call.residual is None else out.add_(call.residual)


def launch(call: LinearCall, way: Way, compile_only: bool = False) -> Tensor:
    """With a tile of a kernel's, or by the library. `compile_only`: the result is not written."""
    if not isinstance(way, Tile):
        return by_library(call, way)
    if way.kernel == "gated" and not gated.serves(call):
        return by_library(call)
    if way.kernel == "skinny" and call.norm is not None:
        # Every program would norm all tokens again. The weight is on its way meanwhile.
        call = replace(call, x=launch_rms_norm(call.x, call.norm, call.eps), norm=None)
    return _KERNELS[way.kernel](call, way, compile_only)


def kind_of(call: LinearCall) -> str:
    """The op's name, by which tables know it."""
    if call.gate:
        return "gate_up" if call.norm is None else "norm_gate_up"
    if call.norm is not None:
        return "norm_linear"
    return "linear" if call.residual is None else "linear_add"


def run(call: LinearCall) -> Tensor:
    """As the table says."""
    kind, (num_rows, size) = kind_of(call), call.w.shape
    call.check(kind)
    num_tokens = call.x.shape[0]
    if num_tokens == 0:
        return call.x.new_empty(0, call.num_rows)
    return launch(call, way_for(kind, num_rows, size, call.x.dtype, num_tokens))


def run_norm_linear(x: Tensor, norm: Tensor, w: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return run(LinearCall(x, w, bias, norm, eps))


def run_linear_add(x: Tensor, w: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    return run(LinearCall(x, w, bias, residual=residual))


def run_norm_gate_up(x: Tensor, norm: Tensor, w: Tensor, eps: float) -> Tensor:
    return run(LinearCall(x, w, norm=norm, eps=eps, gate=True))


def run_gate_up(x: Tensor, w: Tensor) -> Tensor:
    return run(LinearCall(x, w, gate=True))


def run_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return run(LinearCall(x, w, bias))


def _fake_norm_linear(
    x: Tensor, norm: Tensor, w: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def _fake_linear_add(x: Tensor, w: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def _fake_norm_gate_up(x: Tensor, norm: Tensor, w: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0] // 2)


def _fake_gate_up(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0] // 2)


def _fake_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    assert x.dim() == w.dim() == 2, "linear takes x as [tokens, size] and w as [rows, size]"
    assert x.shape[1] == w.shape[1], f"linear: x has rows of {x.shape[1]}, w of {w.shape[1]}"
    assert bias is None or bias.shape == (w.shape[0],), f"linear: the bias is {list(bias.shape)}"
    assert x.dtype == w.dtype, f"linear: x is {x.dtype}, w {w.dtype}"
    return x.new_empty(x.shape[0], w.shape[0])


_library: Any = torch.library.Library("tokenspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _on_cpu, _on_cuda, _fake in (
    (
        "norm_linear(Tensor x, Tensor norm, Tensor w, Tensor? bias, float eps) -> Tensor",
        norm_linear_reference,
        run_norm_linear,
        _fake_norm_linear,
    ),
    (
        "linear_add(Tensor x, Tensor w, Tensor residual, Tensor? bias=None) -> Tensor",
        linear_add_reference,
        run_linear_add,
        _fake_linear_add,
    ),
    (
        "norm_gate_up(Tensor x, Tensor norm, Tensor w, float eps) -> Tensor",
        norm_gate_up_reference,
        run_norm_gate_up,
        _fake_norm_gate_up,
    ),
    (
        "gate_up(Tensor x, Tensor w) -> Tensor",
        gate_up_reference,
        run_gate_up,
        _fake_gate_up,
    ),
    (
        "linear(Tensor x, Tensor w, Tensor? bias=None) -> Tensor",
        linear_cpu_choices.run,
        run_linear,
        _fake_linear,
    ),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, _on_cpu, "CPU")
    _library.impl(_name, _on_cuda, "CUDA")
    torch.library.register_fake(f"tokenspeed::{_name}", _fake, lib=_library)

norm_linear = torch.ops.tokenspeed.norm_linear.default
linear_add = torch.ops.tokenspeed.linear_add.default
norm_gate_up = torch.ops.tokenspeed.norm_gate_up.default
gate_up = torch.ops.tokenspeed.gate_up.default
linear = torch.ops.tokenspeed.linear.default
