"""Large answers are written in parts, and are the same JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from server_fakes import Asker

from tokenspeed.server import answer_json
from tokenspeed.server.answer_json import SLICE, joined, json_parts, send_answer
from tokenspeed.server.protocol_chat import ChatCompletion
from tokenspeed.server.protocol_completions import Completion, CompletionChoice, CompletionLogprobs
from tokenspeed.server.protocol_tokens import Tokens

ANSWERS: Any = st.one_of(*map(st.from_type, (ChatCompletion, Completion, Tokens)))


@given(ANSWERS, st.integers(0, 4))
def test_the_parts_are_the_whole(answer: msgspec.Struct, length: int) -> None:
    """Whatever is in it, and however short a list counts as long."""
    try:
        whole = msgspec.json.encode(answer)
    except OverflowError:  # of numbers that no answer has
        reject()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_json, "SLICE", max(length, 1))
        patch.setattr(answer_json, "PART_BYTES", 8 * length)
        assert b"".join(json_parts(answer)) == whole
        assert b"".join(joined(json_parts(answer))) == whole


def scored(num_tokens: int, num_choices: int) -> Completion:
    texts = ["\0", '"', "\U0001fae0"]
    lists = CompletionLogprobs(
        tokens=texts * num_tokens,
        token_logprobs=[None, -0.5, -1.0] * num_tokens,
        top_logprobs=[dict.fromkeys(texts, -1.5)] * 3 * num_tokens,
        text_offset=list(range(3 * num_tokens)),
    )
    choice = CompletionChoice(index=0, text="x", logprobs=lists, token_ids=[7] * num_tokens)
    usage: Any = None
    return Completion(id="c", created=1, model="m", choices=[choice] * num_choices, usage=usage)


@pytest.mark.parametrize(("num_tokens", "num_choices"), [(100_000, 1), (80, 1000)])
async def test_the_loop_goes_round_while_a_large_answer_is_written(
    num_tokens: int, num_choices: int
) -> None:
    """Many tokens or many choices: no part is large."""
    answer, turns, is_done = scored(num_tokens, num_choices), 0, False

    async def turn() -> None:
        nonlocal turns
        while not is_done:
            turns += 1
            await asyncio.sleep(0)

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    turning = asyncio.create_task(turn())
    await send_answer(send, answer)
    is_done = True
    await turning
    start, *bodies = sent
    whole = msgspec.json.encode(answer)
    assert b"".join(each["body"] for each in bodies) == whole
    assert dict(start["headers"])[b"content-length"] == str(len(whole)).encode()
    assert [each["more_body"] for each in bodies] == [True] * (len(bodies) - 1) + [False]
    assert max(len(each["body"]) for each in bodies) < 2 * answer_json.PART_BYTES
    assert turns >= len(bodies) - 1 > len(whole) // (2 * answer_json.PART_BYTES)


async def test_a_scored_prompt_is_whole(ask: Asker) -> None:
    ids = [1 + index % 200 for index in range(SLICE - 2)]
    answer = await ask.completion(
        prompt=[ids, ids[:3]], echo=True, logprobs=3, max_tokens=2, n=2, return_token_ids=True
    )
    assert answer.status_code == 200
    assert answer.headers["content-length"] == str(len(answer.content))
    lengths = [len(each["logprobs"]["tokens"]) for each in answer.json()["choices"]]
    assert lengths == [SLICE, SLICE, 5, 5]
