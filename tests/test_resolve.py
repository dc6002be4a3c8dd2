"""Settling what settings leave open: tables of facts and of what becomes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.config import OPTIONS, Config, make_config
from tokenspeed.draft import Resolution
from tokenspeed.machine_facts import FlashInferFacts, MachineFacts
from tokenspeed.options import ConfigError
from tokenspeed.resolve import (
    RANGES,
    TOKEN_BUDGETS,
    ModelFacts,
    graph_sizes,
    levels,
    resolve,
)

LIBRARY = FlashInferFacts(is_installed=True, built=("bfloat16", "float16"), built_fp8=("bfloat16",))
LAPTOP = MachineFacts(has_cuda=False, cache_root="/home/me/.cache/tokenspeed")
HOPPER = MachineFacts(
    has_cuda=True, capability=(9, 0), has_kernels=True, flashinfer=LIBRARY, cache_root="/cache"
)
QWEN = ModelFacts(stored="safetensors", dtype="bfloat16", max_model_len=4096)
NARROW = "it serves head size 128, not 64, and would attend no layer"
SMALL = ModelFacts(stored="gguf", dtype=None, max_model_len=2048, unserved={"flashinfer": NARROW})


def value(resolution: Resolution, name: str) -> Any:
    groups = vars(resolution.config).values()
    return next(getattr(group, name) for group in groups if hasattr(group, name))


@pytest.mark.parametrize(
    ("options", "machine", "model", "name", "settled", "reason"),
    [
        ({}, LAPTOP, SMALL, "device", "cpu", "torch sees no CUDA device"),
        ({}, HOPPER, QWEN, "device", "cuda", "torch sees a CUDA device"),
        ({"device": "cpu"}, HOPPER, QWEN, "device", "cpu", None),
        ({}, LAPTOP, QWEN, "dtype", "float32", "on a CPU: "),
        ({}, HOPPER, QWEN, "dtype", "bfloat16", "the checkpoint's"),
        ({}, HOPPER, SMALL, "dtype", "bfloat16", "the checkpoint names none"),
        ({"dtype": "half"}, LAPTOP, SMALL, "dtype", "float16", None),
        ({"dtype": "float"}, HOPPER, QWEN, "dtype", "float32", None),
        ({}, LAPTOP, SMALL, "load_format", "gguf", "what the model's files are"),
        ({"load_format": "dummy"}, LAPTOP, SMALL, "load_format", "dummy", None),
        ({}, LAPTOP, SMALL, "max_model_len", 2048, "the model's limit"),
        ({}, LAPTOP, SMALL, "attention_backend", "torch", "the backend of CPUs"),
        ({}, HOPPER, QWEN, "attention_backend", "flashinfer", "head size 128 on sm_90: "),
        ({}, HOPPER, SMALL, "attention_backend", "triton", "not flashinfer: it serves head size"),
        ({}, LAPTOP, QWEN, "kv_cache_dtype", "float32", "as the model is computed"),
        ({}, HOPPER, QWEN, "kv_cache_dtype", "bfloat16", "as the model is computed"),
        ({"kv_cache_dtype": "fp8"}, LAPTOP, SMALL, "kv_cache_dtype", "fp8_e4m3", None),
        ({"kv_cache_dtype": "fp8_e5m2"}, HOPPER, QWEN, "kv_cache_dtype", "fp8_e5m2", None),
        (
            *({"kv_cache_dtype": "fp8"}, HOPPER, QWEN, "attention_backend", "flashinfer"),
            "head size 128 on sm_90: FlashAttention-3 for prompts, FlashAttention-2 for those with",
        ),
        (
            *({"kv_cache_dtype": "fp8_e5m2"}, HOPPER, QWEN, "attention_backend", "triton"),
            "not flashinfer: it reads a cache of bfloat16 or fp8_e4m3, not of fp8_e5m2",
        ),
        (
            *({"kv_cache_dtype": "fp8", "dtype": "half"}, HOPPER, QWEN, "attention_backend"),
            *("triton", "not flashinfer: its kernel takes minutes to compile"),
        ),
        ({}, LAPTOP, SMALL, "level", None, "open: 1 if the compile cache has the program, else 0"),
        ({}, HOPPER, QWEN, "level", 2, "on CUDA"),
        ({"level": 3}, HOPPER, QWEN, "level", 3, None),
        ({"attention_backend": "torch"}, HOPPER, QWEN, "level", 1, "torch's attention cannot be"),
        ({"disable_cuda_graph": True}, HOPPER, QWEN, "level", 1, "--disable-cuda-graph"),
        ({"disable_cuda_graph": True, "level": 0}, HOPPER, QWEN, "level", 0, None),
        ({"disable_cuda_graph": True}, LAPTOP, SMALL, "level", None, "open: 1 if the compile"),
        ({}, LAPTOP, SMALL, "compile_ranges", (0,), "on a CPU: one range"),
        ({}, HOPPER, QWEN, "compile_ranges", (32,), "on CUDA: few tokens have kernels"),
        ({"compile_ranges": (8, 64)}, HOPPER, QWEN, "compile_ranges", (8, 64), None),
        ({}, LAPTOP, SMALL, "chunked_prefill_size", 512, "on a CPU: "),
        ({}, HOPPER, QWEN, "chunked_prefill_size", 8192, "on CUDA: "),
        ({}, LAPTOP, SMALL, "disable_overlap_schedule", True, "on a CPU: "),
        ({}, HOPPER, QWEN, "disable_overlap_schedule", False, "on CUDA: "),
        ({}, HOPPER, QWEN, "prefill_first", False, "answers go on while"),
        ({"prefill_first": True}, HOPPER, QWEN, "prefill_first", True, None),
        ({}, LAPTOP, SMALL, "max_total_tokens", None, "open: measured at start"),
        ({}, LAPTOP, SMALL, "cache_dir", "/home/me/.cache/tokenspeed", "below the user's cache"),
        ({}, HOPPER, QWEN, "max_cudagraph_capture_size", 64, "--max-num-seqs 64"),
        ({"max_num_seqs": 4096}, HOPPER, QWEN, "max_cudagraph_capture_size", 512, "larger ones"),
        ({}, HOPPER, QWEN, "cudagraph_capture_sizes", graph_sizes(64), "worth a graph up to 64"),
        ({"level": 1}, HOPPER, QWEN, "cudagraph_capture_sizes", (), "open: no CUDA graphs"),
        (
            {"cudagraph_capture_sizes": (8, 2, 128)},
            *(HOPPER, QWEN, "cudagraph_capture_sizes", (2, 8), None),
        ),
    ],
)
def test_what_is_open_is_settled_and_why_is_said(
    options: dict[str, Any],
    machine: MachineFacts,
    model: ModelFacts,
    name: str,
    settled: object,
    reason: str | None,
) -> None:
    resolution = resolve(make_config(options), machine, model)
    assert value(resolution, name) == settled
    assert resolution.is_given(name) == (reason is None)
    assert resolution.reasons.get(name, "").startswith(reason or "")


@pytest.mark.parametrize(
    ("options", "machine", "model", "says"),
    [
        ({"device": "cuda"}, LAPTOP, SMALL, "--device cuda: torch sees no CUDA device here"),
        (
            {"level": 2, "disable_cuda_graph": True},
            *(HOPPER, QWEN, "-O2 records CUDA graphs, but --disable-cuda-graph; use -O1"),
        ),
        ({"level": 3}, LAPTOP, SMALL, "-O3 measures CUDA kernels, and there is no CUDA device"),
        ({"level": 2}, LAPTOP, SMALL, "-O2 replays CUDA graphs, and there is no CUDA device here"),
        (
            {"level": 2, "attention_backend": "torch"},
            *(HOPPER, QWEN, "-O2 cannot record what --attention-backend torch computes"),
        ),
        (
            {"cudagraph_capture_sizes": (65, 128)},
            *(HOPPER, QWEN, "--cudagraph-capture-sizes [65, 128]: steps have 64 rows at most"),
        ),
        (
            {"kv_cache_dtype": "fp8"},
            dataclasses.replace(HOPPER, capability=(8, 6)),
            *(QWEN, "--kv-cache-dtype fp8_e4m3: Triton has it from compute capability 8.9 on, and"),
        ),
        ({"attention_backend": "triton"}, LAPTOP, SMALL, "its kernels need CUDA; use torch"),
        ({"attention_backend": "flashinfer"}, LAPTOP, SMALL, "it needs CUDA; use torch"),
        ({}, HOPPER, dataclasses.replace(QWEN, dtype="int3"), "dtype 'int3' is not supported"),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_line(
    options: dict[str, Any], machine: MachineFacts, model: ModelFacts, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(make_config(options), machine, model)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lacking", "model", "options", "reason"),
    [
        ({}, QWEN, {"dtype": "float32"}, "it computes in bfloat16 or float16, not in float32"),
        ({}, SMALL, {}, NARROW),
        ({"capability": (8, 6)}, QWEN, {}, "it needs a GPU of compute capability 9.0, not 8.6"),
        (
            {"flashinfer": dataclasses.replace(LIBRARY, is_installed=False)},
            *(QWEN, {}, "flashinfer-python is not installed"),
        ),
    ],
    ids=["dtype", "head", "gpu", "package"],
)
def test_what_flashinfer_lacks_is_said(
    lacking: dict[str, Any], model: ModelFacts, options: dict[str, Any], reason: str
) -> None:
    machine = dataclasses.replace(HOPPER, **lacking)
    resolution = resolve(make_config(options), machine, model)
    assert resolution.reasons["attention_backend"] == f"not flashinfer: {reason}"
    with pytest.raises(ConfigError) as caught:
        resolve(make_config({"attention_backend": "flashinfer"} | options), machine, model)
    assert str(caught.value) == f"--attention-backend flashinfer: {reason}; use triton"


def test_layers_choose_among_backends_and_the_reasons_are_said() -> None:
    """The first that serves all layers; where none does, the start ends with what each lacks."""
    sinks, wide = "it has no attention sinks", "its heads have 256 elements at most, not 512"
    unserved = {"flashinfer": wide, "triton": wide}
    settled = resolve(Config(), HOPPER, dataclasses.replace(QWEN, unserved=unserved))
    assert settled.config.compile.attention_backend == "torch"
    why = f"not flashinfer: {wide}; not triton: {wide}"
    assert settled.reasons["attention_backend"] == why
    with pytest.raises(ConfigError) as caught:
        options = make_config({"attention_backend": "triton"})
        resolve(options, HOPPER, dataclasses.replace(QWEN, unserved=unserved))
    assert str(caught.value) == f"--attention-backend triton: {wide}; use torch"
    none = dataclasses.replace(QWEN, unserved=unserved | {"torch": sinks})
    for machine, told in ((HOPPER, f"{why}; not torch: {sinks}"), (LAPTOP, f"not torch: {sinks}")):
        with pytest.raises(ConfigError) as caught:
            resolve(Config(), machine, none)
        assert str(caught.value) == f"no attention backend serves this model here: {told}"
    with pytest.raises(ConfigError) as caught:
        resolve(make_config({"attention_backend": "torch"}), LAPTOP, none)
    want = f"--attention-backend torch: {sinks}; nor does any other serve this model here"
    assert str(caught.value) == want


@pytest.mark.parametrize(
    ("library", "lack"),
    [
        (dataclasses.replace(LIBRARY, is_installed=False), "flashinfer-python is not installed"),
        (FlashInferFacts(is_installed=True), "its kernel takes minutes to compile"),
    ],
    ids=["not installed", "not built"],
)
def test_a_backend_that_is_missing_ends_a_strict_start(library: FlashInferFacts, lack: str) -> None:
    """What does not serve the model at all is not missed, nor what was not asked for."""
    machine = dataclasses.replace(HOPPER, flashinfer=library)
    strict: dict[str, Any] = {"strict_backends": True}
    with pytest.raises(ConfigError) as caught:
        resolve(make_config(strict), machine, QWEN)
    expected = f"--strict-backends: flashinfer would serve this model, but {lack}"
    assert str(caught.value).startswith(expected)
    for options, model in (({}, SMALL), ({"attention_backend": "triton"}, QWEN)):
        settled = resolve(make_config(strict | options), machine, model).config
        assert settled.compile.attention_backend == "triton"
    older = dataclasses.replace(machine, capability=(8, 9))
    for machine, name in ((older, "triton"), (LAPTOP, "torch"), (HOPPER, "flashinfer")):
        settled = resolve(make_config(strict), machine, QWEN).config
        assert settled.compile.attention_backend == name


def test_a_kernel_that_takes_minutes_is_built_only_when_asked_for() -> None:
    machine = dataclasses.replace(HOPPER, flashinfer=FlashInferFacts(is_installed=True))
    resolution = resolve(Config(), machine, QWEN)
    assert resolution.config.compile.attention_backend == "triton"
    assert "takes minutes to compile" in resolution.reasons["attention_backend"]
    asked = resolve(make_config({"attention_backend": "flashinfer"}), machine, QWEN)
    assert asked.config.compile.attention_backend == "flashinfer"


@pytest.mark.parametrize("machine", [LAPTOP, HOPPER], ids=["cpu", "cuda"])
def test_without_a_model_the_rest_is_settled(machine: MachineFacts) -> None:
    resolution = resolve(Config(), machine, None)
    config, device = resolution.config, resolution.config.model.device
    assert config.scheduler.chunked_prefill_size == TOKEN_BUDGETS[device]
    assert config.compile.compile_ranges == RANGES[device]
    assert config.model.max_model_len is None
    assert resolution.reasons["max_model_len"] == "open: the model says"
    is_open = config.compile.attention_backend == "auto"
    assert is_open == (device == "cuda"), "a CPU has one backend, whatever the model"


def test_what_has_no_effect_is_noted() -> None:
    options = {"level": 1, "max_cudagraph_capture_size": 8, "disable_prefill_graph": True}
    (note,) = resolve(make_config(options), HOPPER, QWEN).notes
    assert note == (
        "no CUDA graphs are recorded here: --max-cudagraph-capture-size, --disable-prefill-graph "
        "has no effect"
    )
    (note,) = resolve(make_config({"cudagraph_capture_sizes": (2, 128)}), HOPPER, QWEN).notes
    assert note == "no CUDA graph of [128]: steps have 64 rows at most"


@pytest.mark.parametrize(
    ("options", "machine", "note"),
    [
        (
            {"level": 0, "strict_passes": True, "disable_pass": ("silu_mul",)},
            *(LAPTOP, "nothing is compiled at -O0: --strict-passes, --disable-pass has no effect"),
        ),
        (
            {"disable_cuda_graph": True},
            *(LAPTOP, "no CUDA graphs are recorded here: --disable-cuda-graph has no effect"),
        ),
        (
            {"weight_layout": "plain"},
            *(HOPPER, "it is about weights on a CPU: --weight-layout has no effect"),
        ),
        (
            {"gpu_memory_utilization": 0.5, "max_total_tokens": 4096},
            *(HOPPER, "--max-total-tokens says how much: --gpu-memory-utilization has no effect"),
        ),
        (
            {"revision": "main", "download_dir": "/models"},
            *(LAPTOP, "the model is on this machine: --revision, --download-dir has no effect"),
        ),
    ],
)
def test_each_option_without_effect_is_noted(
    options: dict[str, Any], machine: MachineFacts, note: str
) -> None:
    here = dataclasses.replace(SMALL if machine is LAPTOP else QWEN, is_local=True)
    assert resolve(make_config(options), machine, here).notes == [note]
    assert resolve(Config(), machine, here).notes == []


def test_what_has_its_effect_is_not_noted() -> None:
    options = {"level": 1, "strict_passes": True, "disable_pass": ("silu_mul",)}
    options |= {"gpu_memory_utilization": 0.5, "revision": "main", "download_dir": "/models"}
    assert resolve(make_config(options | {"weight_layout": "plain"}), LAPTOP, SMALL).notes == []
    assert resolve(make_config({"max_total_tokens": 4096}), LAPTOP, SMALL).notes == []


def test_levels_say_why_they_cannot_be_had() -> None:
    assert [problem is None for _, _, problem in levels("cpu", "torch")] == [True] * 2 + [False] * 2
    assert [problem for _, _, problem in levels("cuda", "flashinfer")] == [None] * 4
    assert all("use triton" in str(problem) for _, _, problem in levels("cuda", "torch")[2:])


CHOICES = st.fixed_dictionaries(
    {},
    optional={
        name: st.sampled_from(OPTIONS[name].choices)
        for name in ("device", "dtype", "load_format", "attention_backend", "level")
    }
    | {
        "max_num_seqs": st.integers(1, 4096),
        "max_total_tokens": st.integers(2, 1 << 16),
        "max_model_len": st.integers(2, 1 << 16),
        "block_size": st.integers(1, 1024),
        "max_cudagraph_capture_size": st.integers(1, 4096),
        "cudagraph_capture_sizes": st.sets(st.integers(1, 4096), max_size=8).map(tuple),
        "compile_ranges": st.sets(st.integers(1, 1 << 20), max_size=7).map(sorted).map(tuple),
        "disable_overlap_schedule": st.booleans(),
        "disable_cuda_graph": st.booleans(),
    },
)


@given(CHOICES, st.sampled_from([LAPTOP, HOPPER]), st.sampled_from([QWEN, SMALL]))
def test_a_settled_config_settles_to_itself(
    options: dict[str, Any], machine: MachineFacts, model: ModelFacts
) -> None:
    """And nothing that was given is taken away, but for what the limits leave of it."""
    try:
        first = resolve(make_config(options), machine, model)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    again = resolve(first.config, machine, model)
    assert again.config == first.config
    assert set(again.reasons) == {
        name for name, reason in first.reasons.items() if reason.startswith("open: ")
    }
    for name, given_value in options.items():
        if name not in ("dtype", "cudagraph_capture_sizes", *first.reasons):
            assert value(first, name) == given_value
