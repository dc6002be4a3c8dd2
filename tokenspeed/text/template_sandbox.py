"""The Jinja environment in which chat templates run: the one transformers offers them, sandboxed.

A template comes with a model, so it is a stranger's program. The immutable sandbox keeps it from
objects and from changing its input, what could make huge values is checked (`template_limits`), and
the output is capped.
The sandbox is no limit on time: whoever renders does it off the event loop, with a deadline.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokenspeed.text.template_limits import (
    FILTERS,
    MAX_CHARS,
    check_binop,
    check_format,
    check_method,
    check_text,
    join_filter,
    join_texts,
)

MAX_OUTPUT_CHARS = MAX_CHARS
_MAX_LAYOUT_CHARS = 256


class _CodeGenerator(CodeGenerator):
    """`a ~ b` goes through the environment, as the other operators can do by themselves."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Names and filters that templates written for transformers rely on."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _CodeGenerator
    concat = staticmethod(join_texts)  # of macros, block assignments and `~`

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=check_text,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = _to_json
        for name, check in FILTERS.items():
            self.filters[name] = _checked(self.filters[name], check)
        self.filters["join"] = _checked_join(self.filters["join"])
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
        check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            check_method(owner, __obj.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, (args, kwargs))
            return wrapped(*args, **kwargs)

        return checked


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter whose arguments are checked first; some filters get a context before them."""
    skip = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args[skip:], **kwargs)
        return function(*args, **kwargs)

    return checked


def _checked_join(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return function(context, join_filter(value, *args, **kwargs), *args, **kwargs)

    return checked


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
    if len(layout) > _MAX_LAYOUT_CHARS or re.search(r"%[^a-zA-Z%]*\d", layout):
        raise SecurityError("strftime_now takes a short layout without widths")
    return datetime.datetime.now().strftime(layout)
