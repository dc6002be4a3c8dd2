"""The graph pass that moves RoPE and the norm of heads into `attend`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import TOKENS, captured_forward, random_value
from torch import Tensor, fx, nn

from tokenspeed.batch import forward_context
from tokenspeed.compile import torch_api
from tokenspeed.compile.capture import Captured
from tokenspeed.compile.matcher import pass_manager
from tokenspeed.kernels.attend import ATTEND, Prologue, prologue_reference, reference
from tokenspeed.passes import Stage
from tokenspeed.passes.manager import PassManager


class Fused:
    """One whole sequence, with a prologue or without; remembers the prologues."""

    def __init__(self) -> None:
        self.prologues: list[Prologue] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        return reference(q, k, v, 0.3 + 0.1 * layer)

    def attend_fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        sinks: Tensor | None,
        prologue: Prologue,
    ) -> Tensor:
        self.prologues.append(prologue)
        return self.attend(*prologue_reference(q, k, prologue), v, layer, sinks)


def manager_for(dtype: torch.dtype) -> PassManager:
    return pass_manager(Stage.GRAPH, dtype=dtype, device="cuda", fuses_prologue=True, strict=True)


def run(captured: Captured) -> tuple[Tensor, Fused]:
    state = Fused()
    torch.manual_seed(0)
    values = [
        random_value(torch_api.example_value(node))
        for node in captured.graph.find_nodes(op="placeholder")
    ]
    with forward_context(state):
        (out,) = fx.GraphModule(nn.Module(), captured.graph)(*values)
    return out, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_every_layer_gets_its_prologue(architecture: str, dtype: torch.dtype) -> None:
    captured = captured_forward(architecture, dtype)
    want, plain = run(captured)
    manager = manager_for(dtype)
    manager(captured.graph)
    assert manager.counts == {"attend_prologue": 3}
    got, fused = run(captured)
    assert torch.equal(want, got)
    assert (len(plain.prologues), len(fused.prologues)) == (0, 3)
    for prologue in fused.prologues:
        assert (prologue.q_weight is not None) == (architecture == "Qwen3ForCausalLM")
        assert prologue.eps == (1e-5 if architecture == "Qwen3ForCausalLM" else 0.0)
        assert prologue.cos.shape == (TOKENS, 1, 4)
    left = [node.target for node in captured.graph.nodes]
    assert torch.cat not in left
    norms = left.count(torch.rsqrt)
    assert norms == 7, "only the norms of the hidden state are left"


def test_a_second_run_finds_nothing() -> None:
    captured = captured_forward("Qwen3ForCausalLM", torch.float32)
    manager = manager_for(torch.float32)
    manager(captured.graph)
    manager(captured.graph)
    assert manager.counts == {}


def attend_calls(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=ATTEND))


def use_the_rotated_elsewhere(call: fx.Node) -> None:
    with call.graph.inserting_after(call):
        total = call.graph.call_function(torch.add, (call, call.args[0]))
    call.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


def turn_keys_by_other_angles(call: fx.Node) -> None:
    _product(call.args[1]).args = (_product(call.args[1]).args[0], _sine(call))


def turn_only_queries(call: fx.Node) -> None:
    part = _product(call.args[1]).args[0]
    call.args = (call.args[0], part.args[0], *call.args[2:])


def use_another_epsilon(call: fx.Node) -> None:
    biased = [n for n in call.graph.nodes if 1e-05 in n.args]
    biased[1].args = (biased[1].args[0], 1e-6)


def use_float32_weights(call: fx.Node) -> None:
    for node in call.graph.find_nodes(op="placeholder"):
        if "_norm_parameters" in node.name and node.meta["example_value"].shape[0] == 8:
            node.meta["example_value"] = node.meta["example_value"].float()


def _product(rotated: Any) -> fx.Node:
    product: fx.Node = rotated.args[0].args[0][0].args[0]
    return product


def _sine(call: fx.Node) -> fx.Node:
    sine: fx.Node = call.args[0].args[0].args[0][0].args[1].args[1]  # type: ignore[union-attr]
    return sine


@pytest.mark.parametrize(
    "change",
    [
        use_the_rotated_elsewhere,
        turn_keys_by_other_angles,
        turn_only_queries,
        use_another_epsilon,
    ],
)
def test_a_layer_that_differs_is_left_alone(change: Callable[[fx.Node], None]) -> None:
    captured = captured_forward("Qwen3ForCausalLM", torch.float32)
    change(attend_calls(captured.graph)[0])
    want, _ = run(captured)
    manager = pass_manager(Stage.GRAPH, dtype=torch.float32, device="cuda", fuses_prologue=True)
    manager(captured.graph)
    assert manager.counts == {"attend_prologue": 2}
    assert torch.equal(run(captured)[0], want)


def test_a_float32_norm_of_bfloat16_heads_stays_in_the_piece() -> None:
    captured = captured_forward("Qwen3ForCausalLM", torch.bfloat16)
    use_float32_weights(attend_calls(captured.graph)[0])
    manager_for(torch.bfloat16)(captured.graph)
    assert all(node.args[5] is None for node in attend_calls(captured.graph) if node.args[5:])


def test_a_head_that_is_turned_in_part_is_left_alone() -> None:
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    captured = captured_forward(
        "LlamaForCausalLM", torch.float32, rope_parameters=partial, partial_rotary_factor=0.5
    )
    manager = pass_manager(Stage.GRAPH, dtype=torch.float32, device="cuda", fuses_prologue=True)
    manager(captured.graph)
    assert manager.counts == {}
