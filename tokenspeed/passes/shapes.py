"""Graph marks that passes look for, and checks of operands that they share.

A mark is the part of an idiom that nothing else computes. Counting marks tells how often a pass
should have matched, so that a pattern that went stale is noticed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_SPLITS = (operator.getitem, aten.split_with_sizes.default, aten.split.Tensor, aten.slice.Tensor)
_CASTS = (torch.ops.prims.convert_element_type.default,)


def calls(node: object, *targets: Any) -> bool:
    """Is it a call of one of these functions?"""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def uncast(node: Any) -> Any:
    """The node behind a change of dtype."""
    return node.args[0] if calls(node, *_CASTS) else node


def norms(graph: fx.Graph) -> Iterator[tuple[fx.Node, float]]:
    """What each RMSNorm normalises, and its epsilon: rsqrt(mean(x ** 2) + eps)."""
    for node in graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        biased = node.args[0]
        if not calls(biased, aten.add.Tensor) or not isinstance(biased.args[1], float):
            continue
        mean = biased.args[0]
        if calls(mean, aten.mean.dim) and calls(mean.args[0], aten.pow.Tensor_Scalar):
            yield uncast(mean.args[0].args[0]), biased.args[1]


def epsilons(graph: fx.Graph) -> tuple[float, ...]:
    return tuple(sorted({eps for _, eps in norms(graph)}))


def angles(graph: fx.Graph) -> Iterator[tuple[fx.Node, float]]:
    """Cosines of angles whose sines are there too, and what both are multiplied with (else 1.0)."""
    for node in graph.find_nodes(op="call_function", target=aten.cos.default):
        if any(calls(user, aten.sin.default) for user in node.args[0].users):
            factors = [user.args[1] for user in node.users if calls(user, aten.mul.Tensor)]
            scale = factors[0] if len(factors) == len(node.users) == 1 else 1.0
            yield node, scale if isinstance(scale, float) else 1.0


def scales(graph: fx.Graph) -> tuple[float, ...]:
    return tuple(sorted({scale for _, scale in angles(graph)}))


def gates(graph: fx.Graph) -> Iterator[fx.Node]:
    """Products with a silu: (x / (1 + exp(-x))) * y."""
    for node in graph.find_nodes(op="call_function", target=aten.div.Tensor):
        below = node.args[1]
        is_silu = calls(below, aten.add.Tensor) and calls(below.args[0], aten.exp.default)
        users = [user for each in (node, *node.users) for user in each.users]
        if is_silu:
            yield from (user for user in users if calls(user, aten.mul.Tensor))


def rotations(graph: fx.Graph) -> Iterator[Any]:
    """What each rotation turns: cat(a * cos - b * sin, b * cos + a * sin), a and b its slices."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = node.args[0]
        if (
            len(parts) == 2
            and calls(parts[0], aten.sub.Tensor)
            and calls(parts[1], aten.add.Tensor)
        ):
            product = parts[0].args[0]
            if calls(product, aten.mul.Tensor) and calls(product.args[0], aten.slice.Tensor):
                yield product.args[0].args[0]


def is_normed(node: Any) -> bool:
    """Is it x * rsqrt(..) * weight?"""
    if not calls(node, aten.mul.Tensor):
        return False
    scaled = uncast(node.args[0])
    return calls(scaled, aten.mul.Tensor) and calls(scaled.args[1], aten.rsqrt.default)


def refuse_rows(name: str, x: Any) -> str | None:
    """Kernels take dense rows, of tokens or of their heads, and lay their results out in order."""
    if not isinstance(x, Tensor) or x.dim() not in (2, 3):
        return f"{name} is no [tokens, size] or [tokens, heads, size]"
    strides = x.stride()
    if strides[-1] != 1:
        return f"{name} is not contiguous: strides {strides}"
    # A stride that depends on the token count belongs to a transposed tensor.
    if not all(isinstance(stride, int) for stride in strides) or strides != _falling(strides):
        return f"{name} is transposed: strides {strides}"
    return None


def _falling(strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(strides, reverse=True))


def refuse_vector(name: str, vector: Any, x: Tensor) -> str | None:
    """A weight for each element of x's rows, of x's dtype."""
    if not isinstance(vector, Tensor) or vector.dim() != 1 or vector.shape[0] != x.shape[-1]:
        return f"{name} is no vector of a row's size"
    if vector.dtype != x.dtype:
        return f"{name} is {vector.dtype}, x {x.dtype}"
    if vector.stride(0) != 1:
        return f"{name} is not contiguous"
    return None


def refuse_product(x: Any, w: Any, bias: Any = None) -> str | None:
    """x [T, K] and a weight [N, K] as checkpoints store it, of one dtype, and a bias [N] of it."""
    if reason := refuse_rows("x", x):
        return reason
    if x.dim() != 2:
        return "x is no [tokens, size]"
    if not isinstance(w, Tensor) or w.dim() != 2 or not w.is_contiguous():
        return "w is no contiguous [rows, size]"
    if w.dtype != x.dtype or not all(isinstance(size, int) for size in w.shape):
        return f"w is {w.dtype} {list(w.shape)}, x {x.dtype}"
    if bias is None:
        return None
    return refuse_vector("bias", bias, w.t())


def is_product(node: Any) -> bool:
    """Is it x w^T, or that and a bias [N]?"""
    if not calls(node, *_PRODUCTS) or not calls(node.args[-1], aten.permute.default):
        return False
    return bool(node.target == aten.mm.default or node.args[0].meta["val"].dim() == 1)


def products(graph: fx.Graph) -> Iterator[fx.Node]:
    for target in _PRODUCTS:
        found = graph.find_nodes(op="call_function", target=target)
        yield from (node for node in found if is_product(node))


def factor(product: fx.Node) -> Any:
    """x of x w^T."""
    return product.args[-2]


def gated_products(graph: fx.Graph) -> Iterator[fx.Node]:
    """Products without a bias of which one half is the gate of the other, and that nothing else
    reads.
    """
    for gate in gates(graph):
        product: Any = gate.args[1]
        while calls(product, *_SPLITS):
            product = product.args[0]
        is_plain = calls(product, aten.mm.default) and is_product(product)
        if is_plain and all(calls(user, *_SPLITS) for user in product.users):
            yield product


def refuse_angles(cos: Any, sin: Any, x: Tensor) -> str | None:
    """float32 [T, 1, R / 2], shared by a token's heads."""
    for each in (cos, sin):
        if not isinstance(each, Tensor) or each.dim() != 3 or each.shape[1] != 1:
            return "the angles are no [tokens, 1, pairs]"
        if each.dtype != torch.float32:
            return f"the angles are {each.dtype}, not float32"
        if each.stride(2) != 1:
            return "the angles are not contiguous"
    if x.dim() != 3 or 2 * cos.shape[2] > x.shape[2] or cos.shape[2] != sin.shape[2]:
        return "the angles do not fit the heads"
    return None
