"""The pipeline's table: order, defaults, switches; and the pass that cleans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pass_graphs import manager_for, piece_of, through_slot
from torch import Tensor, nn

import tokenspeed.passes
from tokenspeed.compile.matcher import pass_manager
from tokenspeed.kernels.tables import OPS
from tokenspeed.passes import PASS_NAMES, PIPELINE, Stage
from tokenspeed.passes.rewrite import Inline, Rewrite

F32 = torch.float32


def names(stage: Stage) -> list[str]:
    return [row.name for row in PIPELINE if row.stage is stage]


def test_every_pass_file_has_its_row() -> None:
    files = Path(tokenspeed.passes.__file__).parent.glob("*.py")
    made_of = {"__init__", "manager", "rewrite", "shapes", "sources", "torch_api", "traffic"}
    assert {path.stem for path in files} - made_of == PASS_NAMES
    assert len(PIPELINE) == len(PASS_NAMES)
    assert all(row.rule.name == row.name for row in PIPELINE)
    assert all(row.reason for row in PIPELINE)


def test_larger_patterns_come_first_and_lowering_last() -> None:
    order = names(Stage.PIECE)
    for larger, smaller in [
        ("qk_norm_rope", "rope"),
        ("qk_norm_rope", "rms_norm"),
        ("add_rms_norm", "rms_norm"),
        ("norm_gate_up", "norm_linear"),
        ("norm_gate_up", "gate_up"),
        ("gate_up", "silu_mul"),
        ("gate_up", "linear"),
        ("norm_linear", "rms_norm"),
        ("linear_add", "add_rms_norm"),
        ("norm_linear", "linear"),
        ("linear_add", "linear"),
    ]:
        assert order.index(larger) < order.index(smaller)
    assert order[0] == "noop" and order[-2:] == ["inline", "weight_layout"]


def test_every_fused_op_can_be_inlined() -> None:
    (inline,) = [row.rule for row in PIPELINE if isinstance(row.rule, Inline)]
    inlined = {str(op).partition(".")[2].partition(".")[0] for op in inline.references}
    assert inlined == set(names(Stage.PIECE)) - {"noop", "weight_layout", "inline"}


def test_every_pattern_is_the_reference_of_an_op() -> None:
    patterns = [row.rule.pattern for row in PIPELINE if isinstance(row.rule, Rewrite)]
    assert set(patterns) == {op.reference for op in OPS.values()} and len(patterns) == len(OPS)


def off(stage: Stage, device: str, **options: object) -> dict[str, str | None]:
    manager = pass_manager(stage, dtype=F32, device=device, **options)  # type: ignore[arg-type]
    manager(torch.fx.symbolic_trace(nn.Identity()).graph)
    return {report.name: report.off for report in manager.reports if report.off}


def test_defaults_by_device() -> None:
    assert not {"noop", "rms_norm", "inline"} & off(Stage.PIECE, "cpu").keys()
    assert {"rope", "inline"} <= off(Stage.PIECE, "cuda").keys()
    assert off(Stage.PIECE, "cuda")["inline"] == "off on cuda"
    assert not {"qk_norm_rope", "add_rms_norm"} & off(Stage.PIECE, "cuda").keys()


def test_a_prologue_is_for_backends_that_fuse_it() -> None:
    assert off(Stage.GRAPH, "cpu", fuses_prologue=True) == {"attend_prologue": "off on cpu"}
    unfused = {"attend_prologue": "the attention backend does not fuse it"}
    assert off(Stage.GRAPH, "cuda") == unfused
    assert off(Stage.GRAPH, "cuda", fuses_prologue=True) == {}


def test_a_pass_can_be_disabled_by_name() -> None:
    assert off(Stage.PIECE, "cpu", disabled=["rope"])["rope"] == "disabled"
    with pytest.raises(ValueError, match="no pass is named 'rpoe': they are add_rms_norm, "):
        pass_manager(Stage.PIECE, dtype=F32, device="cpu", disabled=["rpoe"])


class Calls(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[operator]


def cleaned(function: object) -> tuple[int, list[str]]:
    slot = through_slot(piece_of(Calls(function), torch.zeros(8, 4, 4)), manager_for(F32))
    slot.assert_equal()
    left = [str(n.target) for n in slot.after.graph.nodes if n.op == "call_function"]
    return slot.manager.counts.get("noop", 0), left


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.sin() * 1.0).cos(),
        lambda x: x.sin().reshape(-1, 4, 4).cos(),
        lambda x: x.sin()[:, :, :4].cos(),
        lambda x: x.sin().cos() * 1.0,
    ],
)
def test_what_does_nothing_is_removed(function: object) -> None:
    _, left = cleaned(function)
    assert left == ["aten.sin.default", "aten.cos.default"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 1.0,
        lambda x: x.transpose(1, 2).sin(),
        lambda x: x.sin()[:, :, :3].cos(),
        lambda x: x.sin() * 2.0,
        lambda x: x.sin() * 1,
    ],
)
def test_what_does_something_stays(function: object) -> None:
    count, left = cleaned(function)
    assert count == 0
    assert left
