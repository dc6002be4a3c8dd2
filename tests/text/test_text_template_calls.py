"""Published chat templates write calls into the prompt; the parser chosen for each reads them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from tarfile import TarFile
from typing import Any

import pytest

from tokenspeed.parsers.events import ArgumentsDelta, CallEnd, CallStart
from tokenspeed.parsers.parser import OutputParser
from tokenspeed.parsers.tables import PASSTHROUGH, choose_parsers, output_format
from tokenspeed.request import InvalidRequest
from tokenspeed.text.chat import ChatTemplate

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("get_weather", "add")
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Oslo <\u00e9> "q"\nb', "n": 3}),
    ("add", {"city": "x"}),
]


def written(template: ChatTemplate, calls: list[tuple[str, dict[str, Any]]]) -> str | None:
    """An assistant's turn with these calls; None where the template does not take it. Some look for
    a name in a call's id, some count its characters.
    """
    found = (
        _written(template, calls, id) for id in ("functions.{name}:{number}", "abcdefgh{number}")
    )
    return next((text for text in found if text is not None), None)


def _written(
    template: ChatTemplate, calls: list[tuple[str, dict[str, Any]]], id: str
) -> str | None:
    user = {"role": "user", "content": "Hi"}
    functions = [
        {
            "id": id.format(name=name, number=number),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": functions}
    tools = TOOLS if template.reads("tools") else None
    try:
        prompt = template.render([user], tools=tools)
        before = template.render([user], tools=tools, add_generation_prompt=False)
        whole = template.render([user, turn], tools=tools, add_generation_prompt=False)
    except InvalidRequest:
        return None
    return whole.removeprefix(prompt if whole.startswith(prompt) else before)


def read(names: tuple[str, str], text: str) -> list[tuple[str, Any]]:
    parser = OutputParser(
        output_format(PASSTHROUGH if names[1] != "harmony" else names[0], names[1]),
        schemas={name: SCHEMA for name, _ in CALLS},
    )
    events = [event for char in text for event in parser.feed(char)] + parser.close()
    assert all(event.is_complete for event in events if isinstance(event, CallEnd))
    arguments = {event.index: "" for event in events if isinstance(event, CallStart)}
    for event in events:
        if isinstance(event, ArgumentsDelta):
            arguments[event.index] += event.text
    return [
        (event.name, json.loads(arguments[event.index]))
        for event in events
        if isinstance(event, CallStart)
    ]


@pytest.mark.long
def test_calls_of_real_templates_are_read_back(sdist: Callable[[str, str], TarFile]) -> None:
    """Those among the sources of llama.cpp whose format is known."""
    logging.getLogger("tokenspeed").setLevel(logging.ERROR)
    archive = sdist("llama-cpp-python", "0.3.36")
    tried: dict[str, int] = {}
    for member in archive.getmembers():
        if "/models/templates/" not in member.name or not member.name.endswith(".jinja"):
            continue
        file = archive.extractfile(member)
        assert file is not None
        source = file.read().decode()
        names = choose_parsers("auto", "auto", template=source)
        if names[1] == PASSTHROUGH:
            continue
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
        for calls in (CALLS[:1], CALLS[1:], CALLS):
            text = written(template, calls)
            if text is None:
                continue
            # gpt-oss writes one call a message and drops the others.
            expected = calls[:1] if names[1] == "harmony" else calls
            assert read(names, text) == expected, (member.name, text)
            tried[names[1]] = tried.get(names[1], 0) + 1
    assert tried.keys() == {
        *("hermes", "qwen_coder", "kimik2", "deepseek31", "llama3", "harmony"),
        *("glm45", "minimax_m2", "seed_oss", "mistral", "mistral_args"),
    }
