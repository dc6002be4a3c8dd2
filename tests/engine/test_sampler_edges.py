"""The sampler at its limits: ties, cuts of nothing and of nearly all, broken rows, frequencies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampler_cases import draw, start

from tokenspeed.batch import SlotStart
from tokenspeed.kernels import truncation
from tokenspeed.kernels.noise import gumbel, random_bits, row_keys
from tokenspeed.kernels.sample_rows import NO_TOKEN, NOT_FINITE, OK
from tokenspeed.request import _ABOVE_LOW, _BOUNDS, InvalidRequest

PINNED_BITS = [[1078068642, 756845382, 415630528], [1599259973, 1560512752, 2102481672]]


def many(count: int, **params: Any) -> list[SlotStart]:
    """Rows that differ in their seed alone."""
    return [start(0, [1, 2, 3], seed=seed, **params) for seed in range(count)]


def kept_tokens(logits: list[float], **params: Any) -> set[int]:
    """Which tokens 400 seeds bring."""
    rows = np.tile(np.array(logits), (400, 1))
    return set(draw(rows, many(400, **params)).ids.tolist())


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.zeros((3, 70))
    logits[0, [9, 40]] = 5.0
    logits[1, [69, 68]] = 5.0
    found = draw(logits, [start(i, [1], temperature=0.0) for i in range(3)])
    assert found.ids.tolist() == [9, 68, 0]


def test_frequencies_are_the_probabilities() -> None:
    """Chi-square with 5 degrees of freedom: 20.5 is the 99.9th percentile."""
    probs = np.array([0.4, 0.25, 0.2, 0.1, 0.04, 0.01])
    count, temperature = 20_000, 0.7
    logits = np.tile(np.log(probs) * temperature, (count, 1))
    ids = draw(logits, many(count, temperature=temperature)).ids
    observed = np.bincount(ids.numpy(), minlength=6)
    assert ((observed - count * probs) ** 2 / (count * probs)).sum() < 20.5


@pytest.mark.parametrize("axis", ["seeds", "samples", "positions"])
def test_neighbours_in_every_counter_are_independent(axis: str) -> None:
    """Token frequencies over one counter, and of pairs of neighbours: 63 degrees of freedom."""
    count = 16_384
    counters = {name: torch.full((count,), 3) for name in ("seeds", "samples", "positions")}
    counters[axis] = torch.arange(count)
    ids = gumbel(row_keys(**counters), 8).argmax(dim=-1)
    pairs = torch.bincount(ids[:-1] * 8 + ids[1:], minlength=64).double()
    expected = (count - 1) / 64
    assert ((pairs - expected) ** 2 / expected).sum() < 104  # the 99.9th percentile


def test_noise_is_pinned() -> None:
    """These numbers may never change: seeds that users have noted would mean other texts."""
    keys = row_keys(torch.tensor([0, 42]), torch.tensor([0, 1]), torch.tensor([5, 100_000]))
    bits = random_bits(keys, 200)
    assert bits.dtype == torch.int32 and bits.min() >= 0
    assert bits[:, [0, 1, 199]].tolist() == PINNED_BITS


def test_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0, 2**31 - 1]], dtype=torch.int32)
    monkeypatch.setattr("tokenspeed.kernels.noise.random_bits", lambda keys, size: ends)
    assert gumbel(torch.zeros(1, dtype=torch.int64), 2).isfinite().all()


def test_a_tiny_temperature_is_greedy() -> None:
    logits = np.array([[0.0, 3.0, 2.999, -50.0]])
    for temperature in (1e-300, 1e-40, 1e-6):
        assert draw(logits, [start(0, [1], temperature=temperature)]).ids.tolist() == [1]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 1 << 20}, {0, 1, 2, 3}),
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1, 2}),  # 1 and 2 tie
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1, 2}),
        ({"top_p": 0.89}, {0, 1, 2}),
        ({"top_p": 0.91}, {0, 1, 2, 3}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.62}, {0, 1, 2}),
        ({"min_p": 0.63}, {0}),
        ({"min_p": 0.25}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.2}, {0, 1, 2}),
        ({"top_k": 1, "top_p": 0.99}, {0}),
    ],
)
def test_cuts(params: dict[str, Any], expected: set[int]) -> None:
    assert kept_tokens([math.log(p) for p in (0.4, 0.25, 0.25, 0.1)], **params) == expected


def test_min_p_one_keeps_all_that_tie_for_the_best() -> None:
    assert kept_tokens([1.0, 1.0, 0.999], min_p=1.0) == {0, 1}


def test_top_p_settles_by_the_likeliest_or_by_a_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peaked and a flat row in one call, against the plain sort."""
    random = np.random.default_rng(1)
    scores = torch.from_numpy(random.normal(0.0, [[8.0], [0.5]], (2, 5000)).astype(np.float32))
    scores -= scores.max(dim=-1, keepdim=True).values
    asked = torch.zeros(2), torch.tensor([0.9, 0.95]), torch.full((2,), -math.inf)
    found, expected = scores.clone(), scores.clone()
    truncation.cut(found, *asked)
    monkeypatch.setattr(truncation, "_HEAD", 5000)
    truncation.cut(expected, *asked)
    assert torch.equal(found, expected)
    num_kept = found.isfinite().sum(dim=-1)
    assert num_kept[0] < 1024 < num_kept[1] < 5000


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_is_told_and_harms_no_other(bad: float, temperature: float) -> None:
    logits = np.random.default_rng(2).normal(0.0, 1.0, (3, 50))
    starts = [start(i, [1], temperature=temperature, top_k=5, top_p=0.9) for i in range(3)]
    expected = draw(logits, starts)
    logits[1, 30] = bad
    found = draw(logits, starts)
    assert found.status.tolist() == [OK, NOT_FINITE, OK]
    assert found.ids[[0, 2]].tolist() == expected.ids[[0, 2]].tolist()


def test_masks_allow_tokens_and_no_token() -> None:
    logits = np.zeros((4, 10))
    masks = torch.zeros(4, 10, dtype=torch.bool)
    masks[0, 6] = masks[1, 3] = masks[1, 4] = masks[2, 9] = True
    starts = [start(i, [1], temperature=float(i % 2)) for i in range(4)]
    found = draw(logits, starts, masks)
    assert found.status.tolist() == [OK, OK, OK, NO_TOKEN]
    assert found.ids[[0, 2]].tolist() == [6, 9] and found.ids[1] in (3, 4)


def test_min_tokens_bans_every_way_to_end() -> None:
    logits = np.zeros((3, 10))
    logits[:, [7, 8]] = 50.0  # 7 ends by eos, 8 by stop_token_ids
    asked = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (8,)}
    starts = [
        start(0, [1, 2, 3], 2, **asked),
        start(1, [1, 2, 3, 4], 2, **asked),
        start(2, [1, 2, 3], 2, **asked, ignore_eos=True),
    ]
    assert draw(logits, starts).ids.tolist() == [0, 7, 7]


def test_presence_and_frequency_do_not_see_the_prompt() -> None:
    logits = np.array([[0.0, 1.0, 0.5]] * 3)
    asked = {"temperature": 0.0, "frequency_penalty": 2.0}
    starts = [
        start(0, [1] * 20, **asked),
        start(1, [1] * 20 + [1], 20, **asked),
        start(2, [1] * 20, temperature=0.0, repetition_penalty=3.0),
    ]
    assert draw(logits, starts).ids.tolist() == [1, 2, 2]


def test_repetition_divides_positive_and_multiplies_negative() -> None:
    starts = [start(0, [0, 1], temperature=0.0, repetition_penalty=2.0)]
    assert draw(np.array([[3.0, -1.0, 1.4]]), starts).ids.tolist() == [0]
    assert draw(np.array([[3.0, -1.0, 1.6]]), starts).ids.tolist() == [2]
    assert draw(np.array([[-9.0, -1.0, -1.9]]), starts).ids.tolist() == [2]
    assert draw(np.array([[-9.0, -1.0, -2.1]]), starts).ids.tolist() == [1]


FLOATS = {name: bounds for name, bounds in _BOUNDS.items() if type(bounds[0]) is float}


@given(
    params=st.fixed_dictionaries(
        {},
        optional={
            name: st.floats(*bounds, exclude_min=name in _ABOVE_LOW)
            for name, bounds in FLOATS.items()
        },
    ),
    bias=st.dictionaries(st.integers(0, 6), st.floats(-100.0, 100.0), max_size=3),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_no_parameter_breaks_what_the_model_gives(
    params: dict[str, float], bias: dict[int, float], scale: float
) -> None:
    """Whatever is allowed, tiny values and both ends among it, logits stay finite."""
    logits = np.array([[3.0, -2.0, 0.0, 9.0, -9.0, 1e-30, 0.5]]) * scale
    starts = [start(0, [0, 1, 3, 4, 3], 2, logit_bias=bias, **params)]
    assert draw(logits, starts).status.tolist() == [OK]


@pytest.mark.parametrize("name", FLOATS)
def test_what_lies_below_a_parameters_bounds_is_refused(name: str) -> None:
    low = FLOATS[name][0]
    below = low if name in _ABOVE_LOW else math.nextafter(low, -math.inf)
    with pytest.raises(InvalidRequest, match=name):
        start(0, [1], **{name: below})
