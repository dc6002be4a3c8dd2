"""Layers of settings, their sources, and what is said about flags that cannot be taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.cli.batch import COMMAND as BATCH
from tokenspeed.cli.settings import resolve
from tokenspeed.config import Config
from tokenspeed.options import ConfigError


def file_of(folder: Path, text: str) -> list[str]:
    path = folder / "serve.yaml"
    path.write_text(text)
    return ["--config", str(path)]


def test_nothing_said_is_the_default() -> None:
    resolved = resolve([], {})
    assert resolved.config == Config()
    assert not resolved.sources and not resolved.notes


def test_prompts_come_first_where_nobody_watches_an_answer_grow() -> None:
    words = ["-i", "in.jsonl", "-o", "out.jsonl"]
    resolved = resolve(words, {}, BATCH)
    assert resolved.config.scheduler.prefill_first is True
    assert "nobody watches" in resolved.sources["prefill_first"]
    resolved = resolve([*words, "--no-prefill-first"], {}, BATCH)
    assert resolved.config.scheduler.prefill_first is False
    assert resolved.sources["prefill_first"] == "--no-prefill-first"


def test_command_line_beats_file_beats_environment(tmp_path: Path) -> None:
    file = file_of(tmp_path, "port: 2\nmax-num-seqs: 20\nmax_model_len: 4k\n")
    environ = {"TOKENSPEED_PORT": "3", "TOKENSPEED_MAX_NUM_SEQS": "30", "TOKENSPEED_SEED": "7"}
    resolved = resolve(["--port", "1", *file], environ)
    config = resolved.config
    assert (config.server.port, config.scheduler.max_num_seqs) == (1, 20)
    assert (config.model.max_model_len, config.model.seed) == (4000, 7)
    assert resolved.sources["port"] == "--port"
    assert resolved.sources["max_num_seqs"].endswith("serve.yaml max-num-seqs")
    assert resolved.sources["seed"] == "environment TOKENSPEED_SEED"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["m"], "model", "m"),
        (["--model", "m"], "model", "m"),
        (["--model-path=m"], "model", "m"),
        (["--", "-m"], "model", "-m"),
        (["--context-length", "8"], "max_model_len", 8),
        (["--max_model_len", "8"], "max_model_len", 8),
        (["--mem-fraction-static", "0.5"], "gpu_memory_utilization", 0.5),
        (["--max-num-batched-tokens", "64"], "chunked_prefill_size", 64),
        (["--shutdown-timeout", "5"], "drain_timeout", 5.0),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--disable-radix-cache"], "enable_prefix_caching", False),
        (["--enable-prefix-caching=false"], "enable_prefix_caching", False),
        (["--disable-overlap-schedule"], "disable_overlap_schedule", True),
        (["--no-disable-overlap-schedule"], "disable_overlap_schedule", False),
        (["--page-size", "8"], "block_size", 8),
        (["--seed", "1", "--seed", "2"], "seed", 2),
        (["--served-model-name", "a", "b"], "served_model_name", ("a", "b")),
        (["--served-model-name", "a", "--served-model-name", "b"], "served_model_name", ("a", "b")),
        (["-O0"], "level", 0),
        (["-O", "0"], "level", 0),
        (["-O=0"], "level", 0),
        (["--enforce-eager"], "level", 0),
        (["--enforce-eager", "--disable-cuda-graph"], "level", 0),
        (["--disable-cuda-graph"], "level", None),
        (["--optimization-level", "0"], "level", 0),
        (["-O1"], "level", 1),
        (["--enable-torch-compile"], "level", 1),
        ([], "level", None),
        (["--compile-ranges", "8", "64"], "compile_ranges", (8, 64)),
        (["--compile-ranges-endpoints", "0"], "compile_ranges", (0,)),
        (["--disable-pass", "silu_mul", "rope"], "disable_pass", ("silu_mul", "rope")),
        (["--generation-config", "vllm"], "generation_config", "none"),
        (["--attention-backend", "trtllm_mla"], "attention_backend", "auto"),
    ],
)
def test_command_lines(words: list[str], name: str, value: object) -> None:
    config = resolve(words, {}).config
    assert {**vars(config.model), **vars(config.cache), **vars(config.scheduler)}.get(
        name, {**vars(config.compile), **vars(config.server)}.get(name)
    ) == value


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-modle-len", "3"], "unknown flag --max-modle-len; did you mean --max-model-len?"),
        (["--frobnicate"], "unknown flag --frobnicate"),
        (["a", "b"], "takes one model, got also 'b'"),
        (["a", "--model", "b"], "the model is given twice"),
        (["-O4"], "-O must be one of: 0, 1, 2, 3; got 4"),
        (["--port"], "--port needs a value"),
        (
            ["--compile-ranges", "64", "8"],
            "compile_ranges must ascend, and 0 stand alone, got 64 8",
        ),
        (["--compile-ranges", "0", "8"], "compile_ranges must ascend, and 0 stand alone"),
        (["--compile-ranges", *"12345678"], "compile_ranges must be at most 7 token counts, got 8"),
        (["--compile-ranges", "-1"], "--compile-ranges must be from 0 to 1048576, got -1"),
        (["--port", "--seed", "1"], "--port needs a value"),
        (["--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        (["--seed", "-1"], "--seed must be from 0"),
        (["--tp", "2"], "--tp 2 is not supported: one device is used now; 1 is accepted"),
        (
            ["--speculative-config.method", "mtp"],
            "--speculative-config.method mtp is not supported",
        ),
        (["--trust-remote-code=1"], "--trust-remote-code takes no value"),
        (["--no-enable-chunked-prefill"], "always prefilled in chunks"),
        (["--config", "/does/not/exist"], "--config /does/not/exist: No such file"),
    ],
)
def test_refusals(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(words, {})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--attention-backend", "fa3"],
        ["--decode-attention-backend", "triton"],
        ["--sampling-backend", "flashinfer"],
        ["--grammar-backend", "xgrammar"],
    ],
    ids=" ".join,
)
def test_another_backend_than_asked_for_is_refused_by_option(words: list[str]) -> None:
    assert len(resolve(words, {}).notes) == 1
    for place in ([*words, "--strict-backends"], ["--strict-backends", *words]):
        with pytest.raises(ConfigError, match=r"--strict-backends allows no other") as caught:
            resolve(place, {})
        assert str(caught.value).startswith(words[0])
    assert resolve([*words, "--strict-backends", "--no-strict-backends"], {}).notes
    with pytest.raises(ConfigError, match=r"--strict-backends allows no other"):
        resolve(words, {"TOKENSPEED_STRICT_BACKENDS": "1"})


@pytest.mark.parametrize(
    "words",
    [["--attention-backend", "TRITON_ATTN"], ["--all2all-backend", "none"], ["--tp=1"], []],
    ids=" ".join,
)
def test_the_same_by_another_name_is_no_other_backend(words: list[str]) -> None:
    assert resolve([*words, "--strict-backends"], {}).config.compile.strict_backends


def test_granted_flags_are_said_aloud() -> None:
    resolved = resolve(["--trust-remote-code", "--tp=1", "--attention-backend", "fa3"], {})
    assert len(resolved.notes) == 3
    assert "none is run" in resolved.notes[0]


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"TOKENSPEED_PORT": "tcp://10.0.0.1:8000"}, "TOKENSPEED_PORT must be a whole number"),
        ({"TOKENSPEED_PORT": "tcp://10.0.0.1:8000"}, "enableServiceLinks"),
        ({"TOKENSPEED_API_KEY": ""}, "TOKENSPEED_API_KEY is empty"),
        ({"TOKENSPEED_API_KEYS": "k"}, "is not an option; did you mean TOKENSPEED_API_KEY?"),
        ({"TOKENSPEED_MAX_MODEL_LENGTH": ""}, "TOKENSPEED_MAX_MODEL_LENGTH is not an option"),
        ({"TOKENSPEED_CONFIG": "a.yaml"}, "TOKENSPEED_CONFIG is not an option"),
        ({"TOKENSPEED_TP": "2"}, "TOKENSPEED_TP 2 is not supported"),
        ({"TOKENSPEED_TRUST_REMOTE_CODE": "maybe"}, "must be true or false"),
    ],
)
def test_bad_environment(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([], environ)
    assert says in str(caught.value)


def test_environment_is_read_as_flags_are() -> None:
    environ = {
        "TOKENSPEED_CONTEXT_LENGTH": "4k",
        "TOKENSPEED_NO_ENABLE_PREFIX_CACHING": "1",
        "TOKENSPEED_TRUST_REMOTE_CODE": "true",
        "TOKENSPEED_STARTUP_TIMING": "1",
        "TOKENSPEED_CACHE_DIR": "/c",
        "TOKENSPEED_MAX_RUNNING_REQUESTS": "1",
        "OTHER": "x",
    }
    resolved = resolve([], environ)
    assert resolved.config.model.max_model_len == 4000
    assert not resolved.config.cache.enable_prefix_caching
    assert resolved.config.compile.cache_dir == "/c"
    assert resolved.config.scheduler.max_num_seqs == 1
    assert resolved.sources["max_model_len"] == "environment TOKENSPEED_CONTEXT_LENGTH"
    assert len(resolved.notes) == 1 and "none is run" in resolved.notes[0]


def test_service_links_of_a_pod_are_nobody_s_options() -> None:
    environ = {
        "TOKENSPEED_SERVICE_HOST": "10.0.0.1",
        "TOKENSPEED_SERVICE_PORT_HTTP": "80",
        "TOKENSPEED_ROUTER_PORT": "tcp://10.0.0.2:80",
        "TOKENSPEED_ROUTER_PORT_80_TCP_ADDR": "10.0.0.2",
    }
    assert resolve([], environ).config == Config()


def test_environment_lists_and_blanks() -> None:
    environ = {"TOKENSPEED_API_KEY": "one two", "TOKENSPEED_DTYPE": " "}
    config = resolve([], environ).config
    assert config.server.api_key == ("one", "two")
    assert config.model.dtype == "auto"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_modle_len: 1", "max_modle_len is not an option; did you mean max-model-len?"),
        ("port: 70000", "port must be from 0 to 65535"),
        ("tensor-parallel-size: 2", "tensor-parallel-size 2 is not supported"),
        ("trust_remote_code: sure", "trust_remote_code must be true or false"),
        ("print-config: true", "can stand on the command line only"),
        ("- port", "must hold a mapping"),
        ("a: [", "is not valid YAML, line 1, column 5: expected the node content, but found"),
        (
            "port: 1\n  host: x",
            "is not valid YAML, line 2, column 7: mapping values are not allowed",
        ),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("a: &a [*a]", "is not an option"),
        ("#" * (1 << 21), "is larger than 1048576 bytes"),
        (
            "port: 1\nhost: x\nport: 1",
            "is not valid YAML, line 3, column 1: 'port' stands here once",
        ),
        ("port: 1\n'port': 2", "line 2, column 1: 'port' stands here once more"),
        ("compilation-config: {mode: 3, mode: 0}", "column 31: 'mode' stands here once more"),
        ("max-model-len: 4\nmax_model_len: 4", "max_model_len is max-model-len once more: give"),
        ("enforce_eager: true\nenforce-eager: true", "enforce-eager is enforce_eager once more"),
        ("quantization: 2024-01-01", "quantization 2024-01-01 is not supported"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(file_of(tmp_path, text), {})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_other_engines(tmp_path: Path) -> None:
    text = (
        "model: m\ntensor-parallel-size: 1\ntrust-remote-code: true\nenforce_eager: true\n"
        "disable-radix-cache: false\nserved-model-name: [a, b]\n"
        "compilation-config: {mode: 3}\nattention-backend: fa3\n"
    )
    resolved = resolve(file_of(tmp_path, text), {})
    assert resolved.config.server.served_model_name == ("a", "b")
    assert resolved.config.cache.enable_prefix_caching
    assert len(resolved.notes) == 4


@pytest.mark.parametrize(
    ("one", "other", "option"),
    [
        (("max_num_seqs", "4"), ("max_running_requests", "8"), "max_num_seqs"),
        (("page_size", "16"), ("prefix_granularity", "32"), "block_size"),
        (("enforce_eager", "true"), ("optimization_level", "1"), "level"),
        (("cuda_graph_bs", "4"), ("cudagraph_capture_sizes", "8"), "cudagraph_capture_sizes"),
        (("disable_log_stats", "true"), ("log_stats_interval", "3"), "log_stats_interval"),
    ],
)
def test_what_has_no_order_may_not_contradict_itself(
    tmp_path: Path, one: tuple[str, str], other: tuple[str, str], option: str
) -> None:
    for (first, said), (second, said_too) in ((one, other), (other, one)):
        with pytest.raises(ConfigError) as caught:
            resolve(file_of(tmp_path, f"{first}: {said}\n{second}: {said_too}\n"), {})
        assert str(caught.value).endswith(f"{second} contradicts {first}: give {option} alone")
    names = {f"TOKENSPEED_{name.upper()}": said for name, said in (one, other)}
    first, second = sorted(names)
    with pytest.raises(ConfigError) as caught:
        resolve([], names)
    assert str(caught.value) == f"{second} contradicts {first}: give {option} alone"


def test_two_names_may_say_the_same(tmp_path: Path) -> None:
    text = "cuda_graph_bs: [4, 8]\ncudagraph-capture-sizes: [4, 8]\n"
    text += "max_seq_len: 4k\nmax_model_len: 4000\n"
    environ = {"TOKENSPEED_CUDA_GRAPH_BS": "2", "TOKENSPEED_CUDAGRAPH_CAPTURE_SIZES": "2"}
    config = resolve(file_of(tmp_path, text), environ).config
    assert config.compile.cudagraph_capture_sizes == (4, 8)
    assert config.model.max_model_len == 4000
    assert resolve([], environ).config.compile.cudagraph_capture_sizes == (2,)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert resolve(file_of(tmp_path, "# nothing\n"), {}).config == Config()


WORDS = st.sampled_from(
    [
        "-O0",
        "-O",
        "--",
        "--port",
        "--port=1",
        "--tp",
        "1",
        "-1",
        "--no-x",
        "m",
        "--api-key",
        "=",
        "-",
    ]
)


@given(st.lists(WORDS | st.text(max_size=8), max_size=6))
def test_any_command_line_is_taken_or_refused_in_one_line(words: list[str]) -> None:
    if any(word.startswith("--config") for word in words):
        return
    try:
        resolve(words, {})
    except ConfigError as error:
        assert str(error)
