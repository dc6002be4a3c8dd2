"""Everything about text that a model brings along: tokenizer, chat template, sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.config import ModelConfig
from tokenspeed.request import InvalidRequest
from tokenspeed.text.architectures import architecture_of
from tokenspeed.text.chat import ChatTemplate
from tokenspeed.text.messages import speaks_of_calls
from tokenspeed.text.plain_messages import PlainMessages
from tokenspeed.text.sampling_defaults import sampling_defaults
from tokenspeed.text.source import BUNDLED, resolve_model
from tokenspeed.text.template_file import named_template
from tokenspeed.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class TextSide:
    """What turns text into ids and back. No tokenizer (--skip-tokenizer-init): ids only.

    `defaults` are sampling parameters by name, under those of a request; `model_type` is the
    family's name in config.json.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate
    defaults: Mapping[str, float] = field(default_factory=dict)
    model_type: str = ""
    plain: PlainMessages | None = None
    """How prompts of chats are made where messages hold no special tokens."""
    tool_template: ChatTemplate | None = None
    """What renders chats with tools or calls, if `template` has no place for them."""

    def template_for(self, messages: Any, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        """The template that renders a chat."""
        if self.tool_template is not None and (tools or speaks_of_calls(messages)):
            return self.tool_template
        return self.template

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        add_special_tokens: bool = False,
    ) -> tuple[str, list[int]]:
        """The prompt of a chat, and its ids. Special tokens are the template's business, unless
        `add_special_tokens`. Raises InvalidRequest.
        """
        plain, template = self.plain, self.template_for(messages, tools)
        if plain is not None:
            messages, tools, kwargs = plain.hide(messages), plain.hide(tools), plain.hide(kwargs)
        prompt = template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            kwargs=kwargs,
        )
        assert self.tokenizer is not None, "without one there is no template either"
        if plain is None:
            return prompt, self.tokenizer.encode(prompt, add_special_tokens)
        return plain.reveal(prompt), plain.encode(prompt, add_special_tokens)

    def shortest_chat(self) -> int:
        """Tokens of a chat with one empty message; 0 where there is no such prompt."""
        message = {"role": "user", "content": ""}
        try:
            _, ids = self.chat_prompt(
                [message],
                tools=None,
                kwargs=None,
                add_generation_prompt=True,
                continue_final_message=False,
            )
        except InvalidRequest:
            return 0
        return len(ids)


def load_text_side(config: ModelConfig) -> TextSide:
    """Find and read it; blocks (a hub id is fetched). Raises ModelError in one line, for a family
    that cannot be served before anything else is read.
    """
    source = resolve_model(
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        need_weights=False,
    )
    architecture_of(source.config)
    defaults = sampling_defaults(source) if config.generation_config == "auto" else {}
    family = str(source.config.get("model_type", ""))
    if config.skip_tokenizer_init:
        return TextSide(None, ChatTemplate(None), defaults, family)
    tokenizer = load_tokenizer(source, config.tokenizer)
    template, with_tools = tokenizer.chat_template, None
    if config.chat_template is not None:
        template = named_template(config.chat_template)
    elif source.name in BUNDLED:
        shipped = named_template(BUNDLED[source.name].tool_template)
        with_tools = ChatTemplate(shipped, tokenizer.special_tokens)
    chat = ChatTemplate(template, tokenizer.special_tokens)
    plain = PlainMessages(tokenizer) if config.plain_messages else None
    return TextSide(tokenizer, chat, defaults, family, plain, with_tools)
