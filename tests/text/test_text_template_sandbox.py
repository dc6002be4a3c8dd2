"""The sandbox: a template is a stranger's program."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

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
