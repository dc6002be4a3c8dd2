"""Models broken on purpose: the pass, the op and the check that are named for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pass_functions import SIZE, WithWeight, leaky_norm
from pass_graphs import Slot, captured_forward, manager_for, piece_of, through_slot
from torch import Tensor

from tokenspeed.compile.matcher import pass_manager
from tokenspeed.passes import Stage
from tokenspeed.passes.manager import PassFailed, PassManager
from tokenspeed.passes.rewrite import Miss

BF16 = torch.bfloat16


def slot_of(function: Callable[..., Tensor], size: int = SIZE, weight: torch.dtype = BF16) -> Slot:
    rows = torch.zeros(8, size, dtype=BF16)
    return through_slot(piece_of(WithWeight(function, weight), rows), manager_for(BF16))


def miss_of(rule: str, slot: Slot) -> Miss:
    """The nearest miss, at a node that is there, on a line of this file or of the reference."""
    miss = slot.manager.nearest(rule)
    assert miss is not None
    assert miss.node in {node.name for node in slot.after.graph.nodes}
    return miss


def op_at(slot: Slot, miss: Miss) -> str:
    (node,) = [node for node in slot.after.graph.nodes if node.name == miss.node]
    return str(node.target)


def rms_norm(x: Tensor, weight: Tensor, eps: float | Tensor = 1e-6) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def test_a_float32_weight_in_a_bfloat16_model() -> None:
    slot = slot_of(lambda x, w: rms_norm(x, w) * 2, weight=torch.float32)
    miss = miss_of("rms_norm", slot)
    assert (miss.matched, miss.total, op_at(slot, miss)) == (8, 8, "aten.mul.Tensor")
    assert (miss.check, miss.reason) == (
        "rms_norm.check",
        "weight is torch.float32, x torch.bfloat16",
    )
    assert miss.sources and "test_passes_nearest.py" in miss.sources[0]


def test_a_float32_weight_in_a_norm_of_a_sum() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        total = x + x.sin()
        return rms_norm(total, weight) + total

    miss = miss_of("add_rms_norm", slot_of(function, weight=torch.float32))
    assert miss.check == "add_rms_norm.check"
    assert miss.reason == "weight is torch.float32, x torch.bfloat16"


@pytest.mark.parametrize(
    ("activation", "matched", "reason"),
    [
        (
            F.gelu,
            6,
            "the pattern has aten.neg after prims.convert_element_type, the graph aten.mul",
        ),
        (
            torch.sigmoid,
            4,
            "the pattern has prims.convert_element_type after getitem, the graph aten.sigmoid",
        ),
    ],
)
def test_another_activation(
    activation: Callable[[Tensor], Tensor], matched: int, reason: str
) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = torch.split(x, [SIZE, SIZE], -1)
        return activation(gate) * up * 2

    slot = slot_of(function, 2 * SIZE)
    miss = miss_of("silu_mul", slot)
    assert (miss.matched, miss.total, miss.check, miss.reason) == (matched, 10, "", reason)
    assert "test_passes_nearest.py" in miss.sources[0]


def test_an_epsilon_that_is_no_number() -> None:
    slot = slot_of(lambda x, w: rms_norm(x, w, w.float().mean()) * 2)
    miss = miss_of("rms_norm", slot)
    assert (miss.matched, miss.total, op_at(slot, miss)) == (7, 8, "aten.add.Tensor")
    assert miss.reason == "aten.add takes a tensor, in the pattern 1e-06"


def test_an_inner_result_that_is_used_elsewhere() -> None:
    slot = slot_of(leaky_norm)
    miss = miss_of("rms_norm", slot)
    assert (miss.matched, miss.total, op_at(slot, miss)) == (8, 8, "aten.rsqrt.default")
    assert miss.reason.startswith("aten.rsqrt is used by prims.convert_element_type as well (")


def test_rows_that_are_not_contiguous() -> None:
    def transposed(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x.unflatten(-1, (SIZE, 2)).transpose(1, 2), weight) * 2

    miss = miss_of("rms_norm", slot_of(transposed, 2 * SIZE))
    assert miss.check == "rms_norm.check"
    assert miss.reason == "x is not contiguous: strides (32, 1, 2)"


def test_two_operands_that_should_be_one() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = x.sin(), x.cos()
        return F.silu(gate[:, :SIZE]) * up[:, SIZE:] * 2

    slot = slot_of(function, 2 * SIZE)
    assert slot.counts == {}
    assert slot.manager.nearest("silu_mul") is not None


def test_nothing_is_told_where_nothing_is_alike() -> None:
    slot = slot_of(lambda x, w: F.layer_norm(x, (SIZE,), w) * 2)
    assert slot.manager.nearest("rms_norm") is None
    assert slot.manager.nearest("rope") is None


def test_a_pass_that_matched_has_no_miss() -> None:
    slot = slot_of(lambda x, w: rms_norm(x, w) * 2)
    assert slot.counts == {"rms_norm": 1}
    assert slot.manager.nearest("rms_norm") is None


def test_a_strict_start_says_how_near_it_came() -> None:
    manager = manager_for(BF16, strict=True)
    with pytest.raises(
        Exception, match=r"matched 0 of 1: 8 of 8 ops are there; at rsqrt"
    ) as caught:
        rows = torch.zeros(8, SIZE, dtype=BF16)
        through_slot(piece_of(WithWeight(leaky_norm), rows), manager)
    assert isinstance(manager.failure, PassFailed), caught


def prologue() -> PassManager:
    return pass_manager(Stage.GRAPH, dtype=BF16, device="cuda", fuses_prologue=True)


def test_a_prologue_whose_queries_are_used_elsewhere() -> None:
    captured = captured_forward("Qwen3ForCausalLM", BF16)
    call = next(node for node in captured.graph.nodes if "attend" in str(node.target))
    with captured.graph.inserting_after(call):
        captured.graph.call_function(torch.sin, (call.args[0],))
    manager = prologue()
    captured.graph.eliminate_dead_code = lambda: False  # type: ignore[method-assign]
    manager(captured.graph)
    miss = manager.nearest("attend_prologue")
    assert miss is not None and miss.matched == 3
    assert "is used by sin" in miss.reason


def test_a_prologue_with_another_epsilon_for_keys() -> None:
    captured = captured_forward("Qwen3ForCausalLM", BF16)
    _, k_eps = [node for node in captured.graph.nodes if 1e-5 in node.args][1:3]
    k_eps.args = (k_eps.args[0], 1e-3)
    manager = prologue()
    manager(captured.graph)
    miss = manager.nearest("attend_prologue")
    assert miss is not None
    assert miss.reason == "the norm's epsilon is 1e-05 for queries, 0.001 for keys"
    assert manager.reports[0].matched == 2
