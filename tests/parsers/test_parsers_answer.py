"""A sample's parts: the same whatever comes together, as are the reasoning tokens among them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from parsed import SCHEMAS

from tokenspeed.parsers.answer_events import AnswerEvents
from tokenspeed.parsers.events import CallEnd, ContentDelta, Event, merged
from tokenspeed.parsers.parser import OutputParser
from tokenspeed.parsers.tables import output_format

FORM = output_format("qwen3", "hermes")
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
tokens = st.lists(
    st.sampled_from(["<think>", "</think>", "", " ", "\n", "so ", "<", "hi", CALL, CALL[:20]]),
    max_size=12,
)
sizes = st.lists(st.integers(1, 4), min_size=12, max_size=12)


def answer(*, has_parser: bool, one_call: bool) -> AnswerEvents:
    numbers = itertools.count()
    parser = OutputParser(FORM, schemas=SCHEMAS, new_id=lambda: f"call_{next(numbers)}")
    return AnswerEvents(parser if has_parser else None, one_call=one_call)


def in_parts(answer: AnswerEvents, texts: list[str], sizes: list[int]) -> list[Event]:
    found: list[Event] = []
    at = 0
    for size in sizes:
        part = texts[at : at + size]
        found += answer.push_tokens(part, len(part), is_last=False)
        at += size
    return merged(found + answer.push_tokens([*texts[at:], "!"], 0, is_last=True))


@given(tokens, sizes, st.booleans(), st.booleans())
def test_what_comes_together_makes_the_same_answer(
    texts: list[str], sizes: list[int], has_parser: bool, one_call: bool
) -> None:
    alone, together, whole = (answer(has_parser=has_parser, one_call=one_call) for _ in range(3))
    events = in_parts(alone, texts, [1] * len(texts))
    assert in_parts(together, texts, sizes) == events
    assert whole.push("".join([*texts, "!"]), is_last=True) == events
    assert together.num_reasoning_tokens == alone.num_reasoning_tokens <= len(texts)
    has_calls = any(isinstance(each, CallEnd) and each.is_complete for each in events)
    assert alone.has_calls == together.has_calls == whole.has_calls == has_calls
    if not has_parser:
        assert events == [ContentDelta("".join([*texts, "!"]))]


def test_only_tokens_that_show_nothing_but_reasoning_count() -> None:
    found = answer(has_parser=True, one_call=False)
    found.push_tokens(["<think>", "so ", "it is", "</think>", "\n", "4", ""], 6, is_last=True)
    assert found.num_reasoning_tokens == 3
