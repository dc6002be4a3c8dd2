"""Log-probabilities of long prompts travel in parts, between which a client has time for others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_attached_backlog import Engine, client, delta, engine, step, submit, until

from tokenspeed.engine import messages
from tokenspeed.engine.attached import AttachedClient
from tokenspeed.engine.messages import FromEngine, PromptScores, StepOutputs
from tokenspeed.engine.prompt_scores import EncodedScores
from tokenspeed.request import RequestDelta, TokenLogprob

__all__ = ["client", "engine"]  # fixtures
SCORES: list[TokenLogprob | None] = [
    None,
    *[TokenLogprob(token, -0.5, [(token, -0.5), (7, -2.0)]) for token in range(6)],
]


def sent(*deltas: RequestDelta) -> list[PromptScores | StepOutputs]:
    return list(step(0, *deltas).packed().parts())


@pytest.fixture(autouse=True, scope="module")
def short_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "MAX_SCORES", 2)
        yield


@given(st.lists(st.none() | st.integers(0, 7), max_size=4))
def test_parts_are_bounded_and_add_up(lengths: list[int | None]) -> None:
    deltas = [
        delta(str(number), 1, prompt_logprobs=None if length is None else SCORES[:length])
        for number, length in enumerate(lengths)
    ]
    *ahead, last = step(0, *deltas).parts()
    assert isinstance(last, StepOutputs)
    scores: dict[str, Any] = {}
    for part in ahead:
        assert isinstance(part, PromptScores) and part.num_entries == 2
        scores.setdefault(part.request_id, []).append(part)
    for each, whole in zip(last.deltas, deltas, strict=True):
        assert len(each.prompt_logprobs or []) <= 2
        if each.prompt_logprobs is not None:
            all_of_it = EncodedScores(scores.pop(each.request_id, []), each.prompt_logprobs)
            each.prompt_logprobs = list(all_of_it)
            assert len(all_of_it) == len(each.prompt_logprobs)
            assert (None in all_of_it) == bool(all_of_it) and 7 not in all_of_it
        assert each == whole
    assert not scores


async def test_a_request_gets_them_at_once_and_others_in_between(
    engine: Engine, client: AttachedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[list[FromEngine]] = []
    take = client._take

    def watched(messages: list[FromEngine]) -> None:
        taken.append(messages)
        take(messages)

    monkeypatch.setattr(client, "_take", watched)
    scored, other, gone = submit(client, "scored", "other", "gone")
    client.withdraw("gone")
    told = delta("scored", 1, prompt_logprobs=list(SCORES))
    parts = sent(told, delta("gone", 1, prompt_logprobs=list(SCORES)), delta("other", 2))
    for message in [*parts, step(1, delta("scored", 3))]:
        engine.send_now(message)
    await until(lambda: scored.ids == [1, 3])
    assert list(scored.deltas[0].prompt_logprobs or ()) == SCORES
    assert other.ids == [2] and not gone.deltas
    for batch in taken:
        assert not any(isinstance(each, PromptScores) for each in batch[:-1])
    assert not client._scores


async def test_the_garbage_collector_finds_few_of_them_at_any_time(
    engine: Engine, client: AttachedClient
) -> None:
    """It would stop the loop for as long as it takes to look at all."""

    def num_found() -> int:
        return sum(type(each) is TokenLogprob for each in gc.get_objects())

    (scored,) = submit(client, "scored")
    many = [SCORES[1]] * 100
    before = num_found()
    for message in sent(delta("scored", 1, prompt_logprobs=many)):
        engine.send_now(message)
    await until(lambda: scored.ids)
    scores = scored.deltas[0].prompt_logprobs
    assert scores is not None and len(scores) == 100
    most = max(num_found() for _ in zip(range(100), scores, strict=True))
    assert 0 < most - before <= 3 * messages.MAX_SCORES


async def test_a_request_that_is_left_leaves_none_behind(
    engine: Engine, client: AttachedClient
) -> None:
    submit(client, "left")
    (other,) = submit(client, "other")
    ahead = sent(delta("left", 1, prompt_logprobs=list(SCORES)))
    await engine.send(*ahead[:2])
    await until(lambda: client._scores)
    client.withdraw("left")
    await engine.send(*ahead[2:], step(1, delta("other", 5)))
    await until(lambda: other.ids)
    assert not client._scores


def test_short_ones_are_one_message() -> None:
    told = step(0, delta("a", 1, prompt_logprobs=[None, SCORES[1]]))
    assert list(told.parts()) == [told]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=FromEngine) == told
