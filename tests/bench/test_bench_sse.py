"""Events survive every way of cutting their bytes, every line end, comments and other fields."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.bench import sse
from tokenspeed.bench.sse import EventReader, EventTooLarge

line_data = st.binary(max_size=20).map(lambda data: data.translate(None, b"\r\n"))
events = st.lists(st.lists(line_data, min_size=1, max_size=3), max_size=8)
ends = st.sampled_from([b"\n", b"\r", b"\r\n"])
noise = st.lists(st.sampled_from([b": ping", b"event: x", b"id: 7", b"retry: 1", b"nonsense"]))


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """The bytes of a stream, and the data of its events."""
    lines, expected = [], []
    for parts in draw(events):
        lines += draw(noise)
        lines += [b"data" + draw(st.sampled_from([b": ", b":"])) + part for part in parts]
        # After a bare colon one space is the separator, not the data's own.
        shown = [line[5:].removeprefix(b" ") for line in lines[-len(parts) :]]
        expected.append(b"\n".join(shown))
        lines += [b""] * draw(st.integers(1, 2))
    end = draw(ends)  # one for all: after a CR, an LF would be no line of its own
    body = b"".join(line + end for line in lines)
    return draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + body, expected


def read(blocks: Sequence[bytes]) -> list[bytes]:
    reader = EventReader()
    return [event for block in blocks for event in reader.feed(block)]


@given(streams(), st.data())
def test_cuts_change_nothing(stream: tuple[bytes, list[bytes]], data: st.DataObject) -> None:
    body, expected = stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    edges = [0, *cuts, len(body)]
    blocks = [body[start:end] for start, end in itertools.pairwise(edges)]
    assert read(blocks) == read([body]) == expected


@given(streams())
def test_single_bytes_are_enough(stream: tuple[bytes, list[bytes]]) -> None:
    body, expected = stream
    assert read([body[at : at + 1] for at in range(len(body))]) == expected


def test_an_event_that_has_not_ended_is_none() -> None:
    assert read([b"data: 1\n\ndata: 2\n"]) == [b"1"]
    assert read([b"data: 1\n", b"\n", b"\n"]) == [b"1"]


def test_an_event_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(EventTooLarge):
        read([b"data: x\n"] * 200)
    with pytest.raises(EventTooLarge):
        read([b"data: "] + [b"x"] * 200)
    for empty in (b"data\n", b"data:\n"):
        with pytest.raises(EventTooLarge):
            read([empty] * 200)
    assert read([b": ping\n\n"] * 200) == []
