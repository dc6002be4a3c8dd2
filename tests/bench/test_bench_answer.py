"""One answer: its times by definition, its tokens, and every way in which it can be no answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenspeed.bench.answer import Answer, Record

DONE = b"data: [DONE]\n\n"


def event(**keys: Any) -> bytes:
    return b"data: " + json.dumps(keys).encode() + b"\n\n"


def chunk(text: str | None, finish: str | None = None, **keys: Any) -> bytes:
    return event(id="cmpl-1", choices=[{"text": text, "finish_reason": finish, **keys}])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


def record(*blocks: tuple[float, bytes], full: bool = False) -> Record:
    answer = Answer(
        Record(session=0, turn=0, start=5.0, input_len=7, max_tokens=4), must_be_full=full
    )
    for at, block in blocks:
        answer.feed(block, at)
    return answer.finish()


def test_times_by_definition() -> None:
    found = record(
        (0.1, event(choices=[{"delta": {"role": "assistant", "content": ""}}])),
        (0.25, event(choices=[{"delta": {"reasoning_content": "hm"}}])),
        (0.5, event(choices=[{"delta": {"content": "a"}}])),
        (1.0, event(choices=[{"delta": {"content": "bc"}}])),
        (1.25, event(choices=[{"delta": {}, "finish_reason": "stop"}])),
        (2.0, usage(9, 6)),
        (2.5, DONE),
    )
    assert (found.failure, found.text, found.finish_reason) == (None, "abc", "stop")
    assert (found.ttft, found.itls, found.latency) == (0.25, [0.25, 0.5], 1.25)
    assert (found.input_len, found.output_len, found.is_counted_by_usage) == (9, 6, True)
    assert found.tpot == pytest.approx((1.25 - 0.25) / 5)


def test_without_usage_chunks_are_counted() -> None:
    found = record((0.1, chunk("a")), (0.2, chunk("b", "length") + DONE))
    assert (found.input_len, found.output_len, found.is_counted_by_usage) == (7, 2, False)
    assert found.failure is None and found.tpot == pytest.approx(0.1)


def test_ids_are_content_and_are_counted() -> None:
    found = record((0.1, chunk("", token_ids=[1, 2])), (0.3, chunk("x", "stop", token_ids=[3])))
    assert (found.chunk_tokens, found.output_len) == ([2, 1], 3)


def test_one_token_has_no_time_per_output_token() -> None:
    found = record((0.1, chunk("a", "stop") + usage(3, 1) + DONE))
    assert (found.tpot, found.itls, found.ttft, found.latency) == (None, [], 0.1, 0.1)


DEEP = b"[" * 100_000


@pytest.mark.parametrize("before", [b"", b'{"error": ', b'{"x": ', b'{"choices": [{"delta": '])
@pytest.mark.parametrize("after", [b"", b"]" * 100_000 + b"}"])
def test_json_without_bottom_is_malformed(before: bytes, after: bytes) -> None:
    found = record((0.1, b"data: " + before + DEEP + after + b"\n\n"), (0.2, DONE))
    assert (found.failure, len(found.detail) < 100) == ("malformed event", True)


@pytest.mark.parametrize("number", [-1, 1 << 41, 1 << 63, 10**30, 1e300])
def test_a_usage_that_is_no_count_is_malformed(number: float) -> None:
    for name in ("prompt_tokens", "completion_tokens"):
        found = record((0.1, chunk("a", "stop") + event(usage={name: number}) + DONE))
        assert found.failure == "malformed event"


def test_an_endless_answer_is_stopped_by_what_was_asked() -> None:
    answer = Answer(
        Record(session=0, turn=0, start=0, input_len=1, max_tokens=4), must_be_full=True
    )
    block, size = chunk("abcd" * 1000), 0
    while answer.record.failure is None:
        answer.feed(block, 0.1)
        size += len(block)
    assert answer.record.failure == "endless answer"
    assert size < (1 << 20) + 4 * (16 << 10) + 2 * len(block)


@pytest.mark.parametrize(
    ("blocks", "full", "kind"),
    [
        ([], False, "cut stream"),
        ([chunk("a")], False, "cut stream"),
        ([chunk("a", "stop")], False, "cut stream"),
        ([chunk("a"), DONE], False, "cut stream"),
        ([chunk("a", "stop") + DONE[:-1]], False, "cut stream"),
        ([chunk("a"), event(error={"message": "no"}), DONE], False, "error event"),
        ([chunk("a"), b"data: {not json\n\n", DONE], False, "malformed event"),
        ([chunk("a"), event(choices=7), DONE], False, "malformed event"),
        ([chunk("", "stop"), usage(1, 3), DONE], False, "no content"),
        (
            [chunk("a", token_ids=[1]), chunk("", "stop"), usage(1, 3), DONE],
            False,
            "fewer tokens than usage",
        ),
        ([chunk("abcd", "stop"), usage(1, 3), DONE], True, "fewer tokens than asked"),
        ([chunk("abcd", "length"), usage(1, 4), DONE], True, None),
        ([chunk("abcd", "stop"), usage(1, 3), DONE], False, None),
        ([event(id=None, choices=None, error=None), chunk("a", "stop"), DONE], False, None),
        ([chunk("a", token_ids=[1, 2]), chunk("b", "stop"), usage(1, 3), DONE], False, None),
    ],
)
def test_what_is_no_whole_answer_fails(blocks: list[bytes], full: bool, kind: str | None) -> None:
    found = record(*((0.1, block) for block in blocks), full=full)
    assert found.failure == kind
    assert bool(found.detail) == (kind is not None)


def test_what_a_server_says_is_shown_without_what_a_terminal_obeys() -> None:
    found = Record(session=0, turn=0, start=5.0, input_len=7, max_tokens=4)
    answer = Answer(found, must_be_full=False)
    answer.fail("HTTP 500", "\x1b]0;pwn\x07 caf\u00e9\r\n\u202e")
    assert answer.finish().detail == r"\x1b]0;pwn\x07 " + "caf\u00e9" + r"\r\n\u202e"
