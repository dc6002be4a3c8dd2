"""From settings to a running engine: source, family, program, weights, cache, scheduler, worker.

The one place where all rooms meet. Each phase is a span, a progress report and a line of the log.
Capture and loading take turns: in one process they would only wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenspeed.compile.pipeline import plan_model
from tokenspeed.compile.plan import Program
from tokenspeed.compile.runner import Executable
from tokenspeed.config import Config
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.memory import count_pages
from tokenspeed.engine.messages import Ready
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.engine.slots import Slots
from tokenspeed.engine.worker import Worker
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kv.manager import KVManager
from tokenspeed.kv.pool import PagePool, bytes_per_page
from tokenspeed.kv.specs import CacheGroup, cache_groups
from tokenspeed.loader import empty_model, load_weights
from tokenspeed.log import logger, span
from tokenspeed.models import family_of
from tokenspeed.models.family import DecoderConfig, Family
from tokenspeed.options import ConfigError
from tokenspeed.text.errors import ModelError
from tokenspeed.text.source import ModelSource, eos_token_ids, resolve_model

Progress = Callable[[str, str], None]
"""Told the phase, and a line for people."""

DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
_PROGRESS_S = 0.2
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What is served, all of it settled."""

    source: ModelSource
    family: Family
    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype

    def make(self) -> nn.Module:
        return self.family.model(self.config)


def build_engine(config: Config, progress: Progress) -> Engine:
    """Build everything; ModelError or ConfigError (one line) for what the user can put right."""
    began = time.monotonic()
    with span("scheduler.init"):
        with span("model.config"):
            progress("config", config.model.model)
            model = _resolve(config)
        program = _plan(model, progress)
        module = _load(model, config, progress)
        with span("kv.build"):
            progress("kv", "")
            groups = cache_groups(model.family.cache_specs(model.config))
            pool = _build_pool(model, groups, config)
        with span("executor.init"):
            executable = Executable(program, module)
            return _join(model, config, executable, groups, pool, began)


def resolve_device(name: str) -> torch.device:
    """The device that a setting means."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device, hf_config: dict[str, Any]) -> torch.dtype:
    """The dtype that a setting means; "auto" is float32 on a CPU, else the checkpoint's."""
    if name == "auto":
        stored = hf_config.get("torch_dtype")
        name = "float32" if device.type == "cpu" else str(stored or "bfloat16")
    if name not in DTYPES:
        raise ModelError(f"the checkpoint's dtype {name!r} is not supported; set --dtype")
    return DTYPES[name]


def _resolve(config: Config) -> _Model:
    wanted = config.model
    source = resolve_model(
        wanted.model,
        revision=wanted.revision,
        download_dir=wanted.download_dir,
        need_weights=wanted.load_format != "dummy",
    )
    family = family_of(source.config)
    device = resolve_device(wanted.device)
    model = _Model(
        source=source,
        family=family,
        config=family.config.from_dict(source.config, wanted.max_model_len),
        device=device,
        dtype=resolve_dtype(wanted.dtype, device, source.config),
    )
    numbers = model.config
    logger.info(
        "model %s: %s, %d layers, %d tokens of context; %s, %s",
        *(source.name, family.model.__name__, numbers.num_layers, numbers.max_model_len),
        *(device, _name(model.dtype)),
    )
    return model


def _plan(model: _Model, progress: Progress) -> Program:
    progress("compile", "capture")
    began = time.monotonic()
    program = plan_model(model.make, dtype=model.dtype, device=model.device)
    logger.info("program: %d pieces in %.1f s", len(program.pieces), time.monotonic() - began)
    return program


def _load(model: _Model, config: Config, progress: Progress) -> nn.Module:
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _PROGRESS_S or done == total:
            last = time.monotonic()
            progress("weights", f"{done // _MIB} of {total // _MIB} MiB")

    with span("weights.target"):
        with span("weights.allocate"):
            module = empty_model(model.make, model.dtype, model.device)
        with span("weights.read_copy"):
            loaded = load_weights(
                module,
                model.family.weights,
                model.source,
                load_format=config.model.load_format,
                seed=config.model.seed,
                progress=report,
            )
    logger.info("weights: %d MiB in %.1f s", loaded.bytes // _MIB, loaded.seconds)
    return module


def _build_pool(model: _Model, groups: list[CacheGroup], config: Config) -> PagePool:
    began = time.monotonic()
    block_size = config.cache.block_size
    page_bytes = bytes_per_page(groups, block_size, model.dtype)
    num_pages = count_pages(
        config.cache,
        page_bytes,
        useful_tokens=config.scheduler.max_num_seqs * model.config.max_model_len,
        needed_tokens=config.model.max_model_len or 1,
        device=model.device,
    )
    pool = PagePool(groups, num_pages, block_size, model.dtype, model.device)
    logger.info(
        "kv cache: %d tokens, %d pages, %d MiB in %.1f s",
        *(num_pages * block_size, num_pages, num_pages * page_bytes // _MIB),
        time.monotonic() - began,
    )
    return pool


def _join(
    model: _Model,
    config: Config,
    executable: Executable,
    groups: list[CacheGroup],
    pool: PagePool,
    began: float,
) -> Engine:
    num_pages, block_size = pool.num_pages, pool.block_size
    max_model_len = min(model.config.max_model_len, num_pages * block_size)
    if max_model_len < model.config.max_model_len:
        logger.warning("the KV cache limits the context to %d tokens", max_model_len)
    vocab_size, limits = model.config.vocab_size, config.scheduler
    eos_ids = frozenset(token for token in eos_token_ids(model.source) if token < vocab_size)
    scheduler = Scheduler(
        KVManager(groups, num_pages, block_size, config.cache.enable_prefix_caching),
        max_num_seqs=limits.max_num_seqs,
        token_budget=limits.chunked_prefill_size,
        max_model_len=max_model_len,
    )
    slots = Slots(limits.max_num_seqs, max_model_len, len(groups), block_size, model.device)
    attention = TorchAttention(groups, pool)
    worker = Worker(executable, attention, slots, vocab_size=vocab_size, eos_ids=eos_ids)
    seconds = time.monotonic() - began
    ready = Ready(
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        num_pages=num_pages,
        block_size=block_size,
        seconds=seconds,
        summary=f"{model.source.name} on {model.device} in {_name(model.dtype)}, "
        f"level {config.compile.level}, KV cache of {num_pages * block_size} tokens",
    )
    logger.info("engine ready in %.1f s", seconds)
    serial = limits.disable_overlap_schedule
    overlap = model.device.type != "cpu" if serial is None else not serial
    return Engine(scheduler, worker, ready=ready, eos_ids=eos_ids, overlap=overlap)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
