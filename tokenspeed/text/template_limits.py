"""How large a value a chat template may make: checked before the value is made.

A few characters of a template can ask for gigabytes ('x'.ljust(10**9), '%1000000000d', a string
doubled in a loop), and no deadline comes before the memory is gone. So whatever makes a value that
may be much larger than those it is made of says first how large, here.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError

MAX_CHARS = 1 << 24
"""Of a text, the rendered prompt among them."""
MAX_ENTRIES = 1 << 20
"""Of a list."""
MAX_BITS = 256
"""Of an integer."""
_OTHER_CHARS = 32
"""A guess at what a number or an object is as text."""
_PADDING = frozenset({"ljust", "rjust", "center", "zfill", "to_bytes"})
_PERCENT = re.compile(r"%(?:\([^)]*\))?([^a-zA-Z%]*)")

Text = (str, bytes)


def require(size: float, limit: int = MAX_CHARS) -> None:
    if size > limit:
        raise SecurityError("the template makes too large a value")


def num_chars(value: Any) -> int:
    """About how many characters `str(value)` has; stops counting beyond the limit."""
    total, stack = 0, [value]
    while stack and total <= MAX_CHARS:
        each = stack.pop()
        if isinstance(each, Text):
            total += len(each)
        elif isinstance(each, Mapping):
            stack.extend(itertools.chain.from_iterable(each.items()))
            total += 2 * len(each)
        elif isinstance(each, list | tuple | KeysView | ValuesView | ItemsView):
            stack.extend(each)
            total += 2 * len(each)
        else:
            total += _OTHER_CHARS
    return total


def check_text(value: Any) -> Any:
    """`value`, which is about to become text."""
    if not isinstance(value, Text):
        require(num_chars(value))
    return value


def join_texts(pieces: Iterable[Any]) -> str:
    """What `~`, macros and block assignments do with their pieces."""
    texts, size = [], 0
    for piece in pieces:
        text = str(check_text(piece))
        size += len(text)
        require(size)
        texts.append(text)
    return "".join(texts)


def check_binop(operator: str, left: Any, right: Any) -> None:
    """`+`, `*`, `**` and `%` of two values."""
    if operator == "%" and isinstance(left, Text):
        check_percent(left, right)
    elif operator == "+" and isinstance(left, Text) and isinstance(right, Text):
        require(len(left) + len(right))
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        require(len(left) + len(right), MAX_ENTRIES)
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, (*Text, list, tuple)) and isinstance(times, int):
                limit = MAX_CHARS if isinstance(value, Text) else MAX_ENTRIES
                require(len(value) * times, limit)
        if isinstance(left, int) and isinstance(right, int):
            require(left.bit_length() + right.bit_length(), MAX_BITS)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        require(left.bit_length() * abs(right), MAX_BITS)


def check_percent(template: Any, values: Any) -> None:
    """`template % values`: widths that are written there, and none that are computed."""
    text = template.decode("latin-1") if isinstance(template, bytes) else template
    fields = _PERCENT.findall(text)
    if any("*" in field for field in fields):
        raise SecurityError("the template computes the width of a field")
    widths = sum(_largest(field) for field in fields)
    require(len(text) + widths + len(fields) * num_chars(values))


def check_format(template: str, values: Any) -> None:
    """`template.format(...)` likewise. Fields may stand in it many times over."""
    widths = num_fields = 0
    for _, name, spec, _ in string.Formatter().parse(template):
        if name is None:
            continue
        if spec and "{" in spec:
            raise SecurityError("the template computes the width of a field")
        num_fields += 1
        widths += _largest(spec or "")
    require(len(template) + widths + num_fields * num_chars(values))


def check_replace(text: Any, old: Any, new: Any, count: Any = None) -> None:
    times = text.count(old)
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    require(len(text) + times * len(new))


def check_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`owner.name(*args)` of a built-in value; wrong arguments are left to the method itself."""
    values = [*args, *kwargs.values()]
    if name in _PADDING:
        require(max((each for each in values if isinstance(each, int)), default=0))
    elif not isinstance(owner, Text):
        return
    elif name == "expandtabs":
        width = next((each for each in values if isinstance(each, int)), 8)
        require(len(owner) + len(owner) * max(0, width))
    elif name == "replace" and len(values) >= 2:
        check_replace(owner, *values[:3])
    elif name == "join" and values and isinstance(values[0], list | tuple | dict):
        require(num_chars(values[0]) + len(owner) * len(values[0]))
    elif name == "join" and values and not isinstance(values[0], Text):
        raise SecurityError("the template joins what is no list")
    elif name == "translate" and values:
        table = values[0].values() if isinstance(values[0], Mapping) else ()
        require(len(owner) * max((num_chars(each) for each in table), default=1))


def _check_filter_replace(text: Any, old: Any, new: Any, count: Any = None) -> None:
    check_replace(str(check_text(text)), str(check_text(old)), str(check_text(new)), count)


def _check_filter_center(value: Any, width: int = 80) -> None:
    require(num_chars(value) + width)


def _check_filter_indent(value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    added = len(width) if isinstance(width, str) else width
    require(len(value) + (value.count("\n") + 1) * added)


def _check_filter_format(template: Any, *args: Any, **kwargs: Any) -> None:
    check_percent(str(check_text(template)), kwargs or args)


def _check_filter_wordwrap(value: Any, *args: Any, **kwargs: Any) -> None:
    texts = [each for each in (*args, *kwargs.values()) if isinstance(each, str)]
    require(len(value) * (1 + sum(map(len, texts))))


def _check_filter_fill(value: Any, *args: Any, **kwargs: Any) -> None:
    numbers = [each for each in (*args, *kwargs.values()) if isinstance(each, int)]
    require(max(numbers, default=0), MAX_ENTRIES)


def _check_filter_tojson(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, *_: Any
) -> None:
    width = len(indent) if isinstance(indent, str) else indent or 0
    require(max(width, *(len(each) for each in separators or ("",))), 64)
    require(num_chars(value))


def _check_filter_text(value: Any, *_: Any, **__: Any) -> None:
    require(num_chars(value))


FILTERS: dict[str, Callable[..., None]] = {
    "replace": _check_filter_replace,
    "center": _check_filter_center,
    "indent": _check_filter_indent,
    "format": _check_filter_format,
    "wordwrap": _check_filter_wordwrap,
    "batch": _check_filter_fill,
    "slice": _check_filter_fill,
    "tojson": _check_filter_tojson,
    **dict.fromkeys(
        ("capitalize", "e", "escape", "forceescape", "lower", "pprint", "safe", "string"),
        _check_filter_text,
    ),
    **dict.fromkeys(
        ("striptags", "title", "trim", "truncate", "upper", "urlencode", "urlize", "wordcount"),
        _check_filter_text,
    ),
}
"""Filter -> the check of its arguments. `join` is ours (`join_filter`), since it may be given an
iterator."""


def join_filter(value: Iterable[Any], d: Any = "", attribute: Any = None) -> Iterable[Any]:
    """The entries of a `join` by `d` (Jinja's name for it), bounded in number and as one text."""
    entries = list(itertools.islice(value, MAX_ENTRIES + 1))
    require(len(entries), MAX_ENTRIES)
    require(num_chars(entries) + len(entries) * num_chars(d))
    return entries


def _largest(field: str) -> int:
    """The largest number in a field's width and precision."""
    return max((int(digits[:12]) for digits in re.findall(r"\d+", field)), default=0)
