"""Every flag of the recipes that people bring gets one of three answers, and none is ignored."""

from __future__ import annotations

import shlex

import pytest

from tokenspeed.cli import pages
from tokenspeed.cli.flags import Flags, known_flags
from tokenspeed.cli.scan import scan
from tokenspeed.cli.settings import COMMON, SERVE, resolve
from tokenspeed.config import OPTIONS
from tokenspeed.options import ConfigError
from tokenspeed.peers.answers import Known, Same, Takes
from tokenspeed.peers.table import OBJECTS, PEER_VALUES, TABLE

FLAGS = Flags(SERVE)
KNOWN = known_flags()
ROWS = [row for rows in TABLE.values() for row in rows]

RECIPES = {
    "gpt-oss-20b": """openai/gpt-oss-20b --host 0.0.0.0 --port 8000 --tensor-parallel-size 1
        --max-model-len 131072 --gpu-memory-utilization 0.88 --max-num-seqs 256
        --chunked-prefill-size 8192 --reasoning-parser base --attention-backend trtllm
        --moe-backend auto --sampling-backend flashinfer --enable-log-request-stats""",
    "gpt-oss-120b": """openai/gpt-oss-120b --tensor-parallel-size 4 --kv-cache-dtype fp8
        --max-num-seqs 256 --reasoning-parser base --trust-remote-code""",
    "Kimi-K2.5": """nvidia/Kimi-K2.5-NVFP4 --served-model-name kimi --tokenizer-mode auto
        --trust-remote-code --tp 4 --enable-expert-parallel --max-model-len 262144
        --kv-cache-dtype fp8 --quantization nvfp4 --chunked-prefill-size 8192 --max-num-seqs 256
        --attention-backend trtllm_mla --moe-backend flashinfer_trtllm
        --reasoning-parser kimi_k25 --tool-call-parser kimik2 --max-total-tokens 1M""",
    "Qwen3-30B-A3B": """--model Qwen/Qwen3-30B-A3B --attn-tp-size 2 --dense-tp-size 2
        --moe-tp-size 1 --ep-size 2 --max-model-len 40960 --moe-backend flashinfer_cutlass
        --reasoning-parser qwen3 --enable-prefix-caching --dtype bfloat16""",
    "Qwen3.8": """Qwen/Qwen3.8-2.4T-A95B --tensor-parallel-size 8 --data-parallel-size 2
        --expert-parallel-size 16 --all2all-backend deepep --deepep-mode low_latency
        --low-latency-max-num-tokens-per-gpu 256 --nnodes 2 --node-rank 0 --world-size 16
        --nprocs-per-node 8 --dist-init-addr 10.0.0.1:23456 --quantization fp8
        --kv-cache-dtype fp8_e4m3 --attention-backend trtllm --max-num-seqs 128
        --speculative-config '{"method":"mtp","num_speculative_tokens":3}'
        --reasoning-parser qwen3_thinking --tool-call-parser qwen_coder""",
    "drafts": """m --speculative-algorithm EAGLE3 --speculative-draft-model-path d
        --speculative-num-steps 3 --speculative-num-draft-tokens 4 --speculative-eagle-topk 1
        --draft-moe-backend triton --drafter-attention-backend fa3 --eagle3-layers-to-capture 1""",
    "debugging": """m --enforce-eager --no-enable-prefix-caching --disable-overlap-schedule
        --load-format dummy --skip-tokenizer-init --seed 1 --log-level debug --revision main
        --download-dir /models --tokenizer t --disable-autotune --disable-pdl --disable-tf32
        --skip-server-warmup --enable-nan-detection --decode-log-interval 40""",
    "TokenSpeed, rest": """m --hf-overrides {} --language-model-only --prefix-granularity 64
        --enable-mixed-batch --disable-kvstore --kvstore-ratio 2.0 --kvstore-size 10
        --max-cudagraph-capture-size 160 --cudagraph-capture-sizes 1 2 4 --disable-prefill-graph
        --prefill-graph-max-tokens 2048 --stream-interval 1 --enable-cache-report
        --enable-output-logprobs --weight-version v1 --grammar-backend xgrammar
        --grammar-compile-timeout-secs 30 --enable-metrics --metrics-reporters prometheus
        --kv-events-config {} --numerics rl-bitwise --weight-cache-mode daemon
        --disaggregation-mode null --load-balance-method round_robin --headless
        --engine-startup-timeout 1800 --gateway-startup-timeout 60 --drain-timeout 30
        --control-port 8001 --api-key k --chat-template t.jinja --warmups x""",
    "vLLM": """meta-llama/Llama-3.1-8B-Instruct -tp 1 -pp 1 -dp 1 -q fp8 -O3 --block-size 16
        --swap-space 4 --cpu-offload-gb 0 --max-num-batched-tokens 8192 --enable-chunked-prefill
        --async-scheduling --scheduling-policy fcfs --kv-cache-dtype auto --api-key a b
        --enable-auto-tool-choice --tool-call-parser hermes --disable-log-stats
        --disable-log-requests --uvicorn-log-level warning --allowed-origins '["*"]'
        --root-path /v1 --ssl-keyfile k --ssl-certfile c --generation-config vllm
        --override-generation-config '{"temperature":0.6}' --shutdown-timeout 30
        --compilation-config.mode 3 --compilation-config {"level":3} --enable-lora
        --lora-modules a=b c=d --chat-template-content-format auto --gpu_memory_utilization 0.9
        --served-model-name a b --api-server-count 1 --distributed-executor-backend mp
        --mm-processor-kwargs {} --limit-mm-per-prompt {"image":2} --enforce-eager
        --num-gpu-blocks-override 100 --max-logprobs 20 --otlp-traces-endpoint x --fd 3""",
    "SGLang": """--model-path m --tp 1 --dp 1 --context-length 32k --mem-fraction-static 0.8
        --chunked-prefill-size 4096 --max-running-requests 64 --max-prefill-tokens 4096
        --page-size 16 --disable-radix-cache --disable-cuda-graph --cuda-graph-max-bs 64
        --cuda-graph-bs 1 2 4 --enable-torch-compile --attention-backend flashinfer
        --prefill-attention-backend fa3 --random-seed 1 --tokenizer-path t --log-requests
        --log-level-http error --enable-metrics --schedule-policy fcfs --enable-dp-attention
        --schedule-conservativeness 0.3 --tool-call-parser qwen25 --is-embedding
        --json-model-override-args {} --enable-deterministic-inference --lora-paths a=b
        --max-loras-per-batch 4 --disable-custom-all-reduce --enable-hierarchical-cache""",
}


def answers(line: str) -> dict[str, str]:
    """What becomes of each flag of a command line, taken by itself."""
    found, words = scan(shlex.split(line), FLAGS.takes)
    assert len(words) <= 1
    result = {}
    for given in found:
        one = f"{given.flag}={given.words[0]}" if given.words else given.flag
        try:
            notes = resolve([one] if len(given.words) < 2 else [given.flag, *given.words], {}).notes
        except ConfigError as error:
            assert "unknown flag" not in str(error)
            result[given.typed] = "refused"
        else:
            result[given.typed] = "granted" if notes else "works"
    return result


@pytest.mark.parametrize("name", RECIPES)
def test_every_flag_of_a_recipe_is_answered(name: str) -> None:
    assert set(answers(RECIPES[name]).values()) <= {"works", "granted", "refused"}


def test_a_recipe_in_detail() -> None:
    assert answers(RECIPES["gpt-oss-20b"]) == {
        "--host": "works",
        "--port": "works",
        "--tensor-parallel-size": "granted",
        "--max-model-len": "works",
        "--gpu-memory-utilization": "works",
        "--max-num-seqs": "works",
        "--chunked-prefill-size": "works",
        "--reasoning-parser": "works",
        "--attention-backend": "granted",
        "--moe-backend": "granted",
        "--sampling-backend": "granted",
        "--enable-log-request-stats": "works",
    }
    debugging = answers(RECIPES["debugging"])
    assert "refused" not in debugging.values()


def test_no_flag_has_two_answers() -> None:
    names = [name for row in ROWS for name in row.names]
    assert len(names) == len(set(names))
    assert not set(names) & FLAGS.options.keys()
    assert not KNOWN.keys() & FLAGS.options.keys()
    assert not KNOWN.keys() & COMMON.keys()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_same_stands_for_something_that_works(row: Known) -> None:
    for answer in (row.answer, row.off):
        if isinstance(answer, Same):
            words = [*answer.words, *(["2"] if row.takes is Takes.ONE else [])]
            assert not resolve(words, {}).notes
        elif answer is not None:
            assert answer.why


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_values_that_a_row_names_are_granted(row: Known) -> None:
    for value in row.values:
        assert resolve([row.names[0], value], {}).notes


def test_values_of_other_engines_become_ours() -> None:
    for (name, theirs), (ours, _) in PEER_VALUES.items():
        assert theirs not in OPTIONS[name].choices
        assert ours in OPTIONS[name].choices


def test_help_prints_the_whole_table() -> None:
    text = pages.compat()
    for row in ROWS:
        assert ", ".join(row.names) in text
    explained = pages.explain("tp", list(OPTIONS.values()))
    assert "granted with 1, else refused: one device" in explained


@pytest.mark.parametrize("flag", sorted(FLAGS.takes))
def test_a_dotted_flag_is_one_key_of_an_object_or_unknown(flag: str) -> None:
    """`--port.foo 9000` is a slip, not `--port 9000`."""
    for words in ([f"{flag}.foo", "9000"], [f"{flag}.foo=9000"]):
        if flag in OBJECTS:
            (found,), _ = scan(words, FLAGS.takes)
            assert (found.flag, found.words) == (flag, ("9000",))
        else:
            with pytest.raises(ConfigError, match="unknown flag"):
                scan(words, FLAGS.takes)


def test_flags_of_objects_are_known() -> None:
    assert OBJECTS <= FLAGS.known.keys()
