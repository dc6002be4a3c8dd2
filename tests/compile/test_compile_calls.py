"""Pieces that are nothing but calls: which are, and that what is kept of them computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pass_graphs import (
    captured_forward,
    piece_of,
    pieces_of,
    placeholders,
    random_value,
    through_slot,
    tiny_model,
)
from torch import Tensor, fx, nn

from tokenspeed.compile import torch_api
from tokenspeed.compile.calls import Call, Calls, Ref, decode, encode, load
from tokenspeed.compile.capture import capture, example_ids
from tokenspeed.compile.lower import lower
from tokenspeed.compile.matcher import pass_manager
from tokenspeed.compile.split import split
from tokenspeed.compile.to_calls import calls_of
from tokenspeed.passes import Stage
from tokenspeed.passes.manager import PassManager
from tokenspeed.passes.rewrite import EVERY, FEW, MANY, TokenRange

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # inside Inductor

BFLOAT16 = torch.bfloat16
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {"rope_scaling": YARN}),
    "qwen3": ("Qwen3ForCausalLM", {}),
}


def manager_of(stage: Stage, token_range: TokenRange) -> PassManager:
    return pass_manager(
        *(stage,), dtype=BFLOAT16, device="cuda", token_range=token_range, fuses_prologue=True
    )


def inputs_of(piece: fx.GraphModule) -> list[Any]:
    return [torch_api.example_value(node) for node in placeholders(piece)]


def pieces_on_cuda(architecture: str, changes: dict[str, Any]) -> list[fx.GraphModule]:
    """All of a family's, as the graph passes of CUDA leave them."""
    captured = captured_forward(architecture, BFLOAT16, **changes)
    manager_of(Stage.GRAPH, EVERY)(captured.graph)
    model = tiny_model(architecture, BFLOAT16, **changes)
    embed = capture(model.embed, (example_ids(torch.device("cpu")),))
    head = capture(model.head, (torch.zeros(8, 32, dtype=BFLOAT16),))
    return [*pieces_of(captured), *split(embed)[1].values(), *split(head)[1].values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_pieces_of_a_family_on_cuda_are_calls(family: str) -> None:
    torch.manual_seed(1)
    for piece in pieces_on_cuda(*FAMILIES[family]):
        for token_range in (FEW, MANY):
            slot = through_slot(piece, manager_of(Stage.PIECE, token_range))
            found = calls_of(slot.after.graph, inputs_of(piece))
            assert found is not None, slot.after.graph
            kept = load(decode(encode(found)), "cpu")
            values = [random_value(node.meta["val"]) for node in placeholders(slot.after)]
            for want, got in zip(slot.after(*values), kept(*values), strict=True):
                assert torch.equal(want, got) and want.stride() == got.stride()


def test_what_is_calls_never_reaches_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("compiled")

    from torch._inductor.graph import GraphLowering

    monkeypatch.setattr(GraphLowering, "run", fail)
    piece = pieces_on_cuda(*FAMILIES["llama"])[1]
    lowered = lower(piece, "cpu", FEW, manager_of(Stage.PIECE, FEW))
    assert lowered.is_calls and load(decode(lowered.data), "cuda")


class Case(nn.Module):
    """A forward of x [T, 16], with a weight."""

    def __init__(self, forward: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(x, self.weight)


MORE = {
    "a loop": lambda x, w: F.linear(x, w).sin(),
    "a sum of two products": lambda x, w: F.linear(x, w) + F.linear(x.flip(0), w),
    "a cast": lambda x, w: F.linear(x, w).double(),
}


@pytest.mark.parametrize("case", MORE)
def test_what_has_loops_is_left_to_inductor(case: str) -> None:
    piece = piece_of(Case(MORE[case]), torch.zeros(8, 16))
    slot = through_slot(piece, PassManager([], token_range=EVERY, options={}))
    assert calls_of(slot.after.graph, inputs_of(piece)) is None


def test_a_product_alone_is_calls() -> None:
    piece = piece_of(Case(F.linear), torch.zeros(8, 16))
    slot = through_slot(piece, PassManager([], token_range=EVERY, options={}))
    inputs = inputs_of(piece)
    assert calls_of(slot.after.graph, inputs) is not None
    assert calls_of(slot.after.graph, inputs[::-1]) is None, "inputs in another order"
    assert calls_of(slot.after.graph, [*inputs, inputs[0]]) is None, "an input was merged"
    node = placeholders(slot.after)[0]
    slot.after.graph.output_node().args = ((node,),)
    assert calls_of(slot.after.graph, inputs) is None, "an input is returned"
    with slot.after.graph.inserting_before(slot.after.graph.output_node()):
        view = slot.after.graph.call_function(torch.ops.aten.permute.default, (node, [1, 0]))
    view.meta["val"] = node.meta["val"].permute(1, 0)
    slot.after.graph.output_node().args = ((view,),)
    assert calls_of(slot.after.graph, inputs) is None, "a view of an input is returned"


MM = "aten.mm.default"
WRONG = {
    "an unknown operator": Calls(2, (Call("aten.exp.default", (Ref(0),)),), (Ref(2),)),
    "another name": Calls(2, (Call("os.system", ("true",)),), (Ref(2),)),
    "a value before it is there": Calls(2, (Call(MM, (Ref(0), Ref(2))),), (Ref(2),)),
    "a negative value": Calls(2, (Call(MM, (Ref(0), Ref(-1))),), (Ref(2),)),
    "a result that is not there": Calls(2, (Call(MM, (Ref(0), Ref(1))),), (Ref(3),)),
    "endless inputs": Calls(1 << 40, (), ()),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_piece_is_refused(case: str) -> None:
    with pytest.raises((ValueError, msgspec.DecodeError)):
        load(decode(encode(WRONG[case])), "cpu")


@given(st.binary(max_size=80))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, msgspec.DecodeError)):
        load(decode(data), "cpu")
