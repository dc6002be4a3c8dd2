"""`--print-config`: the settings that a start would have, settled as it would settle them."""

from __future__ import annotations

from tokenspeed.config import Config
from tokenspeed.draft import Resolution
from tokenspeed.engine.compile_settings import check_compile
from tokenspeed.engine.facts import machine_facts
from tokenspeed.engine.model import resolve_served
from tokenspeed.resolve import resolve
from tokenspeed.text.errors import ModelError


def settled(config: Config) -> tuple[Resolution, str | None]:
    """The settled settings; where the model cannot be found, as far as they can be without it, and
    why. No weights are read. Raises ConfigError for what cannot be had here.
    """
    check_compile(config.compile)
    try:
        return resolve_served(config, need_weights=False).resolution, None
    except ModelError as error:
        return resolve(config, machine_facts(config), None), str(error)
