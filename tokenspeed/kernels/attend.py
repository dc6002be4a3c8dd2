"""`attend`: causal attention of a step's tokens over their sequences' cached keys and values.

A sequence call. The graph sees only its tensors and the layer index; pages, lengths and tables come
from the forward context, and writing k and v into the cache is its only side effect. Scale and head
counts stand in the layer's cache spec. Shapes: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D].

Optional operands are a prologue: RoPE of q and k, after an RMSNorm of their heads if there are
weights. Models never pass them; a pass does, for backends that fuse it.

The op is made with `Library.define` and `impl`: `torch.library.custom_op` costs about 100 us more a
call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from tokenspeed.batch import current_state
from tokenspeed.kernels.qk_norm_rope import qk_norm_rope_reference, rope_reference


class Prologue(NamedTuple):
    """What is left to do to q and k: norm of each head (weights [D] of q's dtype, or neither), then
    RoPE (cos and sin float32 [T, 1, R / 2]).
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    cos: Tensor
    sin: Tensor
    eps: float


class FusesPrologue(Protocol):
    """A `SequenceState` that takes a prologue along."""

    def attend_fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        sinks: Tensor | None,
        prologue: Prologue,
    ) -> Tensor: ...


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """One whole sequence in plain torch: token i sees tokens 0..i, or the last `window` of them;
    `Hq / Hkv` query heads share a key head.
    """
    num_tokens, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).triu(1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(-window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def prologue_reference(q: Tensor, k: Tensor, prologue: Prologue) -> tuple[Tensor, Tensor]:
    """q and k as attention takes them."""
    q_weight, k_weight, cos, sin, eps = prologue
    if q_weight is None or k_weight is None:
        return rope_reference(q, cos, sin), rope_reference(k, cos, sin)
    return (
        qk_norm_rope_reference(q, q_weight, cos, sin, eps),
        qk_norm_rope_reference(k, k_weight, cos, sin, eps),
    )


class PrologueFirst(ABC):
    """A `SequenceState` that does a prologue before it attends, and gains nothing by it."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        """As `SequenceState` has it."""

    def attend_fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        sinks: Tensor | None,
        prologue: Prologue,
    ) -> Tensor:
        """`attend` of q and k that are still to be normed and turned."""
        return self.attend(*prologue_reference(q, k, prologue), v, layer, sinks)


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
    """What models call: `layer` picks the cache, `sinks` [Hq] adds a logit to each head's
    softmax.
    """
    out: Tensor = torch.ops.tokenspeed.attend(q, k, v, layer, sinks)
    return out


def run_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    sinks: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """The op's body: hand the tokens to the backend of the step that is running. Compiled pieces
    rely on a contiguous result, as the fake promises it.
    """
    state = current_state()
    if cos is None or sin is None:
        return state.attend(q, k, v, layer, sinks).contiguous()
    prologue = Prologue(q_weight, k_weight, cos, sin, eps)
    fused = cast(FusesPrologue, state).attend_fused(q, k, v, layer, sinks, prologue)
    return fused.contiguous()


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    sinks: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    assert q.dim() == k.dim() == v.dim() == 3, "attend takes q, k, v as [tokens, heads, head_dim]"
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k.shape[1]
    assert k.shape[1:] == v.shape[1:], f"attend: k is {tuple(k.shape)} but v is {tuple(v.shape)}"
    assert k.shape[2] == head_dim, f"attend: heads of {head_dim} in q, of {k.shape[2]} in k"
    assert num_heads % num_kv_heads == 0, (
        f"attend: {num_heads} query heads cannot share {num_kv_heads} key heads evenly"
    )
    assert q.dtype == k.dtype == v.dtype, f"attend: q is {q.dtype}, k {k.dtype}, v {v.dtype}"
    assert sinks is None or sinks.shape == (num_heads,), (
        f"attend: sinks must be [{num_heads}], got {list(sinks.shape)}"
    )
    assert (q_weight is None) == (k_weight is None), "attend: a norm of q alone, or of k alone"
    assert (cos is None) == (sin is None), "attend: a cosine without a sine, or the other way"
    assert q_weight is None or cos is not None, "attend: a prologue that norms turns as well"
    return torch.empty_like(q, memory_format=torch.contiguous_format)


_library: Any = torch.library.Library("tokenspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, int layer, Tensor? sinks=None, Tensor? q_weight=None, "
    "Tensor? k_weight=None, Tensor? cos=None, Tensor? sin=None, float eps=0.0) -> Tensor"
)
for _key in ("CPU", "CUDA"):
    _library.impl("attend", run_attend, _key)
torch.library.register_fake("tokenspeed::attend", _fake, lib=_library)

ATTEND = torch.ops.tokenspeed.attend
"""The op as it stands in captured graphs."""
