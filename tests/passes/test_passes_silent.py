"""What passes must leave alone, and that they say why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pass_functions import SIZE, WithWeight, leaky_norm
from pass_graphs import Slot, manager_for, piece_of, through_slot
from torch import Tensor, nn

from tokenspeed.kernels.rms_norm import rms_norm_reference

BF16 = torch.bfloat16


def slot_of(module: nn.Module, x: Tensor) -> Slot:
    slot = through_slot(piece_of(module, x), manager_for(BF16, strict=True))
    slot.assert_equal()
    return slot


def rows(size: int = SIZE) -> Tensor:
    return torch.zeros(8, size, dtype=BF16)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm_reference(x, weight, 1e-6) * 2


def add_norm(x: Tensor, weight: Tensor) -> Tensor:
    total = x + x.sin()
    return rms_norm_reference(total, weight, 1e-6) + total


def test_the_plain_ones_fire() -> None:
    assert slot_of(WithWeight(norm), rows()).counts == {"rms_norm": 1}
    assert slot_of(WithWeight(add_norm), rows()).counts == {"add_rms_norm": 1}


@pytest.mark.parametrize("function", [norm, add_norm])
def test_a_float32_weight_in_a_bfloat16_model(function: Callable[..., Tensor]) -> None:
    slot = slot_of(WithWeight(function, torch.float32), rows())
    assert slot.counts == {}
    short = [report for report in slot.manager.reports if report.is_short]
    assert short
    for report in short:
        assert report.refused == ("weight is torch.float32, x torch.bfloat16",)


def test_another_epsilon() -> None:
    """A pattern is for one epsilon: those of the graph, and no other."""
    from_graph = slot_of(WithWeight(lambda x, w: rms_norm_reference(x, w, 0.25) * 2), rows())
    (node,) = [n for n in from_graph.after.graph.nodes if "rms_norm" in str(n.target)]
    assert node.args[2] == 0.25


def test_a_layer_norm_is_no_rms_norm() -> None:
    assert slot_of(WithWeight(lambda x, w: F.layer_norm(x, (SIZE,), w) * 2), rows()).counts == {}


def test_a_norm_whose_inside_is_used_elsewhere() -> None:
    module = WithWeight(leaky_norm)
    slot = through_slot(piece_of(module, rows()), manager_for(BF16))
    assert slot.counts == {}
    (report,) = [report for report in slot.manager.reports if report.is_short]
    assert (report.name, report.matched, report.expected) == ("rms_norm", 0, 1)


def test_a_broadcast_residual() -> None:
    def broadcast(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_reference(x + weight, weight, 1e-6) * 2

    slot = slot_of(WithWeight(broadcast), rows())
    assert slot.counts == {"rms_norm": 1}
    refused = [reason for report in slot.manager.reports for reason in report.refused]
    assert any("residual" in reason for reason in refused), refused


def test_rows_that_are_not_contiguous() -> None:
    def transposed(x: Tensor, weight: Tensor) -> Tensor:
        heads = x.unflatten(-1, (SIZE, 2)).transpose(1, 2)
        return rms_norm_reference(heads, weight, 1e-6) * 2

    slot = slot_of(WithWeight(transposed), rows(2 * SIZE))
    assert slot.counts == {}
    refused = [reason for report in slot.manager.reports for reason in report.refused]
    assert any("not contiguous" in reason for reason in refused), refused


def both(positions: Tensor, inv_freq: Tensor) -> Tensor:
    angles = positions.float()[:, None, None] * inv_freq
    return angles.cos() + angles.sin()


def cos_alone(positions: Tensor, inv_freq: Tensor) -> Tensor:
    return (positions.float()[:, None, None] * inv_freq).cos()


def of_matrices(positions: Tensor, inv_freq: Tensor) -> Tensor:
    angles = positions.float()[:, None, None] * inv_freq[None, :]
    return angles.cos() + angles.sin()


def angles_too(positions: Tensor, inv_freq: Tensor) -> Tensor:
    angles = positions.float()[:, None, None] * inv_freq
    return angles.cos() + angles.sin() + angles


@pytest.mark.parametrize(
    ("function", "count"), [(both, 1), (cos_alone, 0), (of_matrices, 0), (angles_too, 0)]
)
def test_angles_of_a_step(function: Callable[..., Tensor], count: int) -> None:
    """Silent for one function alone, for what is no vector, and where they are used elsewhere."""
    module = WithWeight(function, torch.float32)
    module.weight = nn.Parameter(torch.rand(SIZE), requires_grad=False)
    slot = through_slot(piece_of(module, torch.arange(8)), manager_for(BF16))
    assert slot.counts.get("rope_angles", 0) == count


def gate(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def gated(x: Tensor, weight: Tensor) -> Tensor:
        one, two = torch.split(x, [SIZE, SIZE], -1)
        return activation(one) * two * 2

    return gated


def test_another_activation() -> None:
    assert slot_of(WithWeight(gate(F.silu)), rows(2 * SIZE)).counts == {"silu_mul": 1}
    for activation in (F.gelu, lambda x: F.gelu(x, approximate="tanh"), torch.sigmoid, F.relu):
        assert slot_of(WithWeight(gate(activation)), rows(2 * SIZE)).counts == {}


def test_a_gate_that_is_used_elsewhere() -> None:
    def used(x: Tensor, weight: Tensor) -> Tensor:
        one, two = torch.split(x, [SIZE, SIZE], -1)
        return F.silu(one) * two + two

    slot = through_slot(piece_of(WithWeight(used), rows(2 * SIZE)), manager_for(BF16))
    assert slot.counts == {}


def test_halves_of_other_sizes() -> None:
    def uneven(x: Tensor, weight: Tensor) -> Tensor:
        one, two = torch.split(x, [1, SIZE], -1)
        return F.silu(one) * two

    slot = through_slot(piece_of(WithWeight(uneven), rows(SIZE + 1)), manager_for(BF16))
    assert slot.counts == {}


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@pytest.mark.parametrize(
    ("angle_dtype", "heads", "count"),
    [(torch.float32, 1, 1), (BF16, 1, 0), (torch.float32, 2, 0)],
    ids=["fires", "bfloat16 angles", "angles of each head"],
)
def test_angles(angle_dtype: torch.dtype, heads: int, count: int) -> None:
    def rotated(x: Tensor, weight: Tensor) -> Tensor:
        angles = x.float()[:, None, :4].expand(-1, heads, -1)
        cos, sin = angles.cos().to(angle_dtype), angles.sin().to(angle_dtype)
        return turn(x.unflatten(-1, (2, 8)), cos, sin)

    slot = through_slot(piece_of(WithWeight(rotated), rows()), manager_for(BF16))
    assert slot.counts.get("rope", 0) == count
    slot.assert_equal()
