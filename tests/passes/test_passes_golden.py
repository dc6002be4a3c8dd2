"""What each family gives each pass, on a CPU and, by the pipeline of CUDA over a CPU's graphs,
on a GPU: matched of expected.
"""

from __future__ import annotations

import pytest
import torch
from pass_graphs import captured_forward, pieces_of, through_slot, tiny_model

from tokenspeed.compile.capture import capture
from tokenspeed.compile.matcher import pass_manager
from tokenspeed.compile.split import split
from tokenspeed.passes import Stage
from tokenspeed.passes.manager import PassReport
from tokenspeed.passes.rewrite import EVERY, FEW, MANY, TokenRange

PLACES = {
    "cpu": ("cpu", EVERY, torch.float32),
    "cuda, few tokens": ("cuda", FEW, torch.bfloat16),
    "cuda, many tokens": ("cuda", MANY, torch.bfloat16),
}

PLAIN = {
    "cpu": [
        "noop 2, rope 2/2, rope_angles 1/1, rms_norm 1/1, inline 4, weight_layout 1/1",
        "rope 2/2, add_rms_norm 2/2, silu_mul 1/1, inline 5, weight_layout 4/4",
        "add_rms_norm 2/2, silu_mul 1/1, inline 3, weight_layout 3/3",
        "weight_layout 1/1",
    ],
    "cuda, few tokens": [
        "noop 2, norm_linear 1/1, rope_angles 1/1",
        "norm_gate_up 1/1, norm_linear 1/1, linear_add 2/2",
        "norm_gate_up 1/1, linear_add 2/2, rms_norm 1/1",
        "linear 1/1",
    ],
    "cuda, many tokens": [
        "noop 2, linear 1/1, rope_angles 1/1, rms_norm 1/1",
        "gate_up 1/1, linear 3/3, add_rms_norm 2/2",
        "gate_up 1/1, linear 2/2, add_rms_norm 2/2",
        "linear 1/1",
    ],
}

NORMED = {
    "cpu": [
        "noop 2, qk_norm_rope 2/2, rope_angles 1/1, rms_norm 1/1, inline 4, weight_layout 1/1",
        "qk_norm_rope 2/2, add_rms_norm 2/2, silu_mul 1/1, inline 5, weight_layout 4/4",
        "add_rms_norm 2/2, silu_mul 1/1, inline 3, weight_layout 3/3",
        "weight_layout 1/1",
    ],
    "cuda, few tokens": [
        "noop 2, norm_linear 1/1, qk_norm_rope 2/2, rope_angles 1/1",
        "norm_gate_up 1/1, norm_linear 1/1, linear_add 2/2, qk_norm_rope 2/2",
        "norm_gate_up 1/1, linear_add 2/2, rms_norm 1/1",
        "linear 1/1",
    ],
    "cuda, many tokens": [
        "noop 2, linear 1/1, qk_norm_rope 2/2, rope_angles 1/1, rms_norm 1/1",
        "gate_up 1/1, linear 3/3, qk_norm_rope 2/2, add_rms_norm 2/2",
        "gate_up 1/1, linear 2/2, add_rms_norm 2/2",
        "linear 1/1",
    ],
}

GOLDEN = {"LlamaForCausalLM": PLAIN, "Qwen2ForCausalLM": PLAIN, "Qwen3ForCausalLM": NORMED}
"""By family and place: the first, the middle and the last piece of `forward`, and the head."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("architecture", GOLDEN)
def test_matches_of_a_family(architecture: str, place: str) -> None:
    found = tables(architecture, *PLACES[place])
    assert found == GOLDEN[architecture][place]


def tables(
    architecture: str, device: str, token_range: TokenRange, dtype: torch.dtype
) -> list[str]:
    head = capture(tiny_model(architecture, dtype).head, (torch.zeros(8, 32, dtype=dtype),))
    pieces = [*pieces_of(captured_forward(architecture, dtype)), *split(head)[1].values()]
    lines = []
    for piece in pieces:
        manager = pass_manager(
            Stage.PIECE, dtype=dtype, device=device, token_range=token_range, strict=True
        )
        through_slot(piece, manager)
        lines.append(", ".join(filter(None, map(cell, manager.reports))))
    return lines


def cell(report: PassReport) -> str:
    if not report.matched and not report.expected:
        return ""
    expected = "" if report.expected is None else f"/{report.expected}"
    return f"{report.name} {report.matched}{expected}"
