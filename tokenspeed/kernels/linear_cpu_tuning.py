"""Which linear kernel on a CPU for which weight shape and how many tokens: a table, measured or
assumed.

Measuring takes the model's own weights, of all shapes in turn: a step reads every weight once, so a
kernel must be timed on weights that have left the caches. What counts is the fastest of several
samples, since everything else that runs on the machine only ever makes one slower.

Whatever a table says, results differ by float rounding at most; and up to the number of tokens that
it gives to `rows`, from one on, not at all.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from tokenspeed.kernels.linear_cpu import Linear, serves

Shape = tuple[int, int]

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Token counts that are measured; what lies between two goes with the larger. More than the last
are torch's, whose kernels for large products need no help.
"""

_PREFERRED = ("rows", "torch", "onednn")
_MARGIN = 0.9
"""A kernel displaces a preferred one if it takes less than this share of its time."""

_ROWS_UNTIL = 32
"""The default of `rows`: its lead ends between 16 tokens (AVX2) and 128 (AVX512)."""

_ROWS_TRIED_UNTIL = 128
_SAMPLE_BYTES = 8 << 20
_TICK_S = 1e-9
"""What a clock that stood still has measured."""

_MAX_TOKENS = 1 << 24
_MAX_SIZE = 1 << 31


class LinearChoice(msgspec.Struct, frozen=True):
    """Up to `max_tokens` tokens, and above the choice before, run `kernel`."""

    max_tokens: int
    kernel: str


class LinearEntry(msgspec.Struct, frozen=True):
    """The choices for a weight [num_rows, size], ascending in tokens."""

    num_rows: int
    size: int
    choices: tuple[LinearChoice, ...]


class LinearTable(msgspec.Struct, frozen=True):
    """Entries, and the facts under which they were measured (none, if they were not)."""

    facts: dict[str, str | int]
    entries: tuple[LinearEntry, ...]

    def by_shape(self) -> dict[Shape, tuple[LinearChoice, ...]]:
        return {(entry.num_rows, entry.size): entry.choices for entry in self.entries}

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> LinearTable:
        """ValueError, in one line, if this is no table."""
        table = msgspec.json.decode(data, type=cls)
        for entry in table.entries:
            limits = [choice.max_tokens for choice in entry.choices]
            sizes = (entry.num_rows, entry.size)
            if limits != sorted(set(limits)) or not all(0 < n <= _MAX_TOKENS for n in limits):
                raise ValueError(f"linear table: token limits {limits} do not ascend")
            if not all(0 < n < _MAX_SIZE for n in sizes):
                raise ValueError(f"linear table: a weight of {sizes}")
            if unknown := {choice.kernel for choice in entry.choices} - set(_PREFERRED):
                raise ValueError(f"linear table: unknown kernels {sorted(unknown)}")
        return table

    def why_unfit(self, shapes: Iterable[Shape], kernels: Iterable[str]) -> str | None:
        """Why this is no measurement of these shapes and kernels on this machine, or None."""
        here = facts(kernels)
        for name in sorted(here.keys() | self.facts.keys()):
            if here.get(name) != self.facts.get(name):
                there = self.facts.get(name)
                return f"it was measured with {name} {there!r:.60}, here {here.get(name)!r}"
        if missing := set(shapes) - self.by_shape().keys():
            return f"it lacks a weight of {list(min(missing))}"
        return None


def facts(kernels: Iterable[str]) -> dict[str, str | int]:
    """What a measurement of these kernels depends on, besides the shapes."""
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": " ".join(sorted(kernels)),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def linear_weights(tensors: Iterable[Tensor]) -> dict[Shape, list[Tensor]]:
    """The weights that a table is about, by shape: matrices that `rows` can serve."""
    found: dict[Shape, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dim() == 2 and serves(tensor):
            found.setdefault((tensor.shape[0], tensor.shape[1]), []).append(tensor)
    return found


def default_table(shapes: Iterable[Shape]) -> LinearTable:
    """What to assume of a machine that was not measured."""
    choices = (LinearChoice(_ROWS_UNTIL, "rows"),)
    return LinearTable({}, tuple(LinearEntry(*shape, choices) for shape in sorted(set(shapes))))


def tune(
    weights: Mapping[Shape, Sequence[Tensor]], kernels: Mapping[str, Linear], budget_s: float = 5.0
) -> LinearTable:
    """Time every kernel on every shape and token count, in rounds that end within `budget_s`
    seconds. Of the first round only what goes beyond them is left out: large token counts of a
    large model, which are torch's then. (A round takes about 1.5 s for 500 MB of weights on 2
    cores.)
    """
    best: dict[tuple[Shape, int, str], float] = {}
    turns = {shape: itertools.cycle(tensors) for shape, tensors in weights.items()}
    began, num_rounds, measured = time.perf_counter(), 0, 0
    while not num_rounds or (time.perf_counter() - began) * (1 + 1 / num_rounds) < budget_s:
        for num_tokens in TOKENS[: measured or None]:
            _time_all(turns, kernels, num_tokens, best)
            if not num_rounds:
                measured += 1
                if time.perf_counter() - began > budget_s:
                    break
        num_rounds += 1
    entries = []
    for shape in sorted(weights):
        times = [
            {k: best[shape, n, k] for k in _PREFERRED if (shape, n, k) in best}
            for n in TOKENS[:measured]
        ]
        entries.append(LinearEntry(*shape, _choices(times)))
    return LinearTable(facts(kernels), tuple(entries))


def _time_all(
    turns: Mapping[Shape, Iterable[Tensor]],
    kernels: Mapping[str, Linear],
    num_tokens: int,
    best: dict[tuple[Shape, int, str], float],
) -> None:
    """One sample of every kernel and shape. Shapes are innermost: a weight that is the only one of
    its shape (the head) would otherwise lie in the cache for every kernel but the first.
    """
    for name, shape in itertools.product(_PREFERRED, turns):
        if name not in kernels or (name == "rows" and num_tokens > _ROWS_TRIED_UNTIL):
            continue
        seconds = _sample(kernels[name], turns[shape], shape, num_tokens)
        key = (shape, num_tokens, name)
        best[key] = min(seconds, best.get(key, seconds))


def _sample(kernel: Linear, weights: Iterable[Tensor], shape: Shape, num_tokens: int) -> float:
    """Seconds a call, over enough weights that a clock can see it, and fewer the more tokens."""
    repeats = max(1, _SAMPLE_BYTES // (4 * shape[0] * shape[1] * max(1, num_tokens // 8)))
    x = torch.rand(num_tokens, shape[1])
    chosen = list(itertools.islice(weights, repeats))
    began = time.perf_counter()
    for w in chosen:
        kernel(x, w, None)
    return max(time.perf_counter() - began, _TICK_S) / repeats


def _choices(times: Sequence[Mapping[str, float]]) -> tuple[LinearChoice, ...]:
    """The winners by token count, neighbours with one winner merged; torch's tail is left out."""
    found: list[LinearChoice] = []
    rows_end = _rows_end(times)
    for i, (num_tokens, seconds) in enumerate(zip(TOKENS, times, strict=False)):
        winner = "rows" if i < rows_end else _fastest(seconds)
        if found and found[-1].kernel == winner:
            found.pop()
        found.append(LinearChoice(num_tokens, winner))
    if found[-1].kernel == "torch":
        found.pop()
    return tuple(found)


def _rows_end(times: Sequence[Mapping[str, float]]) -> int:
    """For how many of the token counts, from the smallest on, `rows` is chosen.

    It serves one run of them, where it takes the least time altogether (by ratios: each count
    weighs the same). So a disturbed sample does not tear the run apart, and in all of it a token's
    bits do not depend on how many others there are.
    """
    gains = [0.0]
    for seconds in times:
        if "rows" not in seconds:
            break
        gains.append(gains[-1] + math.log(seconds[_fastest(seconds)] / (_MARGIN * seconds["rows"])))
    return max(range(len(gains)), key=lambda end: (gains[end], end))


def _fastest(seconds: Mapping[str, float]) -> str:
    """The best of the kernels but `rows`."""
    winner, *others = (name for name in seconds if name != "rows")
    for other in others:
        if seconds[other] < _MARGIN * seconds[winner]:
            winner = other
    return winner
