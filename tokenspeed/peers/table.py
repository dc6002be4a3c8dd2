"""One table of the flags that users of vLLM, SGLang and earlier TokenSpeed type, with its answers.

Options of our own are not listed: they work. `--help=compat` prints the whole, and no row is ever
ignored in silence: what is granted otherwise is said at start, what is refused ends the start.
"""

from __future__ import annotations

from tokenspeed.peers.answers import (
    Table,
    Takes,
    always,
    either,
    granted,
    never,
    only,
    refused,
    same,
)

_ONE, _MANY = Takes.ONE, Takes.MANY
_ONE_DEVICE = "one device is used now; 1 is accepted"
_NO_SPECULATION = "no speculative decoding yet; leave it out"
_PREFILL_GRAPHS = (
    "steps of up to 1024 tokens are CUDA graphs, longer ones graphs piece by piece as far as that "
    "pays; --disable-prefill-graph: none"
)
_PADDED = "a step takes the next larger graph, and graphs are kept"
_NO_OFFLOAD = "no KV offload; leave it out, a preempted request is recomputed"
_NO_LORA = "no adapters yet; merge the adapter into the weights"
_ROOM = "the KV pool is all that is kept on the device: --max-total-tokens or a memory share"

TABLE: Table = {
    "Model": (
        same("--tokenizer-path", "--tokenizer", takes=_ONE),
        same("--random-seed", "--seed", takes=_ONE),
        same("--max-seq-len --max-seqlen", "--max-model-len", takes=_ONE),
        either("--trust-remote-code", "no repository code is needed and none is run"),
        only("--tokenizer-mode", "auto fast hf", "the model's own fast tokenizer is used; auto"),
        only("--config-format", "auto hf", "config.json and GGUF metadata are recognised; auto"),
        only("--model-impl", "auto", "each family has one implementation; auto"),
        only("--runner --task", "auto generate", "models generate text; auto or generate"),
        only("--quantization -q", "auto none null", "no quantised compute yet; leave it out"),
        refused("--quantization-param-path", "no quantised compute yet; leave it out"),
        refused("--hf-overrides --json-model-override-args", "edit a copy of config.json instead"),
        refused("--hf-token", "set HF_TOKEN in the environment: command lines are public"),
        refused("--code-revision --hf-config-path", "no repository code is run; use --revision"),
        refused("--tokenizer-revision", "model and tokenizer have one revision: --revision"),
        refused(
            "--override-generation-config --preferred-sampling-params",
            "edit the folder's generation_config.json, or set it in each request",
        ),
        granted(
            "--model-loader-extra-config", "weights are read tensor by tensor; nothing to tune"
        ),
        granted(
            "--weight-loader-prefetch-num-threads",
            "weights are read tensor by tensor, not prefetched",
        ),
        either("--disable-weight-loader-prefetch-checkpoints", "weights are not prefetched"),
        either("--use-tqdm-on-load", "progress is told at /ready, and the time on the log"),
        never("--delete-ckpt-after-loading", "no file of yours is deleted"),
        always("--language-model-only", "models are text only"),
        refused(
            "--limit-mm-per-prompt --mm-processor-kwargs", "models are text only; leave it out"
        ),
        never("--enable-multimodal --is-embedding", "models generate text from text; leave it out"),
        never("--enable-lora --enable-lora-bias", _NO_LORA),
        refused("--lora-modules --lora-paths", _NO_LORA, takes=_MANY),
        refused("--max-loras --max-lora-rank --max-cpu-loras --max-loras-per-batch", _NO_LORA),
    ),
    "Memory": (
        same("--page-size --prefix-granularity", "--block-size", takes=_ONE),
        same("--disable-radix-cache --disable-prefix-caching", "--no-enable-prefix-caching"),
        only("--kv-cache-quant-method", "none", "one scale a layer; none, or --kv-cache-dtype fp8"),
        never("--calculate-kv-scales", "no scales are measured; leave it out, they are 1"),
        only("--prefix-caching-hash-algo", "sha256 builtin", "prefixes are compared, not hashed"),
        refused("--num-gpu-blocks-override", "say it in tokens: --max-total-tokens"),
        refused("--kv-cache-memory-bytes", "say it in tokens: --max-total-tokens"),
        granted("--swap-space", "no swap: a preempted request is recomputed"),
        only("--cpu-offload-gb", "0 0.0", "weights stay on the device; 0"),
        always("--disable-kvstore", "there is no KV offload"),
        refused("--kvstore-ratio --kvstore-size --kvstore-io-backend", _NO_OFFLOAD),
        refused("--kvstore-mem-layout --kvstore-storage-backend", _NO_OFFLOAD),
        refused("--kv-transfer-config --kv-events-config", _NO_OFFLOAD),
        never("--enable-hierarchical-cache", _NO_OFFLOAD),
        never("--enable-sleep-mode --enable-memory-saver", _ROOM),
        refused("--mamba-ssm-dtype --mamba-cache-dtype", "no recurrent models yet; leave it out"),
    ),
    "Scheduling": (
        same("--max-running-requests", "--max-num-seqs", takes=_ONE),
        granted("--max-prefill-tokens", "--chunked-prefill-size is a step's one token budget"),
        same("--no-async-scheduling", "--disable-overlap-schedule"),
        same("--async-scheduling", "--no-disable-overlap-schedule"),
        always("--enable-chunked-prefill", "long prompts are always prefilled in chunks"),
        same("--enable-mixed-batch --enable-mixed-chunk", "--no-prefill-first"),
        only(
            "--schedule-policy",
            "fcfs",
            "first come, first served; fcfs, or --scheduling-policy priority",
        ),
        refused(
            "--enable-priority-scheduling --schedule-low-priority-values-first",
            "--scheduling-policy priority serves lower priorities first",
            takes=Takes.NOTHING,
        ),
        only("--num-scheduler-steps", "1", "steps are scheduled one by one; 1"),
        granted("--schedule-conservativeness", "admission is by free pages, preemption recomputes"),
        granted("--max-num-partial-prefills", "the step's token budget is the limit"),
        granted("--max-long-partial-prefills", "the step's token budget is the limit"),
        granted("--long-prefill-token-threshold", "the step's token budget is the limit"),
    ),
    "Parallelism": (
        only("--tensor-parallel-size --tp --tp-size -tp --attn-tp-size", "1", _ONE_DEVICE),
        only("--dense-tp-size --moe-tp-size --attn-cp-size", "1", _ONE_DEVICE),
        only("--pipeline-parallel-size --pp-size -pp", "1", _ONE_DEVICE),
        only("--data-parallel-size --dp --dp-size -dp", "1", _ONE_DEVICE),
        only("--expert-parallel-size --ep-size --ep", "1", _ONE_DEVICE),
        only("--world-size --nprocs-per-node --nnodes", "1", _ONE_DEVICE),
        only("--node-rank", "0", "one device is used now; 0 is accepted"),
        only(
            "--data-parallel-size-local -dpl --decode-context-parallel-size -dcp", "1", _ONE_DEVICE
        ),
        refused(
            "--data-parallel-address --data-parallel-rpc-port --data-parallel-rank", _ONE_DEVICE
        ),
        refused("--data-parallel-backend --data-parallel-start-rank", _ONE_DEVICE),
        never("--data-parallel-hybrid-lb --data-parallel-external-lb", _ONE_DEVICE),
        refused(
            "--nccl-port --dist-timeout --eplb-config --master-addr --master-port", _ONE_DEVICE
        ),
        only("--moe-a2a-backend", "none", "no expert parallelism yet; none"),
        only("--base-gpu-id", "0", "the first visible device is used: CUDA_VISIBLE_DEVICES; 0"),
        only("--all2all-backend", "none", "no expert parallelism yet; none"),
        only("--distributed-executor-backend", "mp uni", "one engine process; leave it out"),
        only("--load-balance-method", "round_robin", "one engine; leave it out"),
        refused("--dist-init-addr --deepep-mode", _ONE_DEVICE),
        refused("--low-latency-max-num-tokens-per-gpu --comm-fusion-max-num-tokens", _ONE_DEVICE),
        never("--enable-expert-parallel --enable-ep-moe --enable-dp-attention", _ONE_DEVICE),
        never("--enable-eplb --enable-allreduce-fusion --enable-dbo", _ONE_DEVICE),
        always("--disable-custom-all-reduce", "one device: nothing is reduced across"),
        either(
            "--force-deterministic-rsag --disable-sampling-tp-sync", "one device: no collectives"
        ),
        only("--disaggregation-mode", "null none", "prefill and decode run in one engine; null"),
        refused("--disaggregation-transfer-backend", "prefill and decode run in one engine"),
        refused("--mm-encoder-tp-mode", "models are text only; leave it out"),
    ),
    "Kernels, graphs and compilation": (
        same("--enforce-eager", "-O0"),
        same("--optimization-level", "-O", takes=_ONE),
        same("--enable-torch-compile", "-O1"),
        either("--disable-cuda-graph-padding --enable-cudagraph-gc", _PADDED),
        granted("--prefill-graph-max-tokens", _PREFILL_GRAPHS),
        granted("--prefill-graph-capture-sizes", _PREFILL_GRAPHS, takes=_MANY),
        granted(
            "--compilation-config -cc",
            "levels decide: -O0 runs eagerly, -O1 compiles, -O2 records CUDA graphs, -O3 tunes",
        ),
        always(
            "--disable-autotune",
            "GPU kernels are tuned at -O3 only, linear kernels of a CPU in seconds: "
            "--weight-layout plain",
        ),
        either("--disable-pdl", "launches overlap where the GPU can, and results are the same"),
        either("--enable-nvtx", "a profiler shows kernels by their names"),
        always("--disable-tf32", "float32 is computed in float32"),
        granted("--sampling-backend", "one sampler, with all parameters, on the device"),
        granted(
            "--moe-backend --moe-runner-backend --draft-moe-backend",
            "no expert layers yet: nothing to choose",
        ),
        refused(
            "--attention-config -ac --kernel-config",
            "one attention backend serves all steps: --attention-backend",
        ),
        granted("--prefill-attention-backend --decode-attention-backend", "as --attention-backend"),
        only("--numerics", "auto", "see docs/determinism.md for what holds; auto"),
        never("--enable-deterministic-inference", "see docs/determinism.md for what holds"),
    ),
    "Speculation": (
        refused(
            "--speculative-config -sc --speculative-algorithm --speculative-algo", _NO_SPECULATION
        ),
        refused("--speculative-draft-model-path --speculative-num-steps", _NO_SPECULATION),
        refused("--speculative-num-draft-tokens --speculative-eagle-topk", _NO_SPECULATION),
        refused("--drafter-attention-backend --eagle3-layers-to-capture", _NO_SPECULATION),
    ),
    "Output": (
        refused("--reasoning-parser-plugin --tool-parser-plugin", "no code of yours is run"),
        always("--enable-auto-tool-choice", "calls are looked for wherever a request has tools"),
        refused("--tool-server", "tools are run by the client; leave it out"),
        granted("--grammar-backend --guided-decoding-backend", "llguidance compiles all grammars"),
        refused(
            "--structured-outputs-config",
            "--disable-any-whitespace and --grammar-compile-timeout-secs are options here",
        ),
        granted("--grammar-compile-max-retries", "a grammar that fails once fails always"),
        either("--disable-capturable-grammar", "masks are no part of CUDA graphs"),
        always("--enable-output-logprobs", "log-probabilities are given when a request asks"),
        always("--enable-cache-report", "usage always names cached_tokens"),
        always("--enable-prompt-tokens-details", "usage always names cached_tokens"),
        only("--stream-interval", "1", "every token is sent as soon as it is there; 1"),
        either("--stream-output", "streamed pieces are always deltas"),
        only("--max-logprobs", "20", "at most 20 likeliest tokens; 20"),
        only("--logprobs-mode", "raw_logprobs", "of the model's own distribution; raw_logprobs"),
        refused("--logits-processors", "no code of yours is run", takes=_MANY),
        never("--enable-custom-logit-processor", "no code of yours is run"),
        only(
            "--chat-template-content-format", "auto", "the template shows which form it reads; auto"
        ),
        never("--trust-request-chat-template", "the template is chosen at start: --chat-template"),
    ),
    "Server": (
        refused("--root-path", "paths begin at /; let the reverse proxy take its prefix off"),
        either("--enable-ssl-refresh", "SIGHUP reads the certificate again"),
        refused("--ssl-ciphers", "TLS 1.2 and later, with the ciphers that HTTP/2 allows"),
        refused("--middleware", "no code of yours is run", takes=_MANY),
        refused("--uds --fd", "listens on --host and --port"),
        refused("--control-port --grpc-port", "one port serves everything: --port"),
        same("--api-server-count -asc", "--api-processes", takes=_ONE),
        same(
            "--tokenizer-worker-num",
            "--api-processes",
            takes=_ONE,
            why="each HTTP process tokenizes for its requests",
        ),
        never("--allow-auto-truncate", "a prompt that is too long is refused, not cut"),
        never("--headless", "the engine and its HTTP face start together; leave it out"),
        granted("--gateway-startup-timeout", "the HTTP face answers at once; /ready says when"),
        either("--skip-server-warmup --disable-fastapi-docs", "nothing of the kind to skip"),
        granted("--warmups", "model and graphs are compiled before the server is ready"),
        refused("--weight-version --weight-cache-mode", "weights are loaded once a start"),
        same("--disable-log-requests", "--no-enable-log-requests"),
        same("--log-requests", "--enable-log-requests"),
        only("--log-requests-level", "0", "one line a request, without its text; 0"),
        granted("--max-log-len", "requests are logged without their text"),
        granted("--uvicorn-log-level --log-level-http", "one log: --log-level"),
        always(
            "--disable-uvicorn-access-log", "requests are logged with --enable-log-requests only"
        ),
        same("--disable-log-stats", "--log-stats-interval 0"),
        always("--enable-metrics", "/metrics is always there"),
        only("--metrics-reporters", "prometheus", "/metrics speaks Prometheus; prometheus"),
        granted("--decode-log-interval", "load is logged by time: --log-stats-interval"),
        refused("--otlp-traces-endpoint", "no traces; see /metrics"),
        always("--enable-nan-detection", "a poisoned row ends its own request only"),
    ),
}

OBJECTS = frozenset(
    {
        *("--hf-overrides", "--json-model-override-args", "--override-generation-config"),
        *("--preferred-sampling-params", "--model-loader-extra-config", "--limit-mm-per-prompt"),
        *("--mm-processor-kwargs", "--kv-transfer-config", "--kv-events-config", "--eplb-config"),
        *("--compilation-config", "-cc", "--attention-config", "-ac", "--kernel-config"),
        *("--speculative-config", "-sc", "--structured-outputs-config"),
    }
)
"""Flags of the table whose value is a JSON object, so that `--flag.key value` is one too."""

PEER_VALUES: dict[tuple[str, str], tuple[str, str]] = {
    **{
        ("attention_backend", name): ("auto", "the best backend here computes the same attention")
        for name in (
            *("mha", "mla", "fa3", "fa4", "trtllm", "trtllm_mla"),
            *("trtllm_mha", "flashmla", "tokenspeed_mla", "hybrid_linear_attn"),
            *("FLASH_ATTN", "TORCH_SDPA"),
        )
    },
    ("attention_backend", "TRITON_ATTN"): ("triton", "the same kernels by our name"),
    ("attention_backend", "FLASHINFER"): ("flashinfer", "the same kernels by our name"),
    ("kv_cache_dtype", "bf16"): ("bfloat16", "the same dtype by our name"),
    ("generation_config", "vllm"): ("none", "the model's generation_config.json is not read"),
    **{
        ("reasoning_parser", name): (ours, "the same format by our name")
        for name, ours in (
            *(("none", "passthrough"), ("deepseek-r1", "deepseek_r1"), ("gpt-oss", "harmony")),
            *(("deepseek-v3", "deepseek_v31"), ("deepseek_v3", "deepseek_v31")),
            *(("openai_gptoss", "harmony"), ("qwen3-thinking", "qwen3_thinking")),
            *(("kimi_k2", "kimi_k25"), ("minimax_m2", "minimax"), ("minimax-m2", "minimax")),
            *(("glm47", "glm45"), ("seed-oss", "seed_oss")),
        )
    },
    **{
        ("tool_call_parser", name): (ours, "the same format by our name")
        for name, ours in (
            *(("none", "passthrough"), ("qwen25", "hermes"), ("kimi_k2", "kimik2")),
            *(("qwen3_coder", "qwen_coder"), ("qwen3_xml", "qwen_coder")),
            *(("deepseekv3", "deepseek31"), ("deepseekv31", "deepseek31")),
            *(("deepseek_v3", "deepseek31"), ("deepseek_v31", "deepseek31")),
            *(("llama3_json", "llama3"), ("openai", "harmony"), ("gpt-oss", "harmony")),
            *(("llama4_json", "llama3"), ("llama4_pythonic", "pythonic"), ("glm47", "glm45")),
            *(("glm", "glm45"), ("minimax-m2", "minimax_m2"), ("seed-oss", "seed_oss")),
        )
    },
    ("log_level", "warn"): ("warning", "the same level"),
    ("log_level", "critical"): ("error", "the severest level here"),
}
"""(option, another engine's value) -> (our value, what that means)."""
