"""Masks on their way to a GPU: packed in pinned memory, unpacked beside the logits."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.engine.masks import unpack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("rows", "vocab"), [(1, 33), (5, 1024), (64, 151_936)])
def test_unpacked_masks_are_those_of_the_host(rows: int, vocab: int) -> None:
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=torch.int32)
    expected = unpack(words, torch.zeros(rows, vocab))
    found = unpack(words.pin_memory(), torch.zeros(rows, vocab, device="cuda"))
    assert found.shape == (rows, vocab) and found.dtype == torch.bool
    assert torch.equal(found.cpu(), expected)
