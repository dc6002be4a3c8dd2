"""The `attend` op: schema, shape rules, and the plain reference of it."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tokenspeed.batch import forward_context
from tokenspeed.kernels.attend import attend, reference
from tokenspeed.kernels.tables import SEQUENCE_CALLS


class Echo:
    """Answers with q + layer, and remembers sinks."""

    sinks: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        self.sinks = sinks
        return q + layer


def test_reference_by_hand() -> None:
    q = torch.tensor([[[1.0], [0.0]], [[1.0], [0.0]]])  # 2 tokens, 2 heads of 1 element
    k = torch.tensor([[[0.0]], [[math.log(3.0)]]])
    v = torch.tensor([[[8.0]], [[16.0]]])
    # The first token sees itself alone; head 0 of the second weighs 1 to 3, head 1 evenly.
    assert torch.allclose(reference(q, k, v, 1.0).flatten(), torch.tensor([8.0, 8.0, 14.0, 12.0]))


def test_reference_agrees_with_torch() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 6, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    heads = [x.repeat_interleave(6 // x.shape[1], 1).transpose(0, 1) for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3).transpose(0, 1)
    assert torch.allclose(reference(q, k, v, 0.3), want, atol=1e-6)


def test_the_op_asks_the_step_that_runs() -> None:
    state, q, k = Echo(), torch.zeros(2, 4, 8), torch.zeros(2, 2, 8)
    sinks = torch.ones(4)
    with forward_context(state):
        assert torch.equal(attend(q, k, k, 5), q + 5)
        assert state.sinks is None
        attend(q, k, k, 5, sinks)
        assert state.sinks is sinks
        direct = SEQUENCE_CALLS["tokenspeed::attend"].run(q, k, k, 5, None)
        assert torch.equal(direct, q + 5)
    with pytest.raises(AssertionError, match="outside forward_context"):
        attend(q, k, k, 0)


def test_the_table_names_the_layer_argument() -> None:
    schema = torch.ops.tokenspeed.attend.default._schema
    call = SEQUENCE_CALLS[schema.name]
    assert schema.arguments[call.layer_arg].name == "layer"


def test_fake_gives_a_contiguous_result() -> None:
    with FakeTensorMode():
        q = torch.empty(4, 3, 8).transpose(0, 1)
        k = torch.empty(3, 2, 8)
        out = attend(q, k, k, 0)
    assert out.shape == q.shape and out.is_contiguous()


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((3, 32), (3, 2, 8), (3, 2, 8), "[tokens, heads, head_dim]"),
        ((3, 4, 8), (3, 2, 8), (3, 1, 8), "k is (3, 2, 8) but v is (3, 1, 8)"),
        ((3, 4, 16), (3, 2, 8), (3, 2, 8), "heads of 16 in q, of 8 in k"),
        ((3, 5, 8), (3, 2, 8), (3, 2, 8), "5 query heads cannot share 2 key heads evenly"),
    ],
)
def test_wrong_shapes_are_named_when_the_graph_is_made(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], message: str
) -> None:
    with FakeTensorMode(), pytest.raises(AssertionError, match=re.escape(message)):
        attend(torch.empty(q), torch.empty(k), torch.empty(v), 0)


def test_wrong_dtypes_and_sinks_are_named() -> None:
    with FakeTensorMode():
        q, k = torch.empty(3, 4, 8), torch.empty(3, 2, 8)
        with pytest.raises(AssertionError, match=r"k torch.float32, v torch.bfloat16"):
            attend(q, k, k.bfloat16(), 0)
        with pytest.raises(AssertionError, match=r"sinks must be \[4\], got \[2\]"):
            attend(q, k, k, 0, torch.empty(2))
