"""What a model's generation_config.json says about sampling, as far as it can be taken."""

from __future__ import annotations

from typing import Any, cast

from tokenspeed.log import logger
from tokenspeed.request import InvalidRequest, SamplingParams
from tokenspeed.text.source import ModelSource

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(source: ModelSource) -> dict[str, float]:
    """Sampling parameters for requests that leave them open, by name. A value that no request could
    have is passed over with a warning.
    """
    found: dict[str, float] = {}
    for name in NAMES:
        value = source.generation_config.get(name)
        if value is None:
            continue
        try:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidRequest(f"{name} must be a number")
            SamplingParams(**cast(Any, {name: value}))  # checks its range
        except InvalidRequest as error:
            logger.warning("%s: generation_config.json: %s; not used", source.name, error)
        else:
            found[name] = int(value) if name == "top_k" else value
    return found
