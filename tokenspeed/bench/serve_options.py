"""What `bench serve` is told: where to, what with, how fast, what to print. Names are those that
users of vLLM's and SGLang's serving benchmarks type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenspeed.options import ConfigError, Settings, option

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BACKENDS = {
    "openai": COMPLETIONS,
    "openai-chat": CHAT,
    "tokenspeed": COMPLETIONS,
    "vllm": COMPLETIONS,
    "sglang-oai": COMPLETIONS,
    "sglang-oai-chat": CHAT,
}
"""Name -> the endpoint that it stands for. All speak the same protocol."""

DATASETS = ("random", "shared-prefix", "multi-turn", "custom", "sharegpt")
METRICS = ("ttft", "tpot", "itl", "e2el")
MAX_LEN = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TargetOptions(Settings):
    """The server."""

    backend: str = option("openai", "endpoint by name; all are OpenAI's", choices=tuple(BACKENDS))
    base_url: str | None = option(None, "address, without /v1 (default: from --host and --port)")
    host: str = option("127.0.0.1", "its host")
    port: int = option(8000, "its port", low=1, high=65535)
    endpoint: str | None = option(None, "path of the requests (default: by --backend)")
    model: str | None = option(None, "model to ask for (default: the first of /v1/models)")
    tokenizer: str | None = option(
        None, "folder, GGUF file or hub id: prompts become text of the given lengths"
    )
    ready_check_timeout_sec: float = option(
        600.0, "seconds to wait until the server answers", low=0.0, high=86400.0
    )
    request_timeout: float = option(
        3600.0, "seconds until a request counts as failed", low=0.001, high=86400.0
    )
    temperature: float = option(0.0, "of sampling", low=0.0, high=100.0)
    ignore_eos: bool = option(False, "generate the given lengths; fewer tokens are a failure")
    return_token_ids: bool = option(
        False, "ask for ids in each chunk, count them, and hold usage to it (TokenSpeed, vLLM)"
    )
    extra_body: str | None = option(None, "JSON object of more request fields")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(Settings):
    """What is asked."""

    dataset_name: str = option("random", "see above", choices=DATASETS)
    dataset_path: str | None = option(None, "file of custom or sharegpt: JSON lines or a JSON list")
    num_prompts: int = option(1000, "requests, or conversations of multi-turn", low=1, high=10**7)
    seed: int = option(0, "of lengths, tokens, choice and arrivals", low=0, high=(1 << 63) - 1)
    vocab_size: int = option(
        32000, "random token ids are below this", low=2, high=1 << 24, suffixes=True
    )
    random_input_len: int = option(
        1024,
        "prompt tokens (of a conversation: of its first message)",
        aliases=("--random-input", "--input-len"),
        low=1,
        high=MAX_LEN,
    )
    random_output_len: int = option(
        128,
        "tokens to generate, of every dataset that does not say itself",
        aliases=(
            *("--random-output", "--output-len", "--custom-output-len", "--gsp-output-len"),
            *("--sharegpt-output-len", "--prefix-repetition-output-len"),
        ),
        low=1,
        high=MAX_LEN,
    )
    random_range_ratio: float = option(
        0.0,
        "R: lengths are uniform within length * (1 - R) and length * (1 + R)",
        low=0.0,
        high=1.0,
    )
    random_prefix_len: int = option(0, "tokens that all prompts begin with", low=0, high=MAX_LEN)
    shared_prefix_groups: int = option(
        10,
        "prefixes; requests take them in turn",
        aliases=("--prefix-repetition-num-prefixes", "--gsp-num-groups"),
        low=1,
        high=10**6,
    )
    shared_prefix_len: int = option(
        1024,
        "tokens of each prefix",
        aliases=("--prefix-repetition-prefix-len", "--gsp-system-prompt-len"),
        low=1,
        high=MAX_LEN,
    )
    shared_prefix_own_len: int = option(
        128,
        "tokens of a prompt after its prefix",
        aliases=("--prefix-repetition-suffix-len", "--gsp-question-len"),
        low=1,
        high=MAX_LEN,
    )
    num_turns: int = option(4, "of each conversation", low=1, high=1000)
    turn_input_len: int = option(128, "tokens of each later message", low=1, high=MAX_LEN)
    think_time: float = option(
        1.0, "mean seconds before each later message (exponential)", low=0.0, high=86400.0
    )


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Settings):
    """How fast it is asked."""

    request_rate: float = option(
        math.inf,
        "requests (conversations) started a second; inf: all at once",
        low=1e-6,
        high=math.inf,
    )
    burstiness: float = option(
        1.0,
        "1: a Poisson process; below: burstier; above: evener (gamma); inf: constant gaps",
        low=1e-3,
        high=math.inf,
    )
    max_concurrency: int | None = option(None, "requests open at once", low=1, high=10**6)
    num_warmups: int = option(
        1,
        "requests before the clock starts, not counted",
        aliases=("--warmup-requests",),
        low=0,
        high=10**5,
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Settings):
    """What is printed and kept."""

    percentile_metrics: str = option("ttft,tpot,itl,e2el", "which of the four are printed")
    metric_percentiles: str = option("90,95,99", "percentiles of each")
    goodput: tuple[str, ...] = option(
        (), "limits in ms, such as ttft:200 tpot:50 e2el:5000: requests within all are counted"
    )
    output_json: str | None = option(
        None, "write the result here", aliases=("--output-file", "--result-filename")
    )
    save_result: bool = option(False, "as --output-json, in a file named by what was measured")
    result_dir: str = option(".", "folder of that file")
    save_detailed: bool = option(False, "with each request's record", aliases=("--output-details",))
    metadata: tuple[str, ...] = option((), "key=value, kept with the result")
    disable_tqdm: bool = option(
        False, "tell nothing of the progress: no bar on a terminal, no lines elsewhere"
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Everything. Raises ConfigError for what does not go together."""

    target: TargetOptions = TargetOptions()
    dataset: DatasetOptions = DatasetOptions()
    load: LoadOptions = LoadOptions()
    output: OutputOptions = OutputOptions()

    def __post_init__(self) -> None:
        is_file = self.dataset.dataset_name in ("custom", "sharegpt")
        if is_file != (self.dataset.dataset_path is not None):
            raise ConfigError(
                f"dataset {self.dataset.dataset_name} {'needs' if is_file else 'takes no'} "
                "--dataset-path"
            )

    @property
    def endpoint(self) -> str:
        return self.target.endpoint or BACKENDS[self.target.backend]

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")


SERVE_GROUPS: dict[str, type[Settings]] = {
    "target": TargetOptions,
    "dataset": DatasetOptions,
    "load": LoadOptions,
    "output": OutputOptions,
}
"""The fields of `ServeOptions`."""
