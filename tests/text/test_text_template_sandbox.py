"""The sandbox: a template is a stranger's program."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from jinja2.exceptions import SecurityError

from tokenspeed.text import template_sandbox
from tokenspeed.text.template_sandbox import Sandbox, render_capped, undeclared_names


def render(source: str, **variables: Any) -> str:
    return render_capped(Sandbox().from_string(source), variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(x=1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}{{ ns }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ dict.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(1000000) }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ [1] * 1000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ (2 ** 60) ** 60 }}",
    ],
)
def test_escapes_and_huge_values_are_refused(source: str) -> None:
    messages = [{"role": "user"}]
    with pytest.raises((jinja2.TemplateError, TypeError, OverflowError)):
        render(source, messages=messages)
    assert messages == [{"role": "user"}]


BOMBS = [
    "'x'.ljust(30000000)",
    "'x'.rjust(width=30000000)",
    "'x'.center(30000000, 'y')",
    "'x'.zfill(30000000)",
    "'x'.encode().ljust(30000000)",
    "('\\t' * 9000).expandtabs(9000)",
    "'%30000000d' % 1",
    "'%.30000000f' % 1",
    "'%*d' % (30000000, 1)",
    "'%(a)30000000d' % {'a': 1}",
    "('%s' * 9000) % big",
    "'{:30000000}'.format(1)",
    "'{:{}}'.format(1, 30000000)",
    "('{0}' * 9000).format(big)",
    "('{a}' * 9000).format_map({'a': big})",
    "big.replace('x', big)",
    "big.replace('', big)",
    "big.join(big)",
    "big.join(([1, 2] * 90000) | map('string') | list)",
    "big.translate({120: big})",
    "(1).to_bytes(1000000000, 'big')",
    "big * (big | length)",
    "[[big] * 999] * 999",
    "{'a': [big] * 999}.values()",
    "([big] * 999) | string",
    "([big] * 999) | upper",
    "'a' | center(30000000)",
    "'a' | indent(30000000, true)",
    "big | replace('x', big)",
    "'%30000000d' | format(1)",
    "([big] * 999) | join",
    "(['a'] * 9999) | join(big)",
    "[1] | batch(1000000000, 0) | list",
    "[1] | slice(slices=1000000000) | list",
    "(['a'] * 9999) | join(d=big)",
    "[1] | tojson(indent=30000000)",
    "([big] * 999) | tojson",
    "big | wordwrap(1, wrapstring=big)",
    "['a'] | map('center', 30000000) | list",
    "([0] * 1000000) + ([0] * 1000000)",
    "strftime_now('%030000000d')",
]
DOUBLINGS = [
    "{% set ns.x = ns.x ~ ns.x %}",
    "{% set ns.x = ns.x + ns.x %}",
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}",
    "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns.x = twice(ns.x) %}",
    "{% set ns.x = [ns.x, ns.x] | join %}",
    "{% set ns.x = ns.x | replace('x', 'xx') %}",
    "{% set ns.n = ns.n * ns.n %}",
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_call_makes_a_huge_value(bomb: str) -> None:
    """Refused before it is made: the largest would not fit into any memory."""
    with pytest.raises(SecurityError):
        render("{% set big = 'x' * 20000 %}{{ " + bomb + " }}")


@pytest.mark.parametrize("doubling", DOUBLINGS)
def test_no_loop_makes_a_huge_value(doubling: str) -> None:
    start = "{% set ns = namespace(x='x', n=3) %}{% for i in range(60) %}"
    with pytest.raises(SecurityError, match="too large a value"):
        render(start + doubling + "{% endfor %}done")


def test_what_is_checked_still_works() -> None:
    source = (
        "{{ 'a'.ljust(3, '.') }}|{{ '%3d%%' % 7 }}|{{ '%s-%s' | format('a', 1) }}|"
        "{{ '{:>3}{}'.format(1, 'b') }}|{{ '{a}'.format_map({'a': 2}) }}|"
        "{{ ', '.join(['a', 'b']) }}|"
        "{{ 'aXa'.replace('a', 'bb', 1) }}|{{ [1, 'b'] | join('+') }}|{{ 'a' ~ 1 ~ none }}|"
        "{{ [1] + [2] }}|{{ 7 % 4 }}|{{ 'a b' | replace('a', 'c') | upper }}|"
        "{{ [{'k': 1}, {'k': 2}] | join('-', attribute='k') }}|{{ 'a\nb' | indent(2) }}"
    )
    assert render(source) == ("a..|  7%|a-1|  1b|2|a, b|bbXa|1+b|a1None|[1, 2]|3|C B|1-2|a\n  b")


def test_output_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_OUTPUT_CHARS", 1000)
    assert len(render("{% for i in range(100) %}0123456789{% endfor %}")) == 1000
    with pytest.raises(jinja2.TemplateError, match="1000 characters"):
        render("{% for i in range(1000) %}0123456789{% endfor %}")


def test_what_templates_rely_on() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{{ dict(a=1).a }}{{ 3 * 4 }}{{ 2 ** 5 }}{{ 'ab' * 2 }}") == "11232abab"
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("{% set ns = namespace(self=1) %}{% set ns.x = 2 %}{{ ns.self + ns.x }}") == "3"
    assert render("{% generation %}a{{ x }}{% endgeneration %}b", x=1) == "a1b"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_undeclared_names_are_what_callers_may_pass() -> None:
    source = "{% set a = b %}{% for c in messages %}{{ c.d ~ e }}{% endfor %}{{ strftime_now(f) }}"
    assert undeclared_names(source) == {"b", "messages", "e", "f"}
