"""The prologue of `attend` all the way: captured, moved across the cut, planned, stored, run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compile_tiny import VOCAB, random_model, tiny_family
from torch import Tensor, fx, nn

from tokenspeed.batch import forward_context
from tokenspeed.compile.capture import UnsupportedGraph
from tokenspeed.compile.matcher import pass_manager
from tokenspeed.compile.pipeline import Planned, plan_graphs
from tokenspeed.compile.plan import Constant, Number, Plan, Program, SequenceRow, decode, encode
from tokenspeed.compile.runner import Executable
from tokenspeed.compile.split import _arguments
from tokenspeed.kernels.attend import Prologue
from tokenspeed.kernels.attention_step import AttentionStep
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import cache_groups
from tokenspeed.models.family import DecoderConfig, Family
from tokenspeed.passes import Stage

CPU = torch.device("cpu")
BLOCK, NUM_PAGES = 4, 16
EPS = {"LlamaForCausalLM": 0.0, "Qwen3ForCausalLM": 1e-5}
CAPTURED_LAYERS = 4
"""Of six: what a uniform model needs."""


class FusingAttention(TorchAttention):
    """The oracle, declared as a backend that fuses; counts the prologues it was given."""

    fuses_prologue = True

    def __init__(self, family: Family, config: DecoderConfig, dtype: torch.dtype) -> None:
        groups = cache_groups(family.cache_specs(config))
        super().__init__(groups, PagePool(groups, NUM_PAGES, BLOCK, dtype, CPU))
        self.layers: list[int] = []

    def attend_fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        sinks: Tensor | None,
        prologue: Prologue,
    ) -> Tensor:
        self.layers.append(layer)
        return super().attend_fused(q, k, v, layer, sinks, prologue)


def plan_with_passes(
    family: Family,
    config: DecoderConfig,
    dtype: torch.dtype,
    *,
    fuses: bool = True,
    every_layer: bool = False,
) -> tuple[Planned, list[dict[str, int]]]:
    """The plan after the graph passes as they are on CUDA, and their counts by function."""
    manager = pass_manager(
        Stage.GRAPH, dtype=dtype, device="cuda", fuses_prologue=fuses, strict=True
    )
    counts = []

    def run_passes(graph: fx.Graph) -> None:
        manager(graph)
        counts.append(manager.counts)

    planned = plan_graphs(
        lambda: family.model(config),
        dtype=dtype,
        device=CPU,
        every_layer=every_layer,
        graph_pass=run_passes,
    )
    return planned, counts


def attend_rows(plan: Plan) -> list[SequenceRow]:
    return [row for row in plan.forward.rows if isinstance(row, SequenceRow)]


def outputs(planned: Planned, model: nn.Module, state: FusingAttention) -> list[Tensor]:
    """Hidden states of a prefill of two rows, a chunk beside a decode, and a decode of both. The
    plan goes through JSON first.
    """
    pieces = {key: piece.forward for key, piece in planned.pieces.items()}
    run = Executable(Program(decode(encode(planned.plan)), pieces), model)
    tables = [[torch.tensor([3, 1, 8, 5]), torch.tensor([2, 6, 7, 0])]]
    done, out = [0, 0], []
    for new in ((5, 2), (1, 6), (1, 1)):
        starts = [0, new[0], sum(new)]
        positions = torch.cat([torch.arange(d, d + n) for d, n in zip(done, new, strict=True)])
        done = [d + n for d, n in zip(done, new, strict=True)]
        state.plan(AttentionStep(starts, done, tables))
        with forward_context(state):
            out.append(run.forward(run.embed(positions * 7 % VOCAB), positions))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", EPS)
def test_the_plan_with_prologues_computes_the_same(architecture: str, dtype: torch.dtype) -> None:
    family, config = tiny_family(architecture)
    plain, _ = plan_with_passes(family, config, dtype, fuses=False)
    fused, counts = plan_with_passes(family, config, dtype)
    assert counts == [{}, {"attend_prologue": CAPTURED_LAYERS}, {}]

    eps = Number(EPS[architecture])
    for layer, row in enumerate(attend_rows(fused.plan)):
        assert row.args[3:5] == (Constant(layer), Constant(None))
        weights = [getattr(arg, "path", None) for arg in row.args[5:7]]
        if architecture == "Qwen3ForCausalLM":
            block = f"layers.{layer}.self_attn"
            assert weights == [f"{block}.q_norm.weight", f"{block}.k_norm.weight"]
        else:
            assert weights == [None, None]
        assert row.args[9] == eps
    assert len(fused.pieces) == len(plain.pieces) == 5
    assert not any(
        node.target is torch.cat for p in fused.pieces.values() for node in p.graph.nodes
    )

    model: Any = random_model(lambda: family.model(config), dtype)
    model.fill_buffers()
    without = FusingAttention(family, config, dtype)
    expected = outputs(plain, model, without)
    state = FusingAttention(family, config, dtype)
    for got, want in zip(outputs(fused, model, state), expected, strict=True):
        assert torch.equal(got, want)
    assert without.layers == []
    assert state.layers == [*range(6)] * 3


@pytest.mark.parametrize("architecture", EPS)
def test_few_layers_with_prologues_give_the_plan_of_all(architecture: str) -> None:
    family, config = tiny_family(architecture)
    short, _ = plan_with_passes(family, config, torch.float32)
    whole, counts = plan_with_passes(family, config, torch.float32, every_layer=True)
    assert counts[1] == {"attend_prologue": 6}
    assert short.plan == whole.plan
    assert short.pieces.keys() == whole.pieces.keys()


@pytest.mark.parametrize(
    ("changes", "fuses"),
    [
        ({}, False),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, True),
    ],
    ids=["the backend fuses nothing", "heads are turned in part"],
)
def test_where_it_must_not_the_plan_is_that_without(changes: dict[str, Any], fuses: bool) -> None:
    changes = changes | ({"partial_rotary_factor": 0.5} if changes else {})
    family, config = tiny_family("LlamaForCausalLM", **changes)
    untouched = plan_graphs(lambda: family.model(config), dtype=torch.float32, device=CPU)
    manager = pass_manager(Stage.GRAPH, dtype=torch.float32, device="cuda", fuses_prologue=fuses)
    planned = plan_graphs(
        lambda: family.model(config), dtype=torch.float32, device=CPU, graph_pass=manager
    )
    assert planned.plan == untouched.plan
    assert all(len(row.args) == 5 for row in attend_rows(planned.plan))


def test_on_a_cpu_the_pass_is_off() -> None:
    manager = pass_manager(Stage.GRAPH, dtype=torch.float32, device="cpu", fuses_prologue=True)
    manager(fx.symbolic_trace(nn.Identity()).graph)
    assert [report.off for report in manager.reports] == ["off on cpu"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), True, "0.1"])
def test_what_json_cannot_hold_is_refused_by_the_split(number: object) -> None:
    call = fx.Graph().call_function(torch.add, (number,))
    with pytest.raises(UnsupportedGraph, match=re.escape(f"not {number!r}")):
        _arguments(call, {})
