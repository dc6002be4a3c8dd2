"""Everything about text that a model brings along: tokenizer, chat template, sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed.config import ModelConfig
from tokenspeed.text.chat import ChatTemplate
from tokenspeed.text.plain_messages import PlainMessages
from tokenspeed.text.sampling_defaults import sampling_defaults
from tokenspeed.text.source import resolve_model
from tokenspeed.text.template_file import read_template_file
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
        plain = self.plain
        if plain is not None:
            messages, tools, kwargs = plain.hide(messages), plain.hide(tools), plain.hide(kwargs)
        prompt = self.template.render(
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


def load_text_side(config: ModelConfig) -> TextSide:
    """Find and read it; blocks (a hub id is fetched). Raises ModelError in one line."""
    source = resolve_model(
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        need_weights=False,
    )
    defaults = sampling_defaults(source) if config.generation_config == "auto" else {}
    family = str(source.config.get("model_type", ""))
    if config.skip_tokenizer_init:
        return TextSide(None, ChatTemplate(None), defaults, family)
    tokenizer = load_tokenizer(source, config.tokenizer)
    template = tokenizer.chat_template
    if config.chat_template is not None:
        template = read_template_file(Path(config.chat_template))
    chat = ChatTemplate(template, tokenizer.special_tokens)
    plain = PlainMessages(tokenizer) if config.plain_messages else None
    return TextSide(tokenizer, chat, defaults, family, plain)
