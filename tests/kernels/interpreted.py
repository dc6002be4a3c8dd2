"""Triton kernels against their references, in Triton's interpreter: run by
test_kernels_interpreter.py in a process of its own, with TRITON_INTERPRET=1.

Its casts to bfloat16 cut off instead of rounding: each may be a whole unit in the last place below.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenspeed.compile.calls import NAMES, Call, Calls, Ref, decode, encode, load
from tokenspeed.kernels import greedy_step, linear
from tokenspeed.kernels import qk_norm_rope as rope_kernels
from tokenspeed.kernels import rms_norm as norm_kernels
from tokenspeed.kernels import rope_angles as angle_kernels
from tokenspeed.kernels import silu_mul as gate_kernels
from tokenspeed.kernels.tables import OPS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype)


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous()
    tolerance = 1e-6 if got.dtype == torch.float32 else 2**-5
    assert torch.allclose(got.float(), want.float(), rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("size", [1, 37, 64])
def test_norms(size: int, dtype: torch.dtype) -> None:
    x, residual = draw(3, size, dtype=dtype), draw(3, size + 5, dtype=dtype)[:, 5:]
    weight = draw(size, dtype=dtype)
    assert_close(
        norm_kernels.launch_rms_norm(residual, weight, 1e-5),
        norm_kernels.rms_norm_reference(residual, weight, 1e-5),
    )
    pairs = zip(
        norm_kernels.launch_add_rms_norm(x, residual, weight, 1e-5),
        norm_kernels.add_rms_norm_reference(x, residual, weight, 1e-5),
        strict=True,
    )
    for got, want in pairs:
        assert_close(got, want)


@DTYPES
def test_norms_of_heads_in_place(dtype: torch.dtype) -> None:
    """Heads inside a wider row, as a split of the merged projection leaves them."""
    x, weight = draw(2, 40, dtype=dtype)[:, 6:36].unflatten(-1, (3, 10)), draw(10, dtype=dtype)
    got = norm_kernels.launch_rms_norm(x, weight, 1e-2)
    assert_close(got, norm_kernels.rms_norm_reference(x, weight, 1e-2))


def test_norms_square_in_float32() -> None:
    x = torch.full((1, 5), 1000.0, dtype=torch.float16)
    got = norm_kernels.launch_rms_norm(x, torch.ones(5, dtype=torch.float16), 0.0)
    assert torch.equal(got, torch.ones_like(x))


@DTYPES
@pytest.mark.parametrize("size", [1, 37])
def test_gate(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_kernels, "_BLOCK", 16)  # several programs a row
    gate_up = 4 * draw(2, 2 * size, dtype=dtype)
    assert_close(gate_kernels.launch(gate_up), gate_kernels.reference(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gate_of_extremes() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 3.0, 3.0]])
    assert torch.equal(gate_kernels.launch(gate_up), torch.tensor([[0.0, 600.0, 0.0]]))


@DTYPES
@pytest.mark.parametrize(("size", "half"), [(2, 1), (10, 5), (16, 8), (13, 3)])
def test_rotations(size: int, half: int, dtype: torch.dtype) -> None:
    x = draw(2, 60, dtype=dtype)[:, 7 : 7 + 3 * size].unflatten(-1, (3, size))
    weight = draw(size, dtype=dtype)
    cos, sin = draw(2, 1, half, dtype=torch.float32), draw(2, 1, half + 1, dtype=torch.float32)
    sin = sin[..., 1:]
    assert_close(rope_kernels.launch_rope(x, cos, sin), rope_kernels.rope_reference(x, cos, sin))
    assert_close(
        rope_kernels.launch_qk_norm_rope(x, weight, cos, sin, 1e-5),
        rope_kernels.qk_norm_rope_reference(x, weight, cos, sin, 1e-5),
    )


@pytest.mark.parametrize("scale", [1.0, 1.25])
@pytest.mark.parametrize("half", [1, 5, 64])
def test_angles(half: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(angle_kernels, "_BLOCK", 16)  # several programs
    positions, inv_freq = torch.tensor([0, 1, 7, 131071]), torch.rand(half)
    pairs = zip(
        angle_kernels.launch(positions, inv_freq, scale),
        angle_kernels.reference(positions, inv_freq, scale),
        strict=True,
    )
    for got, want in pairs:
        assert_close(got, want)


def test_no_tokens() -> None:
    nothing, weight, angles = torch.empty(0, 2, 8), torch.ones(8), torch.empty(0, 1, 4)
    assert rope_kernels.launch_rope(nothing, angles, angles).shape == nothing.shape
    assert norm_kernels.launch_rms_norm(nothing, weight, 1e-5).shape == nothing.shape
    assert gate_kernels.launch(torch.empty(0, 8)).shape == (0, 4)
    cos, sin = angle_kernels.launch(torch.empty(0, dtype=torch.int64), torch.ones(4), 1.0)
    assert cos.shape == sin.shape == (0, 1, 4)


def test_operands_that_kernels_would_misread_are_refused() -> None:
    x, weight, angles = torch.randn(4, 2, 8), torch.ones(8), torch.randn(4, 1, 4)
    with pytest.raises(AssertionError, match="rows must lie dense"):
        norm_kernels.launch_rms_norm(torch.randn(8, 4).t(), weight, 1e-5)
    with pytest.raises(AssertionError, match="float32"):
        norm_kernels.launch_rms_norm(x, weight.half(), 1e-5)
    with pytest.raises(AssertionError, match="residual"):
        norm_kernels.launch_add_rms_norm(x, x[:1], weight, 1e-5)
    with pytest.raises(AssertionError, match="angles in"):
        rope_kernels.launch_rope(x, angles.half(), angles.half())
    with pytest.raises(AssertionError, match="cos"):
        rope_kernels.launch_rope(x, angles[:2], angles[:2])
    with pytest.raises(AssertionError, match="silu_mul of"):
        gate_kernels.launch(torch.randn(2, 7))
    with pytest.raises(AssertionError, match="frequencies"):
        angle_kernels.launch(torch.arange(4), torch.ones(4).half(), 1.0)


X, WEIGHT, W = (draw(*shape, dtype=torch.float32) for shape in ((3, 16), (16,), (32, 16)))
HEADS, ANGLES = draw(3, 2, 16, dtype=torch.float32), draw(3, 1, 4, dtype=torch.float32)
OPERANDS: dict[object, tuple[object, ...]] = {
    norm_kernels.rms_norm: (X, WEIGHT, 1e-5),
    norm_kernels.add_rms_norm: (X, X, WEIGHT, 1e-5),
    rope_kernels.rope: (HEADS, ANGLES, ANGLES),
    rope_kernels.qk_norm_rope: (HEADS, WEIGHT, ANGLES, ANGLES, 1e-5),
    angle_kernels.rope_angles: (torch.arange(3), WEIGHT, 1.0),
    gate_kernels.silu_mul: (X,),
    linear.norm_linear: (X, WEIGHT, W, None, 1e-5),
    linear.linear_add: (X, W[:16], X),
    linear.norm_gate_up: (X, WEIGHT, W, 1e-5),
    linear.gate_up: (X, W),
    linear.linear: (X, W),
}


@pytest.mark.parametrize("op", OPS, ids=str)
def test_pieces_call_kernels_without_the_dispatcher(op: object) -> None:
    """As a piece that was kept for CUDA calls them, and with the operands of the op."""
    given = OPERANDS[op]
    tensors = [each for each in given if isinstance(each, Tensor)]
    numbers = iter(range(len(tensors)))
    args = tuple(Ref(next(numbers)) if isinstance(each, Tensor) else each for each in given)
    kept = encode(Calls(len(tensors), (Call(NAMES[op], args),), (Ref(len(tensors)),)))
    (got,) = load(decode(kept), "cuda")(*tensors)
    want = OPS[op].reference(*given)
    pairs = [(got, want)] if isinstance(got, Tensor) else zip(got, want, strict=True)
    for one, other in pairs:
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


def greedy_case(count: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits, tokens, lengths, rows: among them the scratch slot, twice, ties, and a NaN."""
    torch.manual_seed(count)
    logits = torch.randn(count, vocab_size).round(decimals=1)
    logits[0, -1] = float("nan")
    if count > 2:
        logits[2, 3] = float("inf")
    tokens = torch.randint(0, vocab_size, (8, 20), dtype=torch.int32)
    lengths = torch.tensor([1, 20, 3, 7, 19, 2, 5, 1])
    rows = torch.tensor([5, 7, 0, 3, 7, 4, 2][:count])
    return logits, tokens, lengths, rows


@pytest.mark.parametrize(("count", "vocab_size"), [(1, 5), (3, 2048), (7, 5000)])
def test_greedy_ends_of_a_step(count: int, vocab_size: int) -> None:
    logits, tokens, lengths, rows = greedy_case(count, vocab_size)
    begun = greedy_step.begin_reference(tokens, lengths, rows)
    for got, want in zip(greedy_step.launch_begin(tokens, lengths, rows), begun, strict=True):
        assert torch.equal(got, want)
    theirs, ours = (tokens.clone(), lengths.clone()), (tokens.clone(), lengths.clone())
    want_ids, want_bad = greedy_step.end_reference(logits, *theirs, rows)
    got_ids, got_bad = greedy_step.launch_end(logits, *ours, rows)
    assert torch.equal(got_bad, want_bad) and want_bad[0] == 1
    good = want_bad == 0
    assert torch.equal(got_ids[good], want_ids[good])
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert ours[1][7] == 1 and torch.equal(ours[0][7], tokens[7]), "scratch was written"


def test_appending_skips_faults_scratch_and_full_slots() -> None:
    _, tokens, lengths, rows = greedy_case(7, 50)  # slot 7 is scratch
    lengths[2] = 20
    ids, fault = torch.arange(7) + 60, torch.tensor([0, 0, 1, 0, 0, 0, 0])
    theirs, ours = (tokens.clone(), lengths.clone()), (tokens.clone(), lengths.clone())
    greedy_step.append_reference(*theirs, rows, ids, fault)
    greedy_step.launch_append(*ours, rows, ids, fault)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert (ours[1] - lengths)[rows].tolist() == [1, 0, 0, 1, 0, 1, 0]
    assert ours[0][5, 2] == 60 and ours[0][3, 7] == 63
