"""Lone surrogates are found, wherever they stand; all else has an encoding in UTF-8."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tokenspeed.text.unicode import is_unicode


@given(st.text(st.characters(exclude_categories=())))
@example("")
@example("a\ud800")
@example("\udfff")
@example("\ud7ff\ue000\U0001f600")
def test_what_is_unicode_can_be_encoded(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        assert not is_unicode(text)
    else:
        assert is_unicode(text)
