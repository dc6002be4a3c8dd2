"""One small launch of each hand-written kernel, against its reference, for a memory checker.

    PYTHONPATH=.:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        --error-exitcode 1 python tests/gpu/sanitize_cases.py [WORD ...]

Prints a line for each case whose name has one of the words; exits with 1 if a result is wrong.
Sizes are odd on purpose: what lies behind a tensor's end is somebody else's. Without CUDA the cases
run in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from flashinfer_cases import attend, host_of, runs_flashinfer
from paged_cases import Case, Operands, assert_pages_agree, operands
from sampling_cases import agree, assert_scores, draw_rows
from sampling_cases import launch as launch_sampling
from torch import Tensor

from tokenspeed.kernels import (
    greedy_step,
    kv_store,
    paged_decode,
    paged_prefill,
    qk_norm_rope,
    rms_norm,
    rope_angles,
    score_rows,
    silu_mul,
)
from tokenspeed.kernels.attend import reference as attend_reference
from tokenspeed.kernels.attention_flashinfer import FlashInferAttention
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.gluon_jit import runs_gluon
from tokenspeed.kernels.hopper_planned import HopperPrefill
from tokenspeed.kernels.linear import launch, reference
from tokenspeed.kernels.linear_tiles import Site, Tile
from tokenspeed.kernels.linear_tuning import make_call

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
VOCAB = 5003

Check = Callable[[], None]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(F16)


def near(got: Tensor, want: Tensor, tolerance: float = 4e-3) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def norms() -> None:
    x, residual, weight = draw(7, 1000), draw(7, 1005)[:, 5:], draw(1000)
    near(rms_norm.launch_rms_norm(x, weight, 1e-5), rms_norm.rms_norm_reference(x, weight, 1e-5))
    got = rms_norm.launch_add_rms_norm(x, residual, weight, 1e-5)
    want = rms_norm.add_rms_norm_reference(x, residual, weight, 1e-5)
    near(got[0], want[0])
    near(got[1], want[1])


def gate() -> None:
    gate_up = draw(5, 2 * 1537)
    near(silu_mul.launch(gate_up), silu_mul.reference(gate_up))


def rotations() -> None:
    x, weight = draw(5, 3 * 80 + 6)[:, 6:].unflatten(-1, (3, 80)), draw(80)
    angles = torch.randn(5, 1, 13, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    near(qk_norm_rope.launch_rope(x, cos, sin), qk_norm_rope.rope_reference(x, cos, sin))
    got = qk_norm_rope.launch_qk_norm_rope(x, weight, cos, sin, 1e-5)
    near(got, qk_norm_rope.qk_norm_rope_reference(x, weight, cos, sin, 1e-5))


def angles() -> None:
    """To the last positions of long contexts, where angles are large."""
    positions = torch.tensor([0, 1, 4097, 131071, 1048575], device=DEVICE)
    inv_freq = 1e6 ** -(torch.arange(37, device=DEVICE) / 37)
    got = rope_angles.launch(positions, inv_freq, 1.25)
    turns = (positions.float()[:, None, None] * inv_freq).double()
    for each, want in zip(got, (turns.cos(), turns.sin()), strict=True):
        near(each.double(), 1.25 * want, 1e-5)


def compare_attention(case: Case, run: Callable[[Operands], Tensor]) -> None:
    """The result, and the pages with what was stored."""
    given = operands(case, DEVICE)
    mine, theirs = given.with_own_cache(), given.with_own_cache()
    got = run(mine)
    q, k, v, layer, step, sinks, prologue = theirs
    near(got, paged_decode.reference(q, k, v, layer, step, sinks, prologue))
    assert_pages_agree(mine.layer.keys, layer.keys, 4e-3)
    assert_pages_agree(mine.layer.values, layer.values, 4e-3)


def store() -> None:
    given = operands(Case((3, 1, 40), (3, 70, 140), dtype=F16, norm=True, turned=64), DEVICE)
    mine, theirs = given.with_own_cache(), given.with_own_cache()
    keys, want = torch.zeros_like(given.k), torch.zeros_like(given.k)
    keys, want = keys.contiguous(), want.contiguous()
    near(kv_store.launch(*mine[:5], given.prologue, keys), kv_store.reference(
        *theirs[:5], given.prologue, want
    ))  # fmt: skip
    near(keys, want)
    near(mine.layer.keys, theirs.layer.keys)


def decode(own: Operands) -> Tensor:
    q, k, v, layer, step, sinks, prologue = own
    room = paged_decode.workspace_for(q.shape[1] // k.shape[1], q.shape[2], DEVICE)
    out = paged_decode.launch(q, k, v, layer, step, room, sinks, prologue)
    assert not room.arrived.any(), "a workspace is left as it was found"
    return out


def prefill(own: Operands) -> Tensor:
    q, k, v, layer, step, sinks, prologue = own
    queries = kv_store.launch(q, k, v, layer, step, prologue)
    return paged_prefill.launch(queries, layer, step, sinks)


DECODE = Case((1, 1), (40, 17), 6, 2, 80, dtype=F16, sinks=True, turned=26)
FP8_DECODE = Case((1, 1), (300, 17), 6, 2, 80, dtype=F16, kv_dtype=E4M3)
FP8_CHUNKS = Case((3, 1, 40), (3, 70, 140), 6, 2, 80, dtype=F16, kv_dtype=E4M3)
SPLIT = Case((1, 1, 1), (300, 7, 193), 4, 2, 128, dtype=F16, norm=True, turned=128)
WINDOW = Case((1, 1), (150, 17), 4, 2, 16, dtype=F16, window=40, block_size=1)
CHUNKS = Case((3, 1, 40), (3, 70, 140), dtype=F16, norm=True, turned=64)
CHUNKS_OF_WINDOW = Case(
    (30, 2), (150, 17), 4, 2, 24, dtype=F16, sinks=True, window=40, block_size=1
)


def linear(kind: str, num_tokens: int, tile: Tile, num_rows: int = 130, size: int = 300) -> Check:
    def check() -> None:
        w = (torch.randn(num_rows, size, device=DEVICE) / size**0.5).to(F16)
        call = make_call(Site(kind, num_rows, size, "float16"), w, num_tokens)
        near(launch(call, tile), reference(call))

    return check


WHOLE = Tile("gemv", rows=2, warps=4, size=512, repeats=3)
PARTS = Tile("gemv", rows=2, warps=2, size=128)
SKINNY = Tile("skinny", rows=32, warps=4, size=64, tokens=16)
GATED = Tile("gated", rows=64, warps=8, size=64, tokens=128, stages=4)
SHARED = Tile("skinny", rows=32, warps=4, size=64, tokens=16, splits=3)


def greedy() -> None:
    logits = draw(7, VOCAB)
    logits[0, -1] = float("nan")
    tokens = torch.randint(0, VOCAB, (8, 20), dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([1, 20, 3, 7, 19, 2, 5, 1], device=DEVICE)  # slot 7 is scratch
    rows = torch.tensor([5, 7, 0, 3, 7, 4, 2], device=DEVICE)
    begun = greedy_step.launch_begin(tokens, lengths, rows)
    for got, want in zip(begun, greedy_step.begin_reference(tokens, lengths, rows), strict=True):
        assert torch.equal(got, want)
    ours, theirs = (tokens.clone(), lengths.clone()), (tokens.clone(), lengths.clone())
    ended = greedy_step.launch_end(logits, *ours, rows)
    expected = greedy_step.end_reference(logits, *theirs, rows)
    assert torch.equal(ended.is_bad, expected.is_bad)
    assert torch.equal(ended.ids[1:], expected.ids[1:])
    ids, faults = torch.arange(7, device=DEVICE), torch.tensor([0, 1, 0, 0, 0, 0, 0], device=DEVICE)
    greedy_step.launch_append(*ours, rows, ids, faults)
    greedy_step.append_reference(*theirs, rows, ids, faults)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def sampling() -> None:
    """Every kind of row, among them one whose tokens above a cut are too many for their room."""
    rows = draw_rows(8, VOCAB, dtype=F16, device=DEVICE)
    agree(launch_sampling(rows), rows)
    flat = rows._replace(logits=torch.zeros_like(rows.logits))
    agree(launch_sampling(flat), flat)
    rows.logits[:, 500:] = -torch.inf
    rows.logits[3] = -torch.inf
    agree(launch_sampling(rows, bans=True), rows, bans=True)


def scores() -> None:
    logits = draw(3, VOCAB)
    ids = torch.tensor([0, 77, VOCAB - 1], device=DEVICE)
    for with_top in (False, True):
        got = score_rows.launch(logits, ids, with_top)
        assert_scores(got, score_rows.reference(logits, ids, with_top), logits)


def flashinfer(kv_dtype: torch.dtype | None = None) -> None:
    """Two rows with a past, two without, beside one that decodes."""
    lengths = (9, 700, 401, 300, 129)
    case = Case((1, 17, 130, 300, 129), lengths, 16, 8, 128, dtype=BF16, norm=True, turned=128)
    case = replace(case, kv_dtype=kv_dtype)
    given = operands(case, DEVICE)
    step = replace(given.step, num_decodes=1)
    mine, theirs = given.with_own_cache(), given.with_own_cache()
    got = attend(FlashInferAttention, case, mine, replace(step, host=host_of(given, 1)))
    near(got, attend(TritonAttention, case, theirs, step), 2e-2)
    assert_pages_agree(mine.layer.keys, theirs.layer.keys, 0)


def own_prefill() -> None:
    """Of rows without a past, the last of them at the very end of its tensor."""
    lengths, scale = [1, 129, 0, 300, 77], 128**-0.5
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    merged = draw(sum(lengths), 10 * 128)
    q, k, v = (x.unflatten(1, (-1, 128)) for x in merged.split([6 * 128, 256, 256], 1))
    planned, out = HopperPrefill(DEVICE), torch.empty(q.shape, dtype=F16, device=DEVICE)
    planned.plan(starts, starts, 6, 2, 128, causal=True, sm_scale=scale, q_data_type=F16)
    planned.run(q, k, v, out=out)
    rows = zip(*(x.split(lengths) for x in (q, k, v, out)), strict=True)
    for *own, got in ((*each,) for each in rows):
        if len(got):
            near(got, attend_reference(*own, scale))


CASES: dict[str, Check] = {
    "rms_norm, add_rms_norm": norms,
    "silu_mul": gate,
    "rope, qk_norm_rope": rotations,
    "rope_angles": angles,
    "kv_store, own keys too": store,
    "paged_decode": lambda: compare_attention(DECODE, decode),
    "paged_decode, split": lambda: compare_attention(SPLIT, decode),
    "paged_decode, window": lambda: compare_attention(WINDOW, decode),
    "paged_prefill": lambda: compare_attention(CHUNKS, prefill),
    "paged_prefill, window and sinks": lambda: compare_attention(CHUNKS_OF_WINDOW, prefill),
    "gemv": linear("linear", 1, PARTS),
    "gemv, norm": linear("norm_linear", 3, WHOLE),
    "gemv, add": linear("linear_add", 3, PARTS),
    "gemv, norm and gate": linear("norm_gate_up", 1, WHOLE),
    "skinny, norm": linear("norm_linear", 17, SKINNY),
    "skinny, add, split": linear("linear_add", 17, SHARED),
    "skinny, norm and gate": linear("norm_gate_up", 5, SKINNY),
    "skinny, norm and gate, split": linear("norm_gate_up", 5, SHARED),
    "greedy_step": greedy,
    "sample_rows": sampling,
    "score_rows": scores,
}
if DEVICE.type == "cuda":  # the interpreter rounds to fp8 in a way of its own
    CASES["paged_decode, fp8"] = lambda: compare_attention(FP8_DECODE, decode)
    CASES["paged_prefill, fp8"] = lambda: compare_attention(FP8_CHUNKS, prefill)
if runs_gluon(DEVICE):
    CASES["hopper_prefill"] = own_prefill
    CASES["gated"] = linear("gate_up", 130, GATED, num_rows=144, size=304)
if runs_flashinfer():
    CASES["flashinfer, paged and ragged"] = flashinfer
    CASES["flashinfer, paged and ragged, fp8"] = lambda: flashinfer(E4M3)


def main(words: list[str]) -> int:
    num_wrong = 0
    for name, check in CASES.items():
        if words and not any(word in name for word in words):
            continue
        torch.manual_seed(0)
        try:
            check()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
        except AssertionError as error:
            num_wrong += 1
            print(f"WRONG  {name}: {error}", flush=True)
        else:
            print(f"right  {name}", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
