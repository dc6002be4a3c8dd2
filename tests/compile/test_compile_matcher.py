"""Every symbol of `matcher` does what passes need, on the torch that is installed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tokenspeed.compile.matcher import InductorPass, Matcher, inline, pass_manager, trace
from tokenspeed.kernels.rms_norm import add_rms_norm, add_rms_norm_reference
from tokenspeed.passes import Stage
from tokenspeed.passes.rewrite import Case, Inline, Operands, PassContext, Rewrite

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # inside Inductor

BF16 = torch.bfloat16


def scaled_silu(x: Tensor, factor: float) -> Tensor:
    return F.silu(x) * factor


def scaled_tanh(x: Tensor, factor: float) -> Tensor:
    return torch.tanh(x) + factor


def cases(context: PassContext) -> list[Case]:
    return [Case((context.empty(5, 3),), {"factor": factor}) for factor in (2.0, 3.0)]


def refuse_wide(operands: Operands) -> str | None:
    return "too wide" if operands["x"].shape[-1] > 8 else None


RULE = Rewrite("toy", scaled_silu, scaled_tanh, cases, lambda graph: 1, refuse_wide)


def traced(factor: float, size: int = 4, dtype: torch.dtype = BF16) -> fx.GraphModule:
    with FakeTensorMode():
        x = torch.empty(6, size, dtype=dtype)
    return trace(lambda x: scaled_silu(x, factor) * 2, [x])


def targets(graph_module: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"]


def test_trace_gives_functional_aten_as_inductor_decomposes_it() -> None:
    graph_module = traced(2.0)
    assert "aten.exp.default" in targets(graph_module)
    assert "prims.convert_element_type.default" in targets(graph_module)
    assert all("val" in n.meta for n in graph_module.graph.nodes if n.op == "call_function")


def test_a_pattern_is_for_each_number_and_its_dtype() -> None:
    for factor, count in ((2.0, 1), (3.0, 1), (4.0, 0)):
        graph_module = traced(factor)
        assert Matcher(RULE, BF16)(graph_module.graph) == count
        assert ("aten.tanh.default" in targets(graph_module)) == (count == 1)
        if count:
            added = [n for n in graph_module.graph.nodes if n.target == torch.ops.aten.add.Tensor]
            assert added[0].args[1] == factor
    assert Matcher(RULE, torch.float32)(traced(2.0).graph) == 0
    assert Matcher(RULE, torch.float32)(traced(2.0, dtype=torch.float32).graph) == 1


def test_a_refused_match_is_left_alone_and_told() -> None:
    matcher, graph_module = Matcher(RULE, BF16), traced(2.0, size=9)
    before = targets(graph_module)
    assert matcher(graph_module.graph) == 0
    assert targets(graph_module) == before
    assert matcher.refused == ["too wide"]


def test_no_pattern_is_traced_for_a_graph_without_the_mark() -> None:
    def explode(context: PassContext) -> list[Case]:
        raise AssertionError("traced")

    rule = Rewrite("toy", scaled_silu, scaled_tanh, explode, lambda graph: 0)
    assert Matcher(rule, BF16)(traced(2.0).graph) == 0


def test_inline_puts_the_reference_in_the_place_of_the_op() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(6, 4, dtype=BF16), torch.empty(4, dtype=BF16)

    def both(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = add_rms_norm(x, x, weight, 1e-6)
        return normed * 2, total

    def only_normed(x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = add_rms_norm(x, x, weight, 1e-6)[0]
        return normed * 2

    rule = Inline("inline", {add_rms_norm: add_rms_norm_reference})
    for function in (both, only_normed):
        graph_module = trace(function, [x, weight])
        assert inline(rule, graph_module.graph) == 1
        graph_module.graph.lint()
        graph_module.recompile()
        assert "aten.rsqrt.default" in targets(graph_module)
        assert not any("tokenspeed" in target for target in targets(graph_module))
        real = torch.randn(6, 4).to(BF16), torch.randn(4).to(BF16)
        for got, want in zip(
            torch.utils._pytree.tree_leaves(graph_module(*real)),
            torch.utils._pytree.tree_leaves(function(*real)),
            strict=True,
        ):
            assert torch.equal(got, want)


def test_inductor_runs_the_manager_and_keys_by_its_uuid() -> None:
    manager = pass_manager(Stage.PIECE, dtype=torch.float32, device="cpu")
    graph_pass = InductorPass(manager)
    graph_pass(fx.symbolic_trace(nn.Identity()).graph)
    assert [report.name for report in manager.reports][-1] == "weight_layout"
    assert graph_pass.uuid() == manager.uuid()


def test_the_uuid_of_the_passes() -> None:
    def uuid(dtype: torch.dtype = BF16, device: str = "cpu", **options: list[str]) -> str:
        return pass_manager(Stage.PIECE, dtype=dtype, device=device, **options).uuid()  # type: ignore[arg-type]

    assert uuid() == uuid()
    others = {uuid(), uuid(torch.float32), uuid(device="cuda"), uuid(disabled=["rope"])}
    assert len(others) == 4
