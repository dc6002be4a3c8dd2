"""The Jinja environment in which chat templates run: the one transformers offers them, sandboxed.

A template comes with a model, so it is a stranger's program. The immutable sandbox keeps it from
objects and from changing its input, `*` and `**` cannot make huge values, and the output is capped.
The sandbox is no limit on time: whoever renders does it off the event loop, with a deadline.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_OUTPUT_CHARS = 1 << 24
_MAX_FACTOR = 1 << 32


class Sandbox(ImmutableSandboxedEnvironment):
    """Names and filters that templates written for transformers rely on."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = _to_json
        self.globals = {
            "range": self.globals["range"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "namespace": _Namespace,
            "dict": _make_dict,
            "raise_exception": _raise,
            "strftime_now": _strftime_now,
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            size = len(value) if isinstance(value, str | list | tuple) else None
            if size is not None and isinstance(times, int) and size * times > MAX_OUTPUT_CHARS:
                raise SecurityError("the template repeats a value too often")
        if operator == "**" and not (abs(left) < _MAX_FACTOR and abs(right) <= 64):
            raise SecurityError("the template computes too large a power")
        return super().call_binop(context, operator, left, right)


def undeclared_names(template: str) -> frozenset[str]:
    """Variables a template reads without setting them: what callers may pass to it."""
    environment = Sandbox()
    names = jinja2.meta.find_undeclared_variables(environment.parse(template))
    return frozenset(names) - frozenset(environment.globals)


def render_capped(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The rendered text, stopped as soon as it grows past MAX_OUTPUT_CHARS."""
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        size += len(piece)
        if size > MAX_OUTPUT_CHARS:
            raise SecurityError(f"the template writes more than {MAX_OUTPUT_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks text for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body)]


class _Namespace(Namespace):
    """Jinja's namespace without underscore names, which are the way out of a sandbox."""

    def __init__(*args: Any, **values: Any) -> None:  # no `self`: a template may set that name
        merged = dict(*args[1:], **values)
        for name in merged:
            _check_public(name)
        Namespace.__init__(args[0], merged)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}")


def _make_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    """`dict(...)` without the class, whose attributes a template has no use for."""
    return dict(*args, **values)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
