"""Pieces recorded between sequence calls: the same as a run without recordings."""

from __future__ import annotations

import functools

import pytest
import torch
from compile_tiny import VOCAB, OneSequence, Tiny, one_sequence, random_model
from torch import Tensor

from tokenspeed.batch import forward_context
from tokenspeed.compile import pipeline
from tokenspeed.compile.cudagraph import GraphPool
from tokenspeed.compile.piecewise import PiecewiseForward
from tokenspeed.compile.runner import Executable

CPU = torch.device("cpu")
SIZE = 6


class IntoRoom(OneSequence):
    """Leaves the results of all layers in one place, as piecewise graphs want them."""

    def __init__(self, room: Tensor) -> None:
        self._room = room

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        result = super().attend(q, k, v, layer, sinks)
        return self._room[: result.numel()].view(result.shape).copy_(result)


@pytest.fixture(scope="module")
def executable() -> Executable:
    make = functools.partial(Tiny, "aaaa")
    program = pipeline.plan_model(make, dtype=torch.float32, device=CPU)
    return Executable(program, random_model(make))


@pytest.mark.parametrize("rows", [None, [5], [0, 3]])
def test_pieces_give_what_a_plain_run_gives(executable: Executable, rows: list[int] | None) -> None:
    room, positions = torch.full((4096,), torch.nan), torch.arange(SIZE)
    with forward_context(IntoRoom(room)):
        recorded = PiecewiseForward(executable, SIZE, GraphPool(CPU), room)
    for seed in range(2):
        ids = (torch.arange(SIZE) * 7 + seed) % VOCAB
        recorded.ids.copy_(ids)
        recorded.positions.copy_(positions)
        with forward_context(IntoRoom(room)):
            got = recorded(None if rows is None else torch.tensor(rows))
        with one_sequence():
            want = executable.forward(executable.embed(ids), positions)
        torch.testing.assert_close(got, want if rows is None else want[rows])


def test_a_result_elsewhere_is_refused(executable: Executable) -> None:
    with one_sequence(), pytest.raises(AssertionError, match="where no graph looks"):
        PiecewiseForward(executable, SIZE, GraphPool(CPU), torch.empty(4096))
