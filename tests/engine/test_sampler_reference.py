"""Sampling against a slow reference, row by row; and that rows never see each other."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import EOS, draw, start

from tokenspeed.batch import SlotStart
from tokenspeed.kernels.sample_rows import NO_TOKEN, OK

# The reference: one row, plain numpy and Python, float64.


def mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def reference_bits(seed: int, index: int, position: int, token: int) -> int:
    key = mix64(mix64(mix64(seed) ^ index) ^ position)
    bits = (key ^ token) % 2**32
    bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32
    bits = (bits + (key >> 32)) % 2**32
    bits = (bits ^ bits >> 15) * 0x846CA68B % 2**32
    return (bits ^ bits >> 16) % 2**31


def reference_scores(logits: np.ndarray, row: SlotStart) -> np.ndarray:
    """The scores of all tokens whose largest one is sampled: -inf where a token is cut."""
    params, scores = row.params, logits.astype(np.float64).copy()
    output = row.token_ids[row.num_prompt :]
    for token in set(row.token_ids):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if len(output) < params.min_tokens:
        for token in EOS | set(params.stop_token_ids):
            scores[token] = -math.inf
    if params.allowed_token_ids is not None:
        scores[[token not in params.allowed_token_ids for token in range(len(scores))]] = -math.inf
    for *beginning, last in params.bad_token_ids:
        if output[len(output) - len(beginning) :] == beginning:
            scores[last] = -math.inf
    if params.temperature == 0.0 or scores.max() == -math.inf:
        return scores
    scores = (scores - scores.max()) / params.temperature
    if 0 < params.top_k < len(scores):
        scores[scores < np.sort(scores)[-params.top_k]] = -math.inf
    probs = np.exp(scores) / np.exp(scores).sum()
    likelier = np.array([probs[probs > prob].sum() for prob in probs])
    if params.top_p < 1.0:
        scores[likelier >= params.top_p] = -math.inf
    if params.min_p > 0.0:
        scores[scores < math.log(params.min_p)] = -math.inf
    position = len(row.token_ids)
    for token in range(len(scores)):
        u = (reference_bits(row.seed, row.sample_index, position, token) + 0.5) / 2**31
        scores[token] -= math.log(-math.log1p(-u))
    return scores


def params_strategy() -> st.SearchStrategy[dict[str, Any]]:
    tokens = st.integers(0, 30)
    few = st.lists(st.integers(0, 3), min_size=2, max_size=4)  # of few tokens: often matched
    return st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]), "seed": st.integers(0, 2**63 - 1)},
        optional={
            "top_k": st.integers(-1, 40),
            "top_p": st.floats(0.01, 1.0),
            "min_p": st.floats(0.0, 1.0),
            "repetition_penalty": st.floats(0.5, 3.0),
            "presence_penalty": st.floats(-2.0, 2.0),
            "frequency_penalty": st.floats(-2.0, 2.0),
            "logit_bias": st.dictionaries(tokens, st.floats(-100.0, 100.0), max_size=4),
            "min_tokens": st.integers(0, 8),
            "stop_token_ids": st.lists(tokens, max_size=3).map(tuple),
            "allowed_token_ids": st.lists(tokens, min_size=4, max_size=20).map(tuple),
            "bad_token_ids": st.lists(few.map(tuple), max_size=6).map(tuple),
            "sample_index": st.integers(0, 127),
        },
    )


@st.composite
def batches(draw_value: st.DrawFn) -> tuple[np.ndarray, list[SlotStart]]:
    """1 to 6 rows with a vocabulary of 31, each with its own history and parameters."""
    count = draw_value(st.integers(1, 6))
    starts = []
    for slot in range(count):
        history_tokens = st.integers(0, 3) | st.integers(0, 30)
        history = draw_value(st.lists(history_tokens, min_size=1, max_size=12))
        num_prompt = draw_value(st.integers(1, len(history)))
        starts.append(start(slot, history, num_prompt, **draw_value(params_strategy())))
    random = np.random.default_rng(draw_value(st.integers(0, 2**32)))
    return random.normal(0.0, 3.0, (count, 31)), starts


@settings(max_examples=150, deadline=None)
@given(batches())
def test_equals_the_reference(batch: tuple[np.ndarray, list[SlotStart]]) -> None:
    logits, starts = batch
    found = draw(logits, starts)
    for i, row in enumerate(starts):
        scores = reference_scores(logits[i].astype(np.float32), row)
        if scores.max() == -math.inf:
            assert found.status[i] == NO_TOKEN
            continue
        assert found.status[i] == OK
        # Float32 may decide ties, and cuts at the last kept token, otherwise than float64.
        gap = scores.max() - scores[found.ids[i]]
        assert gap < 1e-4 or is_near_a_cut(logits[i], row), (row.params, gap)


def is_near_a_cut(logits: np.ndarray, row: SlotStart) -> bool:
    """Whether moving the thresholds by a little changes which tokens are left."""
    kept = []
    for factor in (1.0 - 1e-4, 1.0 + 1e-4):
        cuts = {name: min(1.0, getattr(row.params, name) * factor) for name in ("top_p", "min_p")}
        params = msgspec.structs.replace(row.params, **cuts)
        moved = msgspec.structs.replace(row, params=params)
        kept.append(np.isfinite(reference_scores(logits.astype(np.float32), moved)))
    return bool((kept[0] != kept[1]).any())


@settings(max_examples=100, deadline=None)
@given(batches())
def test_a_row_alone_is_the_row_in_a_batch(batch: tuple[np.ndarray, list[SlotStart]]) -> None:
    logits, starts = batch
    together = draw(logits, starts).ids.tolist()
    assert [draw(logits[i : i + 1], [row]).ids.item() for i, row in enumerate(starts)] == together
