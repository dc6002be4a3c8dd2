"""Tables of a CPU's linear kernels: what is timed, how winners become choices, what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels import linear_cpu_tuning as tuning
from tokenspeed.kernels.linear_cpu import Linear
from tokenspeed.kernels.linear_cpu_tuning import (
    LinearChoice,
    LinearEntry,
    LinearTable,
    default_table,
    linear_weights,
)

SHAPE = (64, 32)


class Clock:
    """Time passes only in kernels: `seconds(T)` a call."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def kernel(self, seconds: Sequence[float]) -> Linear:
        def run(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            self.now += seconds[tuning.TOKENS.index(x.shape[0])]
            return F.linear(x, w, bias)

        return run


def tuned(monkeypatch: pytest.MonkeyPatch, **seconds: Sequence[float]) -> tuple[LinearChoice, ...]:
    clock = Clock()
    monkeypatch.setattr(tuning, "time", clock)
    monkeypatch.setattr(tuning, "_SAMPLE_BYTES", 1)
    kernels = {name: clock.kernel(times) for name, times in seconds.items()}
    total = sum(sum(times[: -1 if name == "rows" else None]) for name, times in seconds.items())
    table = tuning.tune(linear_weights([torch.randn(SHAPE)]), kernels, budget_s=total)
    assert clock.now == pytest.approx(total), "one round"
    return table.by_shape()[SHAPE]


def test_the_fastest_is_chosen_and_neighbours_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = tuned(
        monkeypatch,
        rows=[1, 1, 1, 1, 2, 9, 9, 9, 9],
        torch=[2, 2, 2, 2, 3, 4, 4, 4, 4],
        onednn=[3, 3, 3, 3, 3, 3, 3, 3, 5],
    )
    assert choices == (LinearChoice(16, "rows"), LinearChoice(128, "onednn")), (
        "torch has what is above"
    )


def test_a_small_lead_displaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = [1.0] * len(tuning.TOKENS)
    choices = tuned(monkeypatch, rows=flat, torch=[0.97] * len(flat), onednn=[0.96] * len(flat))
    assert choices == (LinearChoice(128, "rows"),), "rows is not tried with more"


def test_a_disturbed_sample_does_not_tear_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = tuned(
        monkeypatch,
        rows=[1.2, 1, 1, 3, 1, 1, 2.5, 4, 0],
        torch=[1.0, 2, 2, 2, 2, 2, 2.0, 2, 2],
    )
    assert choices == (LinearChoice(32, "rows"),)


def test_rows_that_never_lead_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = [1.0] * len(tuning.TOKENS)
    assert tuned(monkeypatch, rows=[2.0] * len(flat), torch=flat) == ()


def test_torch_alone_needs_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned(monkeypatch, torch=[1.0] * len(tuning.TOKENS)) == ()


def test_rounds_stop_before_the_budget_and_keep_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(tuning, "time", clock)
    monkeypatch.setattr(tuning, "_SAMPLE_BYTES", 1)
    spoilt = [3.0] * len(tuning.TOKENS)
    quick = [1.0] * len(tuning.TOKENS)
    slow, fast, calls = clock.kernel(spoilt), clock.kernel(quick), 0

    def rows(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        nonlocal calls
        calls += 1
        return (slow if calls <= 8 else fast)(x, w, bias)  # the first round is disturbed

    kernels = {"rows": rows, "torch": clock.kernel([2.0] * len(tuning.TOKENS))}
    table = tuning.tune({SHAPE: [torch.randn(SHAPE)]}, kernels, budget_s=90.0)
    assert calls == 16, "rounds of 42 and 26 seconds: a third would end past 90"
    assert table.by_shape()[SHAPE] == (LinearChoice(128, "rows"),)


def test_what_the_budget_does_not_reach_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(tuning, "time", clock)
    monkeypatch.setattr(tuning, "_SAMPLE_BYTES", 1)
    rows, torch_ = ([seconds] * len(tuning.TOKENS) for seconds in (1.0, 2.0))
    kernels = {"rows": clock.kernel(rows), "torch": clock.kernel(torch_)}
    table = tuning.tune({SHAPE: [torch.randn(SHAPE)]}, kernels, budget_s=8.0)
    assert table.by_shape()[SHAPE] == (LinearChoice(4, "rows"),)
    assert clock.now == 9.0


def test_a_table_is_for_its_machine_its_kernels_and_its_shapes() -> None:
    table = tuning.tune({SHAPE: [torch.randn(SHAPE)]}, {"torch": F.linear}, budget_s=0.0)
    assert table.why_unfit([SHAPE], ["torch"]) is None
    assert table.why_unfit([], ["torch"]) is None
    why = [
        table.why_unfit([SHAPE], ["torch", "rows"]),
        table.why_unfit([SHAPE, (8, 16)], ["torch"]),
        LinearTable({**table.facts, "threads": 99}, table.entries).why_unfit([SHAPE], ["torch"]),
        default_table([SHAPE]).why_unfit([SHAPE], ["torch"]),
    ]
    assert why[0] == "it was measured with kernels 'torch', here 'rows torch'"
    assert why[1] == "it lacks a weight of [8, 16]"
    assert why[2] is not None and "threads 99, here " in why[2]
    assert why[3] is not None and "capability None" in why[3]


def test_only_weights_that_the_kernel_serves_are_measured() -> None:
    tensors = [
        *(torch.randn(64, 32), torch.randn(64, 32), torch.randn(8, 16)),
        *(torch.randn(64), torch.randn(63, 32), torch.randn(64, 24)),
        *(torch.randn(64, 32).bfloat16(), torch.randn(32, 64).t()),
    ]
    assert {k: len(v) for k, v in linear_weights(tensors).items()} == {(64, 32): 2, (8, 16): 1}


def test_a_table_survives_its_json() -> None:
    for table in (default_table([SHAPE, (8, 16), SHAPE]), LinearTable({"threads": 2}, ())):
        assert LinearTable.from_json(table.to_json()) == table
    assert len(default_table([SHAPE, SHAPE]).entries) == 1


@pytest.mark.parametrize(
    "choices",
    [
        [[4, "rows"], [4, "torch"]],
        [[8, "rows"], [4, "torch"]],
        [[0, "rows"]],
        [[-1, "rows"]],
        [[1 << 40, "rows"]],
        [[4, "os.system"]],
        [["4", "rows"]],
        [[None, "rows"]],
        [[4.5, "rows"]],
    ],
)
def test_a_table_from_outside_is_bounded(choices: list[list[object]]) -> None:
    entry = {"num_rows": 64, "size": 32}
    entry |= {"choices": [{"max_tokens": n, "kernel": k} for n, k in choices]}  # type: ignore[dict-item]
    with pytest.raises(ValueError):
        LinearTable.from_json(json.dumps({"facts": {}, "entries": [entry]}).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"facts": {}, "entries": [1]}'])
def test_what_is_no_table_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        LinearTable.from_json(data)


@pytest.mark.parametrize("sizes", [(0, 32), (64, -1), (1 << 40, 32)])
def test_sizes_of_a_table_are_bounded(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        LinearTable.from_json(LinearTable({}, (LinearEntry(*sizes, ()),)).to_json())
