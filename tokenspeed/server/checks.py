"""What can be seen to be wrong with a start before it, without weights and without an engine."""

from __future__ import annotations

from tokenspeed.config import Config, ModelConfig
from tokenspeed.options import ConfigError
from tokenspeed.server.serve import check_files
from tokenspeed.text.errors import ModelError
from tokenspeed.text.source import is_hub_id
from tokenspeed.text.text_side import load_text_side


def check_start(config: Config, *, has_model: bool) -> None:
    """Raise ConfigError for files that settings name and a start could not take. With `has_model`,
    which is then on this machine, also for a tokenizer or chat template.
    """
    check_files(config.server)
    if has_model:
        check_text(config.model)


def check_local(model: ModelConfig) -> None:
    """As `check_text`, but for a model that would have to be fetched for it."""
    if not is_hub_id(model.model):
        check_text(model)


def check_text(model: ModelConfig) -> None:
    """Raise ConfigError for a model whose text side cannot be loaded."""
    try:
        load_text_side(model)
    except ModelError as error:
        raise ConfigError(str(error)) from error
