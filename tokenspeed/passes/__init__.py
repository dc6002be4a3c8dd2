"""The pipeline: every pass, in the order in which it runs, and where it is on by default.

Graph passes see a whole captured function before it is split; piece passes see what is left of a
piece between two sequence calls, as functional aten, before Inductor fuses it. Larger patterns come
first. A pass that replaces code by a kernel is on where that was measured to be faster.

Rows name their passes and do not import them: a start that finds all compiled has to know which are
on, for the key, and runs none. Their files import sympy, among others.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed.passes.rewrite import EVERY, FEW, Pass, TokenRange


class Stage(enum.Enum):
    GRAPH = "graph"
    PIECE = "piece"


@dataclass(frozen=True)
class Row:
    """A pass, by the name of its file, and where it is on by default, with the reason for both."""

    stage: Stage
    name: str
    on_cpu: bool
    on_cuda: bool
    reason: str
    needs_prologue: bool = False
    """Only for attention backends that fuse what comes before them."""
    serves: TokenRange = EVERY

    @property
    def rule(self) -> Pass:
        """What the pass does: `PASS` of its file, which is imported now."""
        rule: Pass = importlib.import_module(f"{__name__}.{self.name}").PASS
        return rule

    def why_off(
        self, device: str, token_range: TokenRange, fuses_prologue: bool, disabled: Sequence[str]
    ) -> str | None:
        """Why the pass does not run here, or None if it does."""
        if self.name in disabled:
            return "disabled"
        if not (self.on_cuda if device == "cuda" else self.on_cpu):
            return f"off on {device}"
        if self.needs_prologue and not fuses_prologue:
            return "the attention backend does not fuse it"
        if not self.serves.contains(token_range):
            return "does not serve this token range"
        return None


PIPELINE: tuple[Row, ...] = (
    # Act 1: move work across the cut.
    Row(
        Stage.GRAPH,
        "attend_prologue",
        on_cpu=False,
        on_cuda=True,
        reason="steps of 1 to 256 rows 6 to 11% faster, 0.6B; on a CPU Inductor fuses it",
        needs_prologue=True,
    ),
    # Act 2: clean.
    Row(Stage.PIECE, "noop", True, True, "no pattern shows what does nothing"),
    # Act 3: fuse. First, for small decode steps, linear layers with what stands around them: with
    # attention five kernels a layer. All four of a layer, in a CUDA graph on an H200: 0.6B 32.4 to
    # 13.8 us at 1 token, 25.8 to 23.0 at 8, 27.0 to 25.1 at 32, but 27.9 to 29.8 at 64; 8B 110.9 to
    # 93.8 at 1 token, within 4% of each other from 2 to 64.
    Row(
        Stage.PIECE,
        "norm_gate_up",
        False,
        True,
        "8.3 to 4.6 us at 1 token, 0.6B; 52 to 47, 8B; 8 to 32 tokens 15% and 2 to 10%",
        serves=FEW,
    ),
    Row(
        Stage.PIECE,
        "norm_linear",
        False,
        True,
        "6.4 to 4.1 us at 1 token, 0.6B; 17.2 to 13.5, 8B; 8 to 32 tokens 13% and equal",
        serves=FEW,
    ),
    Row(
        Stage.PIECE,
        "linear_add",
        False,
        True,
        "7.9 to 3.3 us at 1 token, 0.6B; 31 to 25, 8B; 8 to 32 tokens 28 to 37% and 5 to 18%",
        serves=FEW,
    ),
    Row(
        Stage.PIECE,
        "gate_up",
        False,
        True,
        "8B, with its gate: 89.2 to 84.8 us at 256 tokens, 2.44 to 2.39 ms at 8192",
    ),
    Row(
        Stage.PIECE,
        "linear",
        False,
        True,
        "the head: 77 to 70 us at 1 token, 0.6B; 5% up to 32 tokens; 8B, 8192 tokens: 4.88 to 4.75 "
        "ms a layer, prompts 1.6% faster",
    ),
    # Then what is left. On a CPU it is counted, and undone in act 4. The reasons are for CUDA: what
    # a pass alone saves of a middle piece of Qwen3, bfloat16, in a CUDA graph on an H200 (one run),
    # without the passes above. All together: 0.6B 43.1 to 31.4 us at 1 token, 41.8 to 29.4 at 64;
    # 8B 122.4 to 115.3 and 136.7 to 122.5.
    Row(Stage.PIECE, "qk_norm_rope", True, True, "7 to 8 us of 38 to 43 up to 64 tokens, 0.6B"),
    Row(Stage.PIECE, "rope", True, False, "alone 1 to 2 us slower than Inductor's kernels"),
    Row(
        Stage.PIECE,
        "rope_angles",
        True,
        True,
        "within 1% of a step; with it many models start without Inductor: 8B 13.6 to 8.6 s",
    ),
    Row(Stage.PIECE, "add_rms_norm", True, True, "4 us of 38 to 43 up to 64 tokens, 0.6B"),
    Row(
        Stage.PIECE,
        "rms_norm",
        True,
        True,
        "one a model: half a percent of a step of 1 or 8 tokens, 0.6B",
    ),
    Row(
        Stage.PIECE,
        "silu_mul",
        True,
        True,
        "as fast up to 64 tokens, 6 to 10% from 512 on, 0.6B",
    ),
    # Act 4: lower, on a CPU. What gives products to `linear` is last: `inline` would undo that too.
    Row(Stage.PIECE, "inline", True, False, "kernels serve CUDA, Inductor's C++ the CPU"),
    Row(
        Stage.PIECE,
        "weight_layout",
        True,
        False,
        "8 requests at once 107 to 170 tokens/s, one and prefill equal: 135M, float32, 2 cores",
    ),
)

PASS_NAMES = frozenset(row.name for row in PIPELINE)
