"""The settings: small frozen dataclasses, one a concern.

Values left open (None, "auto") are settled once, by `resolve`, from the model and the machine;
measured facts (page count) are results and stay out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenspeed.attention_backends import ATTENTION_BACKENDS
from tokenspeed.options import ConfigError, Option, Settings, option, options_of, suggest
from tokenspeed.request import POLICIES
from tokenspeed.server_config import ServerConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """Which model, from where, in which precision."""

    model: str = option(
        "smollm2", "local folder, GGUF file, hub id, or 'smollm2'", aliases=("--model-path",)
    )
    tokenizer: str | None = option(
        None, "folder or hub id of the tokenizer, if not the model's own"
    )
    revision: str | None = option(None, "branch, tag or commit on the hub")
    download_dir: str | None = option(None, "where hub downloads are kept")
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
        low=2,
        high=1 << 24,
        suffixes=True,
    )
    skip_tokenizer_init: bool = option(False, "serve token-id prompts only; no tokenizer is loaded")
    chat_template: str | None = option(
        None,
        "file with a Jinja chat template, used instead of the model's; hermes: one of ours with a "
        "place for tools, for models that speak ChatML (smollm2 gets it by itself where a request "
        "has tools)",
    )
    plain_messages: bool = option(
        False,
        "special tokens that are typed in messages and tools are plain text: only the chat "
        "template writes them (default: they are special tokens there too)",
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
class CacheConfig(Settings):
    """The paged KV cache."""

    block_size: int = option(16, "tokens a page", low=1, high=1024)
    max_total_tokens: int | None = option(
        None,
        "KV pool size in tokens (default: from the memory share)",
        low=2,
        high=1 << 40,
        suffixes=True,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of memory: on a GPU for everything, on a CPU of free RAM for KV (4 GiB at most)",
        aliases=("--mem-fraction-static",),
        low=0.01,
        high=1.0,
    )
    kv_cache_dtype: str = option(
        "auto",
        "keys and values in the cache; auto: as computed; fp8 (fp8_e4m3): in a byte each, rounded",
        choices=("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prompt beginnings")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Settings):
    """What one step may hold."""

    max_num_seqs: int = option(64, "requests running at once", low=1, high=4096)
    chunked_prefill_size: int | None = option(
        None,
        "token budget of a step: a longer prompt is computed in chunks, between which others get "
        "their tokens (default: 512 on a CPU, else 8192)",
        aliases=("--max-num-batched-tokens",),
        low=1,
        high=1 << 20,
        suffixes=True,
    )
    disable_overlap_schedule: bool | None = option(
        None,
        "commit each step before the next is scheduled (default on a CPU)",
    )
    prefill_first: bool | None = option(
        None,
        "prompts take a step's token budget before running requests do: the most tokens per second "
        "in all, but while prompts wait, answers stand still (default: off; on in LLM, tokenspeed "
        "batch and bench, where nobody watches an answer grow)",
    )
    scheduling_policy: str = option(
        "fcfs",
        "fcfs: requests are served in the order in which they come, and one with a priority is "
        "refused; priority: lower priorities first, for which higher ones that run give up slots "
        "and pages, and start over",
        choices=POLICIES,
    )


COMPILE_TIME = "half a minute on two idle cores, up to two minutes on busy or slow ones"
"""What compiling a model on a CPU takes; documents and logs say it in these words."""

LEVELS = {
    0: "pieces run as they were captured: compiles nothing, and is the oracle of the others",
    1: f"passes and Inductor: compiled once, into the cache ({COMPILE_TIME}); from then on a "
    "second a start",
    2: "as 1, and small steps replayed as CUDA graphs: some seconds of every start, and no launch "
    "cost; needs a CUDA device",
    3: "as 2, with linear kernels measured on this GPU where -O2 goes by a table of another's: "
    "half a minute once, into the cache",
}
"""What each optimisation level does and costs."""


MAX_RANGES = 8
"""Token ranges: each costs a compile of every piece, and a comparison a call."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig(Settings):
    """How far the model is compiled."""

    level: int | None = option(
        None,
        "optimisation level; "
        + "; ".join(f"{level}: {what}" for level, what in LEVELS.items())
        + " (default: 2; on a CPU 1 if the cache has it, else 0)",
        choices=tuple(LEVELS),
        aliases=("-O",),
    )
    cache_dir: str | None = option(
        None, "where compiled pieces are kept (default: tokenspeed in the user's cache folder)"
    )
    require_cache: bool = option(
        False, "fail where the cache lacks what is needed, instead of compiling or running eagerly"
    )
    disable_pass: tuple[str, ...] = option((), "pass(es) to leave out, by name")
    strict_passes: bool = option(
        False,
        "fail where a pass fails or matches less than it should, instead of going on; implies a "
        "compile where the cache lacks it",
    )
    dump_passes: str | None = option(
        None,
        "folder for the graphs before and after each pass, as text; implies a compile, for this "
        "start only",
    )
    compile_ranges: tuple[int, ...] = option(
        (),
        "token counts at which a range ends: pieces are compiled once for each range, and 32 512 "
        "makes three; 0: one range (default: 32; on a CPU 0)",
        aliases=("--compile-ranges-endpoints",),
        low=0,
        high=1 << 20,
    )
    attention_backend: str = option(
        "auto",
        "attention kernels; auto: flashinfer or else triton on a GPU, torch on a CPU",
        choices=("auto", *ATTENTION_BACKENDS),
    )
    strict_backends: bool = option(
        False,
        "refuse to start with other kernels than those that were asked for or are the best here: "
        "by another engine's name for a backend, where FlashInfer would serve but is missing or "
        "fails, and where what has to be compiled does not compile",
    )
    cudagraph_capture_sizes: tuple[int, ...] = option(
        (),
        "batch sizes of decode steps that get a CUDA graph (default: some thirty up to the limit)",
        aliases=("--cuda-graph-bs",),
        low=1,
        high=4096,
    )
    max_cudagraph_capture_size: int | None = option(
        None,
        "largest batch size that gets a CUDA graph (default: --max-num-seqs, 512 at most)",
        aliases=("--cuda-graph-max-bs",),
        low=1,
        high=4096,
    )
    disable_cuda_graph: bool = option(
        False, "record no CUDA graphs: the level is 1 where it would be 2 unasked"
    )
    disable_prefill_graph: bool = option(
        False, "record CUDA graphs of decode steps alone, none of steps with prompt tokens"
    )
    jit_after_ready: str = option(
        "warn",
        "what a compile that holds up requests is: a warning, or an error; the requests of a step "
        "with such an error are run one by one, and those that still need a compile end",
        choices=("warn", "error"),
    )
    weight_layout: str = option(
        "auto",
        "weights on a CPU; auto: as is fastest here (GGUF blocks stay as stored, linear kernels go "
        "by a measured table); plain: matrices in the compute dtype, torch's kernels only",
        choices=("auto", "plain"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = self.compile_ranges
        if len(ends) > MAX_RANGES - 1:
            raise ConfigError(
                f"compile_ranges must be at most {MAX_RANGES - 1} token counts, got {len(ends)}: "
                "every piece is compiled for each range"
            )
        if list(ends) != sorted(set(ends)) or (0 in ends and len(ends) > 1):
            shown = " ".join(map(str, ends))
            raise ConfigError(f"compile_ranges must ascend, and 0 stand alone, got {shown}")


@dataclass(frozen=True, kw_only=True)
class OutputConfig(Settings):
    """What outputs are made of, and what form they may be asked for."""

    reasoning_parser: str = option(
        "auto",
        "how reasoning is told from the answer (--help=reasoning-parser lists the names); auto: by "
        "the chat template; gpt-oss is always harmony",
        choices=(
            *("auto", "base", "qwen3", "qwen3_thinking", "kimi", "kimi_k25", "kimi_thinking"),
            *("deepseek_r1", "deepseek_v31", "glm45", "step3", "minimax", "seed_oss", "mistral"),
            *("harmony", "passthrough"),
        ),
    )
    tool_call_parser: str = option(
        "auto",
        "how tool calls are told from the answer (--help=tool-call-parser lists the names); auto: "
        "by the chat template",
        choices=(
            *("auto", "hermes", "qwen", "qwen_coder", "seed_oss", "minimax_m2", "glm45", "kimik2"),
            *("deepseek31", "mistral", "mistral_args", "llama3", "pythonic", "json", "harmony"),
            "passthrough",
        ),
    )
    grammar_compile_timeout_secs: float = option(
        30.0, "seconds until a request's grammar counts as too large", low=0.1, high=3600.0
    )
    disable_any_whitespace: bool = option(
        False, "write structured JSON without white space, unless a request says otherwise"
    )


GROUPS: dict[str, type[Settings]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "compile": CompileConfig,
    "output": OutputConfig,
    "server": ServerConfig,
}
"""The fields of `Config`."""

OPTIONS: dict[str, Option] = {
    each.name: each for settings in GROUPS.values() for each in options_of(settings)
}
"""Every option by its name, which no two groups share."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a server or an `LLM` is started with."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    compile: CompileConfig = CompileConfig()
    output: OutputConfig = OutputConfig()
    server: ServerConfig = field(default_factory=ServerConfig)


def unwatched(config: Config) -> Config:
    """What is left open, as is best where nobody watches an answer grow."""
    if config.scheduler.prefill_first is not None:
        return config
    return replace(config, scheduler=replace(config.scheduler, prefill_first=True))


def make_config(values: Mapping[str, Any]) -> Config:
    """A Config from option names and values; what is not named keeps its default.

    Raises ConfigError for a name that is no option (with the nearest one) and for a bad value.
    """
    for name in values:
        if name not in OPTIONS:
            raise ConfigError(f"{name} is not an option{suggest(name, OPTIONS)}")
    groups: dict[str, Any] = {}
    for group, settings in GROUPS.items():
        names = {each.name for each in options_of(settings)}
        groups[group] = settings(**{name: values[name] for name in names & values.keys()})
    return Config(**groups)
