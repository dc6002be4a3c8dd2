"""Everything about text that a model brings along: tokenizer, chat template, sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenspeed.config import ModelConfig
from tokenspeed.text.chat import ChatTemplate
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
    return TextSide(tokenizer, chat, defaults, family)
