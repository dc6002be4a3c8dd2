"""Stop strings: the answer never depends on how the text was cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.text.stop import StopMatcher


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    out = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        out += text
        if matched is not None:
            assert matcher.finish() == ""
            assert matcher.push("more") == ("", matched)
            return out, matched
    return out + matcher.finish(), None


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The shortest beginning of the text that ends in a stop string; of several the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


small = st.text(alphabet="ab,", min_size=1, max_size=6)


@given(st.text(alphabet="ab,c", max_size=40), st.lists(small, max_size=4), st.booleans(), st.data())
def test_any_cut_gives_the_whole_text_s_answer(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(0, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:] if size else rest
        if size == 0 and len(pieces) > 60:
            pieces.append(rest)
            break
    assert run(pieces, stops, include) == oracle(text, stops, include)


@given(st.text(alphabet="ab", max_size=30), st.lists(small, min_size=1, max_size=3))
def test_only_a_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out, seen = "", ""
    for character in text:
        piece, matched = matcher.push(character)
        if matched is not None:
            return
        given_out, seen = given_out + piece, seen + character
        held = seen[len(given_out) :]
        possible = [len(s[:k]) for s in stops for k in range(1, len(s)) if seen.endswith(s[:k])]
        assert len(held) == max(possible, default=0)


@pytest.mark.parametrize("include", [False, True])
def test_counting(include: bool) -> None:
    pieces = ["1", ", ", "2", ",", " 3", ", 4", ", ", "5", ", 6"]
    assert run(pieces, [", 5"], include) == ("1, 2, 3, 4" + ", 5" * include, ", 5")
    assert run(pieces, ["5"], include) == ("1, 2, 3, 4, " + "5" * include, "5")
    expected = "1, 2, 3, 4" + ", 5, 6" * include
    assert run(pieces, ["zzz", ", 5, 6"], include) == (expected, ", 5, 6")
    assert run(pieces, [", 7"], include) == ("1, 2, 3, 4, 5, 6", None)


def test_first_to_be_complete_wins_and_of_equals_the_longest() -> None:
    assert run(["abcd"], ["abcd", "b"]) == ("a", "b")
    assert run(["xaby"], ["b", "ab"]) == ("x", "ab")


def test_with_the_stop_included_nothing_is_held_back() -> None:
    matcher = StopMatcher(["abc"], include=True)
    assert matcher.push("xab") == ("xab", None)
    assert matcher.push("cde") == ("c", "abc")


def test_without_stops_text_passes_through() -> None:
    assert StopMatcher([]).push("abc") == ("abc", None)


def test_long_hostile_stops_stay_fast() -> None:
    """64 stops of 1024 characters, each text character nearly a match: a quadratic search hangs."""
    stops = ["a" * (1023 - i) + "b" for i in range(64)]
    out, matched = run(["a" * 100] * 40 + ["c"], stops)
    assert matched is None
    assert out == "a" * 4000 + "c"
