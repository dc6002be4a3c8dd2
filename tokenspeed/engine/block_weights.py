"""Weights in blocks, where this machine has kernels for them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

from tokenspeed.config import Config
from tokenspeed.engine.model import ServedModel
from tokenspeed.engine.native import obtain_native
from tokenspeed.kernels import blocks
from tokenspeed.log import logger


def settle_layout(model: ServedModel, config: Config) -> ServedModel:
    """The model as it can be served here: with the kernels for its blocks in place, or plain.
    Seconds where they must be built first.
    """
    if not model.layout:
        return model
    native = obtain_native(config)
    if native is None:
        return dataclasses.replace(model, layout={})
    blocks.install(native.blocks)
    counts = Counter(model.layout.values())
    formats = ", ".join(f"{count} {format}" for format, count in sorted(counts.items()))
    _tell(formats)
    return model


@functools.cache  # commands settle a model more than once
def _tell(formats: str) -> None:
    logger.info("weights stay in blocks: %s; --weight-layout plain expands them", formats)
