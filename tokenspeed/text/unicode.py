"""What a str of Python may hold and Unicode may not."""

from __future__ import annotations

import re

_SURROGATE = re.compile("[\ud800-\udfff]")


def is_unicode(text: str) -> bool:
    """Has it no half of a surrogate pair, and so an encoding in UTF-8?"""
    return text.isascii() or _SURROGATE.search(text) is None
