"""What the user sees of the engine's deltas: text, stop strings, ids and logprobs cut alike."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.request import (
    FinishReason,
    GenerateRequest,
    RequestDelta,
    SamplingParams,
    TokenLogprob,
)
from tokenspeed.text.output import OutputText, Sample, TextDelta
from tokenspeed.text.tokenizer import Tokenizer

EOS = 2


def request(**params: Any) -> GenerateRequest:
    return GenerateRequest(id="r", prompt_ids=[1, 4093], params=SamplingParams(**params))


def deltas(
    ids: list[int], sizes: list[int], finish: FinishReason | None, stop_token: int | None = None
) -> list[RequestDelta]:
    """The ids in deltas of the given sizes (the rest in a last one), each with its logprobs."""
    out, at = [], 0
    for size in [*sizes, len(ids)]:
        part = ids[at : at + size]
        at += len(part)
        entries = [TokenLogprob(id, -0.5) for id in part]
        out.append(RequestDelta(request_id="r", token_ids=part, logprobs=entries))
        if at == len(ids):
            break
    out[-1] = msgspec.structs.replace(out[-1], finish_reason=finish, stop_token=stop_token)
    return out


def run(output: OutputText, steps: list[RequestDelta]) -> TextDelta:
    """All of it joined; checks that ids and logprobs stay together."""
    whole = TextDelta(logprobs=[])
    for step in steps:
        part = output.push(step)
        whole.text += part.text
        whole.token_ids += part.token_ids
        assert whole.logprobs is not None
        whole.logprobs += part.logprobs or []
        if part.finish_reason is not None:
            assert whole.finish_reason is None
            whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
        whole.must_abort |= part.must_abort
    assert whole.logprobs is not None
    assert [entry.token_id for entry in whole.logprobs] == whole.token_ids
    return whole


def shown(
    tokenizer: Tokenizer | None,
    ids: list[int],
    *,
    sizes: list[int] | None = None,
    finish: FinishReason | None = FinishReason.LENGTH,
    stop_token: int | None = None,
    **params: Any,
) -> TextDelta:
    steps = deltas(ids, [1] * len(ids) if sizes is None else sizes, finish, stop_token)
    return run(OutputText(tokenizer, request(**params)), steps)


def test_text_of_a_whole_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello 🫠 world", False)
    got = shown(tokenizer, ids)
    assert got.text == "Hello 🫠 world"
    assert (got.token_ids, got.finish_reason, got.stop_reason) == (ids, FinishReason.LENGTH, None)
    assert not got.must_abort


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_cuts_text_ids_and_logprobs(tokenizer: Tokenizer, include: bool) -> None:
    ids = tokenizer.encode("1, 2, 3, 4, 5, 6, 7", False)
    stop = ", 5"
    got = shown(tokenizer, ids, stop=(stop,), include_stop_str_in_output=include)
    assert got.text == "1, 2, 3, 4" + stop * include
    assert tokenizer.decode(got.token_ids) == "1, 2, 3, 4, 5"
    assert (got.finish_reason, got.stop_reason) == (FinishReason.STOP, stop)
    assert got.must_abort


def test_stop_string_in_the_last_delta_needs_no_abort(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two", False)
    got = shown(tokenizer, ids, stop=("two",))
    assert (got.text, got.finish_reason, got.must_abort) == ("one ", FinishReason.STOP, False)


def test_nothing_comes_after_the_end(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, request(stop=("two",)))
    ids = tokenizer.encode("one two three", False)
    first = output.push(RequestDelta(request_id="r", token_ids=ids))
    assert first.must_abort and first.finish_reason is FinishReason.STOP
    late = RequestDelta(request_id="r", token_ids=[5], finish_reason=FinishReason.ABORT)
    assert output.push(late) == TextDelta()


@pytest.mark.parametrize("late", [FinishReason.ERROR, FinishReason.ABORT, None])
def test_a_sample_keeps_its_end(tokenizer: Tokenizer, late: FinishReason | None) -> None:
    output, sample = OutputText(tokenizer, request(stop=("two",))), Sample()
    ids = tokenizer.encode("one two three", False)
    for delta in [
        RequestDelta(request_id="r", token_ids=ids),
        RequestDelta(request_id="r", token_ids=ids, finish_reason=late),
    ]:
        sample.push(output.push(delta), delta)
    assert (sample.text, sample.finish_reason) == ("one ", FinishReason.STOP)
    assert sample.stop_reason == "two"


def test_held_back_text_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two", False)
    output = OutputText(tokenizer, request(stop=("two and more",)))
    first = output.push(RequestDelta(request_id="r", token_ids=ids))
    assert first.text == "one "
    last = output.push(RequestDelta(request_id="r", finish_reason=FinishReason.ABORT))
    assert (last.text, last.finish_reason) == ("two", FinishReason.ABORT)


def test_unfinished_character_shows_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" 🫠", False)[:-1]
    assert shown(tokenizer, ids).text == " \ufffd"
    assert shown(tokenizer, ids, finish=None).text == " "


def test_min_tokens_come_before_stop_strings_count(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x x x x x", False)
    assert shown(tokenizer, ids, stop=("x",)).text == ""
    got = shown(tokenizer, ids, stop=("x",), min_tokens=3)
    assert (got.text, len(got.token_ids)) == ("x x x ", 4)
    straddling = shown(tokenizer, ids, stop=("x x",), min_tokens=1)
    assert straddling.text == "x "  # its beginning may not lie in the first tokens either


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({}, "Hello", None),
        ({"skip_special_tokens": False}, "Hello<|im_end|>", None),
        ({"stop_token_ids": (EOS,)}, "Hello", EOS),
        ({"stop_token_ids": (EOS,), "skip_special_tokens": False}, "Hello", EOS),
        (
            {
                "stop_token_ids": (EOS,),
                "skip_special_tokens": False,
                "include_stop_str_in_output": True,
            },
            "Hello<|im_end|>",
            EOS,
        ),
    ],
)
def test_end_of_sequence_id(
    tokenizer: Tokenizer, params: dict[str, Any], text: str, reason: int | None
) -> None:
    ids = [*tokenizer.encode("Hello", False), EOS]
    got = shown(tokenizer, ids, finish=FinishReason.STOP, stop_token=EOS, **params)
    assert (got.text, got.stop_reason) == (text, reason)
    assert got.token_ids == ids  # it counts in usage all the same


@pytest.mark.parametrize("include", [False, True])
def test_plain_stop_id(tokenizer: Tokenizer, include: bool) -> None:
    ids = tokenizer.encode("one two", False)
    got = shown(
        tokenizer,
        ids,
        finish=FinishReason.STOP,
        stop_token=ids[-1],
        stop_token_ids=(ids[-1],),
        include_stop_str_in_output=include,
    )
    assert (got.text, got.stop_reason) == ("one" + " two" * include, ids[-1])


def test_ignored_eos_in_the_middle(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a", False), EOS, *tokenizer.encode("b", False)]
    assert shown(tokenizer, ids, ignore_eos=True).text == "ab"


def test_without_a_tokenizer_there_are_ids_only() -> None:
    got = shown(None, [5, 6, 7], finish=FinishReason.STOP, stop_token=7, stop_token_ids=(7,))
    assert (got.text, got.token_ids, got.stop_reason) == ("", [5, 6, 7], 7)


def test_no_logprobs_stay_none(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, request())
    assert output.push(RequestDelta(request_id="r", token_ids=[5])).logprobs is None


@settings(max_examples=100, deadline=None)
@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 4))
def test_delta_sizes_change_nothing(
    tokenizer: Tokenizer, data: st.DataObject, include: bool, min_tokens: int
) -> None:
    text = data.draw(st.text(alphabet="ab 🫠é,", max_size=25))
    ids = tokenizer.encode(text, False)
    stops = tuple(data.draw(st.lists(st.text("ab 🫠é,", min_size=1, max_size=4), max_size=3)))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=8))
    options = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    one_by_one = shown(tokenizer, ids, **options)
    in_lumps = shown(tokenizer, ids, sizes=sizes, **options)
    one_by_one.must_abort = in_lumps.must_abort = False  # says only whether the engine still runs
    assert in_lumps == one_by_one
