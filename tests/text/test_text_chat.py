"""Chat templates: golden prompts, parity with transformers, and what requests may not do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from tarfile import TarFile
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tokenspeed.request import InvalidRequest
from tokenspeed.text import chat as chat_module
from tokenspeed.text.chat import ChatTemplate
from tokenspeed.text.errors import ModelError
from tokenspeed.text.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

LLAMA_STYLE = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = 'default' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|h|>system<|/h|>\\n\\n' ~ system ~ '\\n' ~ strftime_now('%Y') ~ '<|eot|>' }}
{%- for message in rest %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('no role ' ~ message.role) }}
    {%- endif %}
    {{- '<|h|>' + message.role + '<|/h|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\\n\\n' }}{% endif %}
"""

QWEN_STYLE = """\
{%- set ns = namespace(last=0) %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{ '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- message.content }}{%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' ~ {'name': call.function.name, 'arguments':
                call.function.arguments} | tojson(indent=1) ~ '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {%- set ns.last = loop.index0 %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL_STYLE = """\
{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
        {{ message['content'] + eos_token }}
    {% endif %}
{% endfor %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": 'A <b> & "c" é', "parameters": {}},
    }
]
CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [{"role": "user", "content": " <b>é & 'q'\n"}]},
    "system": {
        "messages": [
            {"role": "system", "content": " Be brief. "},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "2 + 2?"},
        ]
    },
    "no prompt": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo "}],
        "add_generation_prompt": False,
    },
    "continued": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "reasoning": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yo", "reasoning_content": "\nhm\n"},
            {"role": "user", "content": "and?"},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "Rome?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "123456789", "function": {"name": "weather", "arguments": {"a": "é<"}}}
                ],
            },
            {"role": "tool", "tool_call_id": "123456789", "name": "weather", "content": "sunny"},
        ],
        "tools": TOOLS,
    },
}


def ours(template: ChatTemplate, chat: dict[str, Any]) -> str | None:
    try:
        return template.render(**chat)
    except InvalidRequest:
        return None


def theirs(source: str, chat: dict[str, Any]) -> str | None:
    options: dict[str, Any] = {"add_generation_prompt": True, **chat, **SPECIAL}
    try:
        [text], _ = render_jinja_template(
            [options.pop("messages")], chat_template=source, **options
        )
    except Exception:
        return None
    return str(text)


def test_golden_prompts(tokenizer: Tokenizer, golden: dict[str, Any]) -> None:
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    for prompt in golden["prompts"]:
        text = template.render(prompt["messages"])
        assert text == prompt["rendered"]
        assert tokenizer.encode(text, add_special_tokens=False) == prompt["prompt_ids"]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", ["smollm2", "llama", "qwen", "mistral"])
def test_parity_with_transformers(tokenizer: Tokenizer, style: str, chat: str) -> None:
    bundled = tokenizer.chat_template
    assert bundled is not None
    source = {
        "smollm2": bundled,
        "llama": LLAMA_STYLE,
        "qwen": QWEN_STYLE,
        "mistral": MISTRAL_STYLE,
    }[style]
    if chat == "tools" and style != "qwen":
        with pytest.raises(InvalidRequest, match="no place for tools"):
            ChatTemplate(source, SPECIAL).render(**CHATS[chat])
        return
    text = ours(ChatTemplate(source, SPECIAL), CHATS[chat])
    assert text == theirs(source, CHATS[chat])
    assert text or (style, chat) == ("mistral", "system")


@pytest.mark.long
def test_real_templates_render_as_in_transformers(sdist: Callable[[str, str], TarFile]) -> None:
    """Some seventy templates of published models, from the sources of llama.cpp."""
    logging.getLogger("tokenspeed").setLevel(logging.ERROR)
    archive = sdist("llama-cpp-python", "0.3.36")
    compared = 0
    for member in archive.getmembers():
        if "/models/templates/" not in member.name or not member.name.endswith(".jinja"):
            continue
        file = archive.extractfile(member)
        assert file is not None
        source = file.read().decode()
        template = ChatTemplate(source, SPECIAL)
        for name, chat in CHATS.items():
            text = ours(template, chat)
            is_as_given = not (template._wants_parts or template._wants_text_arguments)
            is_as_given &= not template._wants_no_content
            if text is not None and is_as_given:
                assert text == theirs(source, chat), (member.name, name)
                compared += 1
    assert compared > 250


def test_a_template_without_end_is_refused_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "PROBE_S", 0.2)
    begun = time.monotonic()
    with pytest.raises(ModelError, match=r"within 0.2 s.*--chat-template"):
        # Ends after a second or so, for the sake of the tests that follow.
        ChatTemplate("{% for a in range(1500) %}{% for b in range(9999) %}{% endfor %}{% endfor %}")
    assert time.monotonic() - begun < 20


def test_base_model_says_what_to_do() -> None:
    template = ChatTemplate(None)
    with pytest.raises(InvalidRequest, match=r"/v1/completions.*--chat-template"):
        template.render([{"role": "user", "content": "x"}])


def test_developer_reaches_a_template_that_does_not_know_it(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(tokenizer.chat_template)
    user = {"role": "user", "content": "capital of France?"}
    as_system = template.render([{"role": "system", "content": "Say BANANA."}, user])
    assert template.render([{"role": "developer", "content": "Say BANANA."}, user]) == as_system
    knowing = ChatTemplate(
        "{% for m in messages %}{{ m.role if m.role == 'developer' else '' }}{{ m.content }}"
        "{% endfor %}"
    )
    assert knowing.render([{"role": "developer", "content": "D"}]) == "developerD"


def test_template_that_reads_parts_only_gets_parts() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    assert template.render([{"role": "user", "content": "abc"}]) == "abc"


def test_kwargs_reach_the_template_but_cannot_name_our_arguments() -> None:
    template = ChatTemplate(QWEN_STYLE, SPECIAL)
    messages = [{"role": "user", "content": "x"}]
    text = template.render(messages, kwargs={"enable_thinking": False})
    assert text.endswith("<think>\n\n</think>\n\n")
    for name in ("messages", "tools", "add_generation_prompt", "eos_token", "__class__", "other"):
        with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
            template.render(messages, kwargs={name: "x"})


def test_continuing_needs_an_assistant_message_and_no_new_turn() -> None:
    template = ChatTemplate(QWEN_STYLE, SPECIAL)
    user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}
    for messages, prompt in (([user], False), ([user, assistant], True)):
        with pytest.raises(InvalidRequest, match="continue_final_message"):
            template.render(messages, continue_final_message=True, add_generation_prompt=prompt)
    dropping = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match="drops"):
        dropping.render([user, assistant], continue_final_message=True, add_generation_prompt=False)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% unknown %}"])
def test_broken_template_fails_at_start(source: str) -> None:
    with pytest.raises(ModelError, match="line 1"):
        ChatTemplate(source)


def test_template_that_cannot_render_a_message_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "tokenspeed"):
        template = ChatTemplate("{{ raise_exception('no chat here') }}")
    assert "does not render" in caplog.text
    with pytest.raises(InvalidRequest, match="no chat here"):
        template.render([{"role": "user", "content": "x"}])


def test_errors_of_a_template_are_one_line_of_the_request() -> None:
    template = ChatTemplate(
        "{{ messages[0].content }}{% if messages|length > 1 %}{{ 1/0 }}{% endif %}"
    )
    with pytest.raises(InvalidRequest) as caught:
        template.render([{"role": "user", "content": "x"}] * 2)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


def test_arguments_are_text_for_templates_that_join_them() -> None:
    """As DeepSeek's do; others get objects."""
    head = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    foot = "{% endfor %}{% endfor %}{{ (tools or []) | length }}"
    call = {"function": {"name": "f", "arguments": '{"a":"\u00e9", "b": [1,2]}'}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    joining = ChatTemplate(head + "{{ c.function.name + c.function.arguments }}" + foot)
    assert joining.render(chat, tools=TOOLS) == 'xf{"a": "\u00e9", "b": [1, 2]}1'
    writing = ChatTemplate(head + "{{ c.function.arguments | tojson }}" + foot)
    assert writing.render(chat, tools=TOOLS) == 'x{"a": "\u00e9", "b": [1, 2]}1'
    none = ChatTemplate(
        "{{ messages[0].content }}{% if messages[1] and messages[1].content is none %}"
        "{{ messages[1].tool_calls[0].function.arguments | tojson }}{% endif %}"
    )
    assert none.render(chat) == 'x{"a": "\u00e9", "b": [1, 2]}'
    assert joining.reads("tools") and not joining.reads("enable_thinking")
