"""Edits of logits in bounded memory: some rows at a time, in place, and the same tokens as ever."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sampler_cases import CPU, EOS, draw, start
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenspeed.batch import SlotStart
from tokenspeed.engine import edits, logprobs, sampler
from tokenspeed.engine.sampler import plan_sampling
from tokenspeed.kernels.sample_rows import sample_rows

VOCAB = 5000


class Peak(TorchDispatchMode):
    """The most bytes that results of operators held at once, beside what there was before."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self._held = 0
        self._views: Counter[int] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._hold(each, given)
        return result

    def _hold(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in given and not self._views[key]:
            return  # it was there before
        if not self._views[key]:
            self._held += size
            self.bytes = max(self.bytes, self._held)
        self._views[key] += 1
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._views[key] -= 1
        if not self._views[key]:
            self._held -= size


def test_the_peak_is_counted() -> None:
    x = torch.ones(250)
    with Peak() as peak:
        first = x + 1
        first.view(10, 25).mul_(2)
        x.add_(first)
        del first
        second = (x * 2) * 3
    assert peak.bytes == 2000 and second[0] == 30


def rows(count: int, length: int = 20, **params: Any) -> list[SlotStart]:
    ids = [list(range(7 * i, 7 * i + length)) for i in range(count)]
    return [start(i, own, length // 2, **params) for i, own in enumerate(ids)]


def edit(starts: list[SlotStart], max_len: int) -> int:
    """The peak of editing all these rows at once, in bytes."""
    plan = plan_sampling(starts, EOS, VOCAB, max_len, CPU)
    (found,) = plan.edits
    assert found is not None
    logits = torch.randn(len(starts), VOCAB)
    tokens = torch.zeros(len(starts), max_len, dtype=torch.int32)
    lengths = torch.tensor([len(each.token_ids) for each in starts])
    with Peak() as peak:
        found.apply(logits, tokens, lengths)
    return peak.bytes


KINDS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7, "presence_penalty": 0.2},
    "bias": {"logit_bias": {3: 1.0}},
    "allowed": {"allowed_token_ids": (3, 4, 9)},
    "bad words": {"bad_token_ids": ((5, 6), (7,))},
    "bans": {"min_tokens": 40},
}


@pytest.mark.parametrize("max_len", [24, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_edits_take_no_more_than_what_is_counted_on(kind: str, max_len: int) -> None:
    """In place: only counts are as long as the vocabulary, and logits are there before."""
    count = 64
    taken = edit(rows(count, **KINDS[kind]), max_len)
    logits = 4 * count * VOCAB
    assert taken + logits <= count * (edits._TOKEN_BYTES * VOCAB + edits._PLACE_BYTES * max_len)
    if kind != "frequency":
        assert taken <= count * edits._PLACE_BYTES * max_len


def test_rows_edited_together_hang_on_both_lengths() -> None:
    assert edits.rows_edited_together(151936, 4096) == 192
    assert edits.rows_edited_together(151936, 40960) == 96
    assert edits.rows_edited_together(1 << 20, 1 << 20) == 16, "the fewest"
    assert [logprobs.rows_scored_together(v) for v in (100, 151936, 1 << 22)] == [256, 208, 16]


def test_rows_edited_in_parts_get_the_tokens_of_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all kinds, some of them plain, with masks and without; one row has no number."""
    random = np.random.default_rng(3)
    logits = random.normal(0.0, 3.0, (40, 60))
    logits[33, 5] = np.nan
    kinds = [*KINDS.values(), {}]
    starts = [
        start(i, random.integers(0, 60, 12).tolist(), 5, seed=i, **kinds[i // 2 % 7])
        for i in range(40)
    ]
    masks = torch.from_numpy(random.random((40, 60)) < 0.8)
    together = [draw(logits, starts, each) for each in (None, masks)]
    sizes = []

    def heard(part: torch.Tensor, *others: Any) -> Any:
        sizes.append(len(part))
        return sample_rows(part, *others)

    monkeypatch.setattr(edits, "_MOST_BYTES", 1)
    monkeypatch.setattr(sampler, "sample_rows", heard)
    for each, expected in zip((None, masks), together, strict=True):
        found = draw(logits, starts, each)
        assert torch.equal(found.ids, expected.ids) and torch.equal(found.status, expected.status)
    assert sizes == [16, 16, 8] * 2
    draw(logits, [start(i, [1]) for i in range(40)])
    assert sizes[6:] == [40], "nothing is copied where nothing is edited"
