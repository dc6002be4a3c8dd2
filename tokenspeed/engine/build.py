"""From settings to a running engine: source, family, program, weights, cache, scheduler, worker.

The one place where all rooms meet. Each phase is a span, a progress report and a line of the log.
"""

from __future__ import annotations

import time

from torch import nn

from tokenspeed.compile.runner import Executable
from tokenspeed.config import Config
from tokenspeed.engine.attention import PendingAttention
from tokenspeed.engine.block_weights import settle_layout
from tokenspeed.engine.device_kernels import keep_kernels, use_kept_kernels
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.grammars import Grammars
from tokenspeed.engine.messages import Ready
from tokenspeed.engine.model import ServedModel, resolve_served
from tokenspeed.engine.on_device import build_pool, build_worker
from tokenspeed.engine.program import Progress, obtain_program
from tokenspeed.engine.sampler import compile_kernels
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.kv.manager import KVManager
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import CacheGroup, LayerScales, cache_groups
from tokenspeed.loader import empty_model, load_weights
from tokenspeed.log import logger
from tokenspeed.spans import span
from tokenspeed.structured.host import GrammarHost, vocabulary_of
from tokenspeed.structured.orders import Vocabulary
from tokenspeed.structured.pool import GrammarPool
from tokenspeed.text.source import eos_token_ids
from tokenspeed.text.tokenizer import load_tokenizer

_PROGRESS_S = 0.2
_MIB = 1 << 20


def build_engine(config: Config, progress: Progress, *, defer_graphs: bool = False) -> Engine:
    """Build everything; ModelError or ConfigError (one line) for what the user can put right. With
    `defer_graphs` most CUDA graphs are left to `Engine.prepare`.
    """
    began = time.monotonic()
    with span("scheduler.init"):
        with span("model.config"):
            progress("config", config.model.model)
            use_kept_kernels(config)
            model = settle_layout(resolve_served(config), config)
            _log_model(model)
        settings = model.settings
        attention = PendingAttention(model)
        with obtain_program(model, config) as pending:
            module, scales = _load(model, progress)
            groups = cache_groups(model.family.cache_specs(model.config))
            is_loading = pending.is_loading  # meanwhile Triton's folder is the program's
            if not is_loading:  # while the program is compiled, if it has to be
                _compile_sampling(model)
            obtained = pending.result(progress)
            if is_loading:
                _compile_sampling(model)
            if obtained.linear is not None:
                are_real = settings.model.load_format != "dummy"
                obtained.linear.install(module.parameters(), are_real, progress)
        executable = Executable(obtained.program, module)
        with span("kv.build"):
            progress("kv", "")
            pool = build_pool(
                *(model, executable, attention, groups, scales),
                *(config.model.max_model_len, progress),
            )
        with span("executor.init"):
            return _join(
                *(model, executable, attention, groups, pool),
                *(obtained.level, began, progress),
                defer_graphs=defer_graphs,
            )


def _log_model(model: ServedModel) -> None:
    numbers = model.config
    logger.info(
        "model %s: %s, %d layers, %d tokens of context; %s, %s",
        *(model.source.name, model.family.model.__name__),
        *(numbers.num_layers, numbers.max_model_len, model.device, model.dtype_name),
    )
    for note in model.resolution.notes:
        logger.warning("%s", note)


def _compile_sampling(model: ServedModel) -> None:
    if model.device.type == "cuda":
        with span("kernels.warmup"):
            compile_kernels(model.config.vocab_size, model.dtype, model.device)


def _load(model: ServedModel, progress: Progress) -> tuple[nn.Module, LayerScales | None]:
    """The model with its weights, and the scales that it has for a cache of fp8."""
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
                load_format=model.settings.model.load_format,
                seed=model.settings.model.seed,
                progress=report,
            )
    logger.info("weights: %d MiB in %.1f s", loaded.bytes // _MIB, loaded.seconds)
    return module, loaded.kv_scales


def _join(
    model: ServedModel,
    executable: Executable,
    attention: PendingAttention,
    groups: list[CacheGroup],
    pool: PagePool,
    level: str,
    began: float,
    progress: Progress,
    *,
    defer_graphs: bool,
) -> Engine:
    num_pages, block_size, config = pool.num_pages, pool.block_size, model.settings
    max_model_len = _context_length(model.config.max_model_len, num_pages * block_size)
    vocab_size, limits = model.config.vocab_size, config.scheduler
    assert limits.chunked_prefill_size is not None, "settled by resolve"
    eos_ids = _eos_ids(model, vocab_size)
    scheduler = Scheduler(
        KVManager(groups, num_pages, block_size, config.cache.enable_prefix_caching),
        max_num_seqs=limits.max_num_seqs,
        token_budget=limits.chunked_prefill_size,
        max_model_len=max_model_len,
        prefill_first=bool(limits.prefill_first),
    )
    worker, graph_work = build_worker(
        *(model, executable, attention, groups, pool),
        max_model_len=max_model_len,
        eos_ids=eos_ids,
        progress=progress,
    )
    if graph_work is not None:
        if not defer_graphs:
            graph_work.record_rest(progress)
        level = f"{level}, {len(graph_work.graphs) + graph_work.num_later} CUDA graphs"
    keep_kernels()
    ready = _ready(model, pool, max_model_len, level, time.monotonic() - began)
    logger.info("engine ready in %.1f s", ready.seconds)
    return Engine(
        scheduler,
        worker,
        ready=ready,
        eos_ids=eos_ids,
        overlap=not limits.disable_overlap_schedule,
        forbid_jit=config.compile.jit_after_ready == "error",
        grammars=_grammars(model, config, vocab_size, eos_ids),
        spare_work=graph_work,
    )


def _context_length(of_model: int, room: int) -> int:
    if room < of_model:
        logger.warning(
            "the KV cache limits the context to %d tokens, of %d that the model has; "
            "--max-total-tokens or --gpu-memory-utilization gives it more",
            *(room, of_model),
        )
    return min(of_model, room)


def _ready(
    model: ServedModel, pool: PagePool, max_model_len: int, level: str, seconds: float
) -> Ready:
    kv_dtype = model.settings.cache.kv_cache_dtype
    return Ready(
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        num_pages=pool.num_pages,
        block_size=pool.block_size,
        kv_cache_dtype=kv_dtype,
        seconds=seconds,
        settings=model.settings,
        reasons=dict(model.resolution.reasons),
        summary=f"{model.source.name} on {model.device} in {model.dtype_name}, "
        f"{level}, KV cache of {pool.num_pages * pool.block_size} tokens"
        + (f" in {kv_dtype}" if kv_dtype != model.dtype_name else ""),
    )


def _eos_ids(model: ServedModel, vocab_size: int) -> frozenset[int]:
    eos_ids = frozenset(token for token in eos_token_ids(model.source) if token < vocab_size)
    if not eos_ids:
        logger.warning(
            "neither the config nor the tokenizer of %s names an end-of-sequence token: what is "
            "generated ends at max_tokens or at what a request asks to stop at",
            model.source.name,
        )
    return eos_ids


def _grammars(
    model: ServedModel, config: Config, vocab_size: int, eos_ids: frozenset[int]
) -> Grammars:
    """The vocabulary is loaded for the first request with a grammar, beside the engine's steps."""
    wanted = config.model

    def vocabulary() -> Vocabulary:
        tokenizer = None
        if not wanted.skip_tokenizer_init:
            tokenizer = load_tokenizer(model.source, wanted.tokenizer)
        return vocabulary_of(tokenizer, vocab_size, eos_ids)

    pool = GrammarPool(
        GrammarHost(vocabulary),
        deadline_s=config.output.grammar_compile_timeout_secs,
        any_whitespace=not config.output.disable_any_whitespace,
    )
    return Grammars(pool, vocab_size, pinned=model.device.type == "cuda")
