"""What capture refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tokenspeed.compile import torch_api
from tokenspeed.compile.capture import UnsupportedGraph, capture, example_ids
from tokenspeed.compile.split import split

CPU = torch.device("cpu")


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = [torch.ones(3)]

    def pair(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids + 1, ids + 2

    def outside(self, ids: Tensor) -> Tensor:
        return ids[:, None] + self.plain[0]


@pytest.fixture
def odd() -> Odd:
    return torch_api.fake_module(Odd, torch.float32, CPU)  # type: ignore[return-value]


def test_two_results_are_refused(odd: Odd) -> None:
    with pytest.raises(UnsupportedGraph, match="pair must return one tensor"):
        capture(odd.pair, (example_ids(CPU),))  # type: ignore[arg-type]


def test_a_graph_of_one_size_is_refused(odd: Odd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_api, "mark_unbacked", lambda *args, **kwargs: None)
    with pytest.raises(UnsupportedGraph, match="holds for 8 tokens only"):
        capture(odd.outside, (example_ids(CPU),))


def test_a_tensor_that_is_no_buffer_is_refused(odd: Odd) -> None:
    with pytest.raises(UnsupportedGraph, match="no input, parameter or buffer"):
        split(capture(odd.outside, (example_ids(CPU),)))
