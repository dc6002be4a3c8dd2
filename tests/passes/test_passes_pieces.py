"""Passes over the pieces of real models: how often each fires, and that nothing changes by it."""

from __future__ import annotations

import pytest
import torch
from pass_graphs import (
    TOKENS,
    captured_forward,
    compile_piece,
    manager_for,
    pieces_of,
    placeholders,
    random_value,
    through_slot,
    tiny_model,
)
from torch import fx

from tokenspeed.compile import torch_api
from tokenspeed.compile.capture import capture
from tokenspeed.compile.matcher import pass_manager
from tokenspeed.compile.split import split
from tokenspeed.kernels import linear_cpu_choices
from tokenspeed.passes import Stage
from tokenspeed.passes.manager import PassManager

DTYPES = [torch.float32, torch.bfloat16]
TURNED = {
    "LlamaForCausalLM": "rope",
    "Qwen2ForCausalLM": "rope",
    "Qwen3ForCausalLM": "qk_norm_rope",
}


def expected_counts(architecture: str) -> list[dict[str, int]]:
    turned = {TURNED[architecture]: 2}
    block = {"add_rms_norm": 2, "silu_mul": 1}
    return [{"rms_norm": 1, "rope_angles": 1, **turned}, {**block, **turned}, block]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", TURNED)
def test_every_fusion_fires_in_every_piece(architecture: str, dtype: torch.dtype) -> None:
    pieces = pieces_of(captured_forward(architecture, dtype))
    slots = [through_slot(piece, manager_for(dtype, strict=True)) for piece in pieces]
    assert [slot.counts for slot in slots] == expected_counts(architecture)
    for slot, counts in zip(slots, expected_counts(architecture), strict=True):
        fused = sorted(f"tokenspeed::{name}" for name, n in counts.items() for _ in range(n))
        assert slot.ops() == fused
        assert not any(report.is_short for report in slot.manager.reports)
        assert not any("rsqrt" in str(node.target) for node in slot.after.graph.nodes)
        slot.assert_equal()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_cpu_fused_ops_are_counted_and_inlined(dtype: torch.dtype) -> None:
    pieces = pieces_of(captured_forward("Qwen3ForCausalLM", dtype))
    for piece, counts in zip(pieces, expected_counts("Qwen3ForCausalLM"), strict=True):
        slot = through_slot(piece, manager_for(dtype, inline=True, strict=True))
        assert slot.counts == counts
        assert slot.manager.counts["inline"] == sum(counts.values())
        assert not slot.ops()
        targets = [[str(n.target) for n in g.graph.nodes] for g in (slot.before, slot.after)]
        assert "prims.convert_element_type.default" in targets[0] or dtype == torch.float32
        for target in set(targets[1]):
            assert targets[1].count(target) <= targets[0].count(target), f"more {target}"
        assert all("val" in node.meta for node in slot.after.graph.nodes if node.op != "output")
        slot.assert_equal()


@pytest.mark.parametrize("architecture", TURNED)
def test_products_with_weights_choose_their_kernel(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q, k and v are one product, gate and up another; the head is a piece of its own. Without a
    table, which an engine of another test may have installed, the kernel is torch's, bit for bit.
    """
    monkeypatch.setattr(linear_cpu_choices, "_choices", {})
    f32 = torch.float32
    pieces = [*pieces_of(captured_forward(architecture, f32)), head_of(architecture, f32)]
    for piece, count in zip(pieces, [1, 4, 3, 1], strict=True):
        slot = through_slot(piece, on_a_cpu(f32))
        assert slot.counts.get("weight_layout") == count
        assert slot.ops().count("tokenspeed::linear") == count
        assert not any(".mm." in str(n.target) for n in slot.after.graph.nodes)
        assert not any("addmm" in str(n.target) for n in slot.after.graph.nodes)
        slot.assert_equal()


def test_products_in_bfloat16_stay() -> None:
    name, bf16 = "Qwen2ForCausalLM", torch.bfloat16
    for piece in [*pieces_of(captured_forward(name, bf16)), head_of(name, bf16)]:
        assert "weight_layout" not in through_slot(piece, on_a_cpu(bf16)).counts


def on_a_cpu(dtype: torch.dtype) -> PassManager:
    return pass_manager(Stage.PIECE, dtype=dtype, device="cpu", strict=True)


def head_of(architecture: str, dtype: torch.dtype) -> fx.GraphModule:
    model = tiny_model(architecture, dtype)
    (piece,) = split(capture(model.head, (torch.zeros(8, 32, dtype=dtype),)))[1].values()
    return piece


@pytest.mark.long
@pytest.mark.parametrize("inline", [True, False])
def test_inductor_compiles_what_the_passes_left(inline: bool) -> None:
    """Once with fused ops inlined, once with them opaque: both as the piece itself."""
    piece = pieces_of(captured_forward("Qwen3ForCausalLM", torch.float32))[1]
    manager = manager_for(torch.float32, inline=inline, strict=True)
    run = compile_piece(piece, manager)
    assert {**manager.counts, "noop": 0, "inline": 0} == {
        "add_rms_norm": 2,
        "silu_mul": 1,
        "qk_norm_rope": 2,
        "noop": 0,
        "inline": 0,
    }
    torch.manual_seed(0)
    values = [random_value(torch_api.example_value(node)) for node in placeholders(piece)]
    for got, want in zip(run(*values), piece(*values), strict=True):
        assert got.shape[0] == TOKENS
        assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)


def test_a_rotation_of_a_part_of_the_head_is_fused_as_well() -> None:
    captured = captured_forward(
        "LlamaForCausalLM", torch.bfloat16, rope_parameters=PARTIAL, partial_rotary_factor=0.5
    )
    slots = [through_slot(p, manager_for(torch.bfloat16)) for p in pieces_of(captured)[:2]]
    assert [slot.counts.get("rope") for slot in slots] == [2, 2]
    for slot in slots:
        slot.assert_equal()


PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def test_two_epsilons_in_one_graph() -> None:
    """Each has a pattern of its own, and goes to the op."""
    piece = pieces_of(captured_forward("LlamaForCausalLM", torch.float32))[1]
    biased = [n for n in piece.graph.nodes if 1e-05 in n.args]
    assert len(biased) == 2
    biased[0].args = (biased[0].args[0], 1e-3)
    slot = through_slot(piece, manager_for(torch.float32, strict=True))
    assert slot.counts["add_rms_norm"] == 2
    assert {eps_of(node) for node in slot.after.graph.nodes} == {None, 1e-3, 1e-5}
    slot.assert_equal()


def eps_of(node: fx.Node) -> object:
    is_norm = torch_api.op_name(node.target) == "tokenspeed::add_rms_norm"
    return node.args[3] if is_norm else None
