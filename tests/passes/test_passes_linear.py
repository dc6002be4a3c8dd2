"""Passes that give linear layers their prologues and epilogues in decode steps: what they fuse in
real models, and what they must leave alone. The graphs are a CPU's, the pipeline is CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pass_graphs import (
    Slot,
    captured_forward,
    compile_piece,
    piece_of,
    pieces_of,
    placeholders,
    random_value,
    through_slot,
)
from torch import Tensor, nn

from tokenspeed.compile import torch_api
from tokenspeed.compile.graph_receipt import GraphReceipt, PieceReceipt
from tokenspeed.compile.matcher import pass_manager
from tokenspeed.compile.pictures import ops_of
from tokenspeed.engine.tile_tables import sites_of
from tokenspeed.kernels.rms_norm import rms_norm_reference
from tokenspeed.passes import PIPELINE, Stage
from tokenspeed.passes.manager import PassManager
from tokenspeed.passes.rewrite import EVERY, FEW, TokenRange

BF16 = torch.bfloat16
SIZE, ROWS = 16, 24
BLOCK = {"linear_add": 2, "norm_gate_up": 1}
HEADS = {"LlamaForCausalLM": {}, "Qwen2ForCausalLM": {}, "Qwen3ForCausalLM": {"qk_norm_rope": 2}}


def manager(dtype: torch.dtype = BF16, token_range: TokenRange = FEW) -> PassManager:
    return pass_manager(
        Stage.PIECE, dtype=dtype, device="cuda", token_range=token_range, strict=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("architecture", HEADS)
def test_every_linear_layer_is_fused(architecture: str, dtype: torch.dtype) -> None:
    """Qwen2 has a bias in the first projection."""
    pieces = pieces_of(captured_forward(architecture, dtype))
    slots = [through_slot(piece, manager(dtype)) for piece in pieces]
    heads = HEADS[architecture]
    expected = [
        {"norm_linear": 1, "rope_angles": 1, **heads},
        {**BLOCK, "norm_linear": 1, **heads},
        {**BLOCK, "rms_norm": 1},
    ]
    assert [slot.counts for slot in slots] == expected
    for slot, counts in zip(slots, expected, strict=True):
        assert slot.ops() == sorted(f"tokenspeed::{k}" for k, n in counts.items() for _ in range(n))
        assert not any("mm" in str(node.target) for node in slot.after.graph.nodes)
        assert not any(report.is_short for report in slot.manager.reports)
        slot.assert_equal()


def test_the_receipt_names_the_layers_that_can_be_tuned() -> None:
    """And their weights are the model's."""
    piece = pieces_of(captured_forward("LlamaForCausalLM", BF16))[1]
    view = PieceReceipt(after=ops_of(through_slot(piece, manager()).after.graph))
    sites = sites_of(GraphReceipt(pieces={"piece": {"0-32": view}}))
    assert {site.kind for site in sites} == {"norm_linear", *BLOCK}
    values = [torch_api.example_value(node) for node in placeholders(piece)]
    shapes = {str(list(value.shape)) for value in values if isinstance(value, Tensor)}
    for site, last in sites.items():
        assert str([site.num_rows, site.size]) in shapes
        assert (site.dtype, last) == ("bfloat16", 32)


@pytest.mark.long
def test_inductor_calls_the_fused_ops() -> None:
    piece = pieces_of(captured_forward("Qwen2ForCausalLM", torch.float32))[1]
    run = compile_piece(piece, manager(torch.float32))
    torch.manual_seed(0)
    values = [random_value(torch_api.example_value(node)) for node in placeholders(piece)]
    for got, want in zip(run(*values), piece(*values), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_the_head_is_a_linear_layer_alone() -> None:
    slot = slot_of(lambda x, w, norm, square: F.linear(x, w))
    assert slot.counts == {"linear": 1}


def test_steps_of_many_tokens_have_their_products_alone_chosen() -> None:
    above = TokenRange(33, None)
    piece = pieces_of(captured_forward("LlamaForCausalLM", BF16))[1]
    slot = through_slot(piece, manager(token_range=above))
    assert slot.counts == {"gate_up": 1, "linear": 3, "add_rms_norm": 2}
    off = {report.name: report.off for report in slot.manager.reports}
    assert off["linear_add"] == "does not serve this token range"


@pytest.mark.parametrize("token_range", [FEW, TokenRange(33, None)], ids=str)
def test_a_merged_product_with_a_bias_is_not_gated(token_range: TokenRange) -> None:
    piece = pieces_of(captured_forward("LlamaForCausalLM", BF16, mlp_bias=True))[1]
    slot = through_slot(piece, manager(token_range=token_range))
    assert not {"gate_up", "norm_gate_up"} & slot.counts.keys() and slot.counts["silu_mul"] == 1
    assert not any(report.is_short for report in slot.manager.reports)
    slot.assert_equal()


class Layer(nn.Module):
    """`function(x, w, norm, square)` of a weight [24, 16], a norm's [16], and a weight [16, 16]."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w, self.norm, self.square = (
            nn.Parameter(torch.ones(shape, dtype=BF16), requires_grad=False)
            for shape in ((ROWS, SIZE), (SIZE,), (SIZE, SIZE))
        )
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w, self.norm, self.square)


def slot_of(function: Callable[..., Tensor]) -> Slot:
    x = torch.zeros(8, SIZE, dtype=BF16)
    slot = through_slot(piece_of(Layer(function), x), manager())
    slot.assert_equal()
    return slot


def refused(slot: Slot) -> set[str]:
    return {reason for report in slot.manager.reports for reason in report.refused}


def normed(x: Tensor, norm: Tensor) -> Tensor:
    return rms_norm_reference(x, norm, 1e-6)


def test_the_plain_ones_fire() -> None:
    slot = slot_of(lambda x, w, norm, square: F.linear(normed(x, norm), w))
    assert slot.counts == {"norm_linear": 1}
    slot = slot_of(lambda x, w, norm, square: x + F.linear(x.sin(), square))
    assert slot.counts == {"linear_add": 1}
    slot = slot_of(lambda x, w, norm, square: gated(F.linear(normed(x, norm), w)))
    assert slot.counts == {"norm_gate_up": 1}
    slot = slot_of(lambda x, w, norm, square: gated(F.linear(x, w)))
    assert slot.counts == {"gate_up": 1}


def gated(merged: Tensor, activation: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    gate, up = torch.split(merged, [ROWS // 2, ROWS // 2], -1)
    return activation(gate) * up


def test_normed_rows_that_two_layers_read() -> None:
    """Norming them twice would cost more than it saves."""

    def twice(x: Tensor, w: Tensor, norm: Tensor, square: Tensor) -> Tensor:
        rows = normed(x, norm)
        return torch.cat((F.linear(rows, w), F.linear(rows, square)), -1)

    assert slot_of(twice).counts == {"rms_norm": 1, "linear": 2}


def test_a_product_that_is_used_elsewhere() -> None:
    def used(x: Tensor, w: Tensor, norm: Tensor, square: Tensor) -> Tensor:
        product = F.linear(x, square)
        return torch.cat((x + product, product * 2), -1)

    assert slot_of(used).counts == {"linear": 1}


def test_a_merged_product_that_is_used_elsewhere() -> None:
    def used(x: Tensor, w: Tensor, norm: Tensor, square: Tensor) -> Tensor:
        merged = F.linear(normed(x, norm), w)
        return torch.cat((gated(merged), merged * 2), -1)

    assert slot_of(used).counts == {"norm_linear": 1, "silu_mul": 1}


def test_another_activation() -> None:
    slot = slot_of(lambda x, w, norm, square: gated(F.linear(normed(x, norm), w), torch.sigmoid))
    assert slot.counts == {"norm_linear": 1}


def test_a_weight_that_is_computed() -> None:
    """A kernel reads weights before the kernel in front, which may have made them, has ended."""
    slot = slot_of(lambda x, w, norm, square: x + F.linear(normed(x, norm * 2), square * 2))
    assert slot.counts == {"rms_norm": 1}
    assert refused(slot) >= {"w is no input of the graph", "norm is no input of the graph"}


def test_a_residual_that_is_broadcast() -> None:
    slot = slot_of(lambda x, w, norm, square: norm + F.linear(x, square))
    assert slot.counts.get("linear_add", 0) == 0


def test_a_weight_that_is_transposed() -> None:
    """[K, N], as no checkpoint stores it."""
    slot = slot_of(lambda x, w, norm, square: normed(x, norm) @ square)
    assert slot.counts == {"rms_norm": 1}


def test_only_cuda_has_them() -> None:
    rows = {row.name: row for row in PIPELINE}
    for name in ("norm_gate_up", "norm_linear", "linear_add"):
        assert (rows[name].on_cpu, rows[name].serves) == (False, FEW)
    for name in ("gate_up", "linear"):
        assert (rows[name].on_cpu, rows[name].serves) == (False, EVERY)
