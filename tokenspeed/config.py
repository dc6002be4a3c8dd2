"""Settings: small frozen dataclasses, one a concern; the command line's flags are derived from them.

`option()` declares a field together with what the command line shows for it. Values left open
(None, "auto") are settled once, by `engine.build`, from the model and the device; measured facts
(page count) are results and stay out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field with its help text, other flag names, allowed values or bounds. Lists are
    given as tuples.
    """
    metadata = {
        "help": help,
        "aliases": aliases,
        "choices": choices,
        "low": low,
        "high": high,
        "secret": secret,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, from where, in which precision."""

    model: str = option(
        "smollm2", "local folder, GGUF file, hub id, or 'smollm2'", aliases=("--model-path",)
    )
    tokenizer: str | None = option(
        None, "folder or hub id of the tokenizer, if not the model's own"
    )
    revision: str | None = option(None, "branch, tag or commit on the hub")
    download_dir: str | None = option(None, "where hub downloads are kept")
    served_model_name: tuple[str, ...] = option(
        (), "name(s) shown by the API (default: the model's)"
    )
    load_format: str = option(
        "auto", "where weights come from", choices=("auto", "safetensors", "gguf", "dummy")
    )
    dtype: str = option(
        "auto",
        "weights and activations; auto: float32 on a CPU, else the checkpoint's",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    device: str = option("auto", "where to run", choices=("auto", "cpu", "cuda"))
    max_model_len: int | None = option(
        None,
        "longest prompt plus output in tokens (default: the model's limit)",
        aliases=("--context-length",),
        low=1,
        high=1 << 24,
    )
    skip_tokenizer_init: bool = option(False, "serve token-id prompts only; no tokenizer is loaded")
    chat_template: str | None = option(
        None, "file with a Jinja chat template, used instead of the model's"
    )
    generation_config: str = option(
        "auto",
        "defaults for sampling: auto (the model's generation_config.json) or none",
        choices=("auto", "none"),
    )
    seed: int = option(
        0,
        "seed of dummy weights and of requests without a seed of their own",
        low=0,
        high=(1 << 63) - 1,
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "tokens a page", low=1, high=1024)
    max_total_tokens: int | None = option(
        None, "KV pool size in tokens (default: from the memory share)", low=1, high=1 << 40
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of memory: on a GPU for weights and KV, on a CPU of the free RAM for KV",
        aliases=("--mem-fraction-static",),
        low=0.01,
        high=1.0,
    )
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prompt beginnings")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold."""

    max_num_seqs: int = option(64, "requests running at once", low=1, high=4096)
    chunked_prefill_size: int = option(
        2048, "token budget of a step", aliases=("--max-num-batched-tokens",), low=1, high=1 << 20
    )
    disable_overlap_schedule: bool | None = option(
        None,
        "commit each step before the next is scheduled (default on a CPU)",
    )
    max_queued_requests: int = option(
        4096, "waiting requests before new ones get 429", low=1, high=1 << 20
    )


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """How far the model is compiled."""

    level: int = option(
        0, "optimisation level: 0 runs the captured pieces eagerly", choices=(0,), aliases=("-O",)
    )
    attention_backend: str = option("auto", "attention kernels", choices=("auto", "torch"))


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP face."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on", low=0, high=65535)
    api_key: tuple[str, ...] = option(
        (), "key(s) that clients must send as Bearer token", secret=True
    )
    drain_timeout: float = option(
        30.0,
        "seconds that running requests get after SIGTERM",
        aliases=("--shutdown-timeout",),
        low=0.0,
        high=86400.0,
    )
    engine_startup_timeout: float = option(
        1800.0, "seconds until a start-up counts as failed", low=1.0, high=86400.0
    )
    max_request_bytes: int = option(32 << 20, "largest request body", low=1024, high=1 << 32)
    write_timeout: float = option(
        60.0, "seconds a stream may make no progress before it is cut", low=1.0, high=86400.0
    )
    strict_fields: bool = option(
        False, "refuse unknown request fields instead of ignoring them with a warning"
    )
    enable_log_requests: bool = option(False, "log one line a request")
    log_level: str = option(
        "info", "least severe messages shown", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a server or an `LLM` is started with."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    compile: CompileConfig = CompileConfig()
    server: ServerConfig = ServerConfig()
