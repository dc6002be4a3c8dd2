"""The rehearsal's process: `python -m tokenspeed.engine.rehearsal_process`. See `rehearsal` for
what goes in and out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch

from tokenspeed import ledger
from tokenspeed.compile.cache import CompileCache, cache_root
from tokenspeed.compile.entry import Entry
from tokenspeed.compile.key import facts_of
from tokenspeed.config import Config
from tokenspeed.engine.block_weights import settle_layout
from tokenspeed.engine.build import build_engine
from tokenspeed.engine.child import end_with_parent, read_orders
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.linear_tables import LinearKernels
from tokenspeed.engine.model import ServedModel, resolve_served
from tokenspeed.engine.native import obtain_native
from tokenspeed.engine.program import target_of
from tokenspeed.engine.rehearsal import (
    FromRehearsal,
    Rehearsal,
    RehearsalFailed,
    Rehearsed,
    Rehearsing,
)
from tokenspeed.loader import empty_model
from tokenspeed.log import logger, setup_logging
from tokenspeed.request import GenerateRequest, SamplingParams
from tokenspeed.spans import process_import

_LENGTHS = (1, 24, 100, 700, 3000)
"""Of prompts: steps of few tokens and of many, in CUDA graphs and beyond the largest."""

_NUM_NEW = 4

_WAYS = (
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=1.0, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.1, min_tokens=2),
)
"""Of sampling: each takes other kernels."""

Progress = Callable[[str, str], None]


def run(config: Config, progress: Progress) -> None:
    """Do what a start with these settings would, up to ready, as far as it leaves something for
    later ones; on CUDA then serve some requests. Raises ModelError, ConfigError, and what CUDA
    raises without memory.
    """
    model = settle_layout(resolve_served(config, need_weights=False), config)
    if model.device.type == "cuda":
        engine = build_engine(_with_made_up_weights(config), progress)
        progress("requests", "")
        with ledger.rehearsing():
            serve(engine)
    else:
        _measure(model, config, progress)


def serve(engine: Engine) -> None:
    """Serve prompts of several lengths, sampled in every way, one by one and then together. Raises
    RuntimeError if one fails.
    """
    longest = min(_LENGTHS[-1], engine.ready.max_model_len - _NUM_NEW)
    lengths = sorted({min(length, longest) for length in _LENGTHS if longest > 0})
    places = [lengths[min(at, len(lengths) - 1)] for at in range(len(_WAYS))]
    alone = [[_request(engine, length, at)] for at, length in enumerate(places)]
    together = [_request(engine, length, at + len(_WAYS)) for at, length in enumerate(places)]
    for requests in (*alone, together):
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for delta in engine.step():
                if delta.error is not None:
                    raise RuntimeError(f"a request fails: {delta.error}")


def _request(engine: Engine, length: int, number: int) -> GenerateRequest:
    """No prompt is the beginning of another: what is in the prefix cache would not be computed."""
    ids = [(number * 7 + place) % engine.ready.vocab_size for place in range(length)]
    params = msgspec.structs.replace(_WAYS[number % len(_WAYS)], max_tokens=_NUM_NEW)
    return GenerateRequest(id=str(number), prompt_ids=ids, params=params, seed=number)


def _with_made_up_weights(config: Config) -> Config:
    """And at the level of a start of which none is asked: it launches what level 1 does, and more,
    for its graphs.
    """
    level = None if config.compile.level == 1 else config.compile.level
    compiles = replace(config.compile, level=level, require_cache=True, dump_passes=None)
    return replace(config, model=replace(config.model, load_format="dummy"), compile=compiles)


def _measure(model: ServedModel, config: Config, progress: Progress) -> None:
    """Fill the entry's table of linear kernels, on weights of the model's shapes."""
    found = CompileCache(cache_root(config.compile.cache_dir)).find(
        facts_of(target_of(model, config))
    )
    if not isinstance(found, Entry):
        raise RuntimeError(found.reason)
    module = empty_model(model.make, model.dtype, model.device)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data.uniform_(-0.02, 0.02)
    linear = LinearKernels(obtain_native(config), found)
    linear.install(module.parameters(), are_real=True, progress=progress)


def main() -> int:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whoever prints does not garble messages
    rehearsal = read_orders(Rehearsal)
    setup_logging(rehearsal.config.server.log_level)
    process_import()
    end_with_parent(lambda: None)
    torch.set_num_threads(rehearsal.num_threads)

    def send(message: FromRehearsal) -> None:
        out.write(msgspec.json.encode(message) + b"\n")
        out.flush()

    began = time.monotonic()
    try:
        run(
            rehearsal.config, lambda phase, detail: send(Rehearsing(f"a start, rehearsed: {phase}"))
        )
    except Exception as error:
        logger.debug("the rehearsal failed", exc_info=True)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        send(RehearsalFailed(lines[0][:500]))
        return 1
    send(Rehearsed(time.monotonic() - began, ledger.totals()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
