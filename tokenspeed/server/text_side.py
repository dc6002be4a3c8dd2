"""Everything about text that a model brings along: tokenizer, chat template, sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed.config import ModelConfig
from tokenspeed.log import logger
from tokenspeed.request import InvalidRequest, SamplingParams
from tokenspeed.text.chat import ChatTemplate
from tokenspeed.text.source import resolve_model
from tokenspeed.text.template_file import read_template_file
from tokenspeed.text.tokenizer import Tokenizer, load_tokenizer

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's generation_config.json may set for requests that leave it open."""


@dataclass(frozen=True)
class TextSide:
    """What turns text into ids and back. No tokenizer (--skip-tokenizer-init): ids only.

    `defaults` are sampling parameters by name, under those of a request.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate
    defaults: Mapping[str, float] = field(default_factory=dict)


def load_text_side(config: ModelConfig) -> TextSide:
    """Find and read it; blocks (a hub id is fetched). Raises ModelError in one line."""
    source = resolve_model(
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        need_weights=False,
    )
    defaults: dict[str, float] = {}
    if config.generation_config == "auto":
        defaults = sampling_defaults(source.generation_config)
    if config.skip_tokenizer_init:
        return TextSide(None, ChatTemplate(None), defaults)
    tokenizer = load_tokenizer(source, config.tokenizer)
    template = tokenizer.chat_template
    if config.chat_template is not None:
        template = read_template_file(Path(config.chat_template))
    return TextSide(tokenizer, ChatTemplate(template, tokenizer.special_tokens), defaults)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """The usable sampling defaults of a model; what is out of range is named and left out."""
    defaults: dict[str, float] = {}
    for name in DEFAULTS:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            if type(value) not in (int, float):
                raise InvalidRequest(f"{name} is no number")
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            logger.warning("generation_config.json: %s; it is left out", error)
            continue
        defaults[name] = value
    if defaults:
        shown = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        logger.info("sampling defaults from generation_config.json: %s", shown)
    return defaults
