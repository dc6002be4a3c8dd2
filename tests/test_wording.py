"""What people read when a value is of the wrong kind: no validator's vocabulary, for any type."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.request import InvalidRequest, SamplingParams
from tokenspeed.wording import counted, type_error


class Inner(msgspec.Struct):
    role: str


class Sent(msgspec.Struct, forbid_unknown_fields=True):
    a: int
    b: str | list[int] | None = None
    c: Annotated[int, msgspec.Meta(ge=1, le=3)] = 1
    d: Annotated[str, msgspec.Meta(min_length=2)] = "xx"
    e: Literal["x", "y"] = "x"
    f: float = 1.0
    g: bool = False
    h: dict[str, int] = {}
    i: Annotated[list[int], msgspec.Meta(max_length=1)] = []
    inner: list[Inner] = []


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({}, "a is missing"),
        ({"a": "x"}, "a must be a whole number, not text"),
        ({"a": 1.5}, "a must be a whole number, not a number"),
        ({"a": 1, "b": 2}, "b must be text or a list or null, not a whole number"),
        ({"a": 1, "c": 9}, "c must be at most 3"),
        ({"a": 1, "d": ""}, "d must have at least 2 characters"),
        ({"a": 1, "e": "z"}, "e: Invalid enum value 'z'"),
        ({"a": 1, "f": None}, "f must be a number, not null"),
        ({"a": 1, "g": 1}, "g must be true or false, not a whole number"),
        ({"a": 1, "h": {"x": "y"}}, "h must be a whole number, not text"),
        ({"a": 1, "i": [1, 2]}, "i must have at most 1 entry"),
        ({"a": 1, "i": ["x"]}, "i[0] must be a whole number, not text"),
        ({"a": 1, "inner": [{}]}, "inner[0]: role is missing"),
        ({"a": 1, "z": 1}, "z is not a known field"),
        ([], "it must be an object, not a list"),
    ],
    ids=str,
)
def test_errors_say_what_a_value_must_be(value: Any, says: str) -> None:
    with pytest.raises(msgspec.ValidationError) as failed:
        msgspec.convert(value, Sent)
    assert type_error(str(failed.value)) == says


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(), st.text("ab", max_size=3)),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text("ab", max_size=3), inner)),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*"abcdefghi", "inner"]), JSON))
def test_nothing_that_is_sent_shows_the_validator(value: dict[str, Any]) -> None:
    try:
        msgspec.convert(value, Sent)
    except msgspec.ValidationError as error:
        shown = type_error(str(error))
        assert "`" not in shown and "Expected" not in shown and "$" not in shown


def test_sampling_params_name_the_place() -> None:
    with pytest.raises(InvalidRequest, match=r"^temperature must be a number, not text$"):
        SamplingParams(temperature="hot")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^stop_token_ids\[1\] must be a whole number"):
        SamplingParams(stop_token_ids=(1, "x"))  # type: ignore[arg-type]


def test_one_is_no_plural() -> None:
    assert [counted(n, "request") for n in (0, 1, 2)] == ["0 requests", "1 request", "2 requests"]
