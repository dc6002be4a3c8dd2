"""The matrix of the key: each fact and what changes it, each setting and whether it is one.

From settings as users give them to the facts, so that nothing on the way is left out. A fact, an
option or a pass that is added later fails here until it has its row.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed.compile import installation, key
from tokenspeed.compile.facts import Facts, differences, digest_of, flat
from tokenspeed.compile.installation import PACKAGES, TorchBuild, torch_build
from tokenspeed.compile.key import facts_of
from tokenspeed.config import OPTIONS, make_config
from tokenspeed.engine import facts as engine_facts
from tokenspeed.engine import memory
from tokenspeed.engine.model import resolve_served
from tokenspeed.engine.program import target_of
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.models import MODELS
from tokenspeed.passes import PASS_NAMES

HF_CONFIG: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.5}

CONFIG_FACTS: dict[str, dict[str, Any]] = {
    "vocab_size": {"vocab_size": 61},
    "hidden_size": {"hidden_size": 64},
    "intermediate_size": {"intermediate_size": 64},
    "num_layers": {"num_hidden_layers": 7},
    "num_heads": {"num_attention_heads": 2},
    "num_kv_heads": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 16},
    "norm_eps": {"rms_norm_eps": 1e-6},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "rope.inv_freq": {"rope_theta": 20000.0},
    "rope.scale": {"rope_scaling": YARN},
}
"""Fact of a model -> what changes it in config.json."""

OPTION_FACTS: dict[str, tuple[Any, str]] = {
    "device": ("cuda", "compile.device"),
    "dtype": ("bfloat16", "compile.dtype"),
    "strict_passes": (True, "compile.strict_passes"),
    "compile_ranges": ((8, 64), " silu_mul"),
    "weight_layout": ("plain", " weight_layout"),
    **{f"disable_pass {name}": ((name,), f" {name}") for name in sorted(PASS_NAMES)},
}
"""Option -> a value, and a part of the fact's name that it changes."""

TORCH = torch_build() or TorchBuild("", "", None)

MACHINE_FACTS: dict[str, tuple[Any, str, Any]] = {
    "format": (key, "FORMAT", 999),
    "versions.torch": (installation, "torch_build", lambda: TORCH._replace(version="2.99")),
    "versions.cuda": (installation, "torch_build", lambda: TORCH._replace(cuda="13.9")),
    "versions.triton": (installation, "_version", lambda name: "9.9"),
    "versions.flashinfer-python": (installation, "_version", lambda name: "9.9"),
    "versions.python": (sys, "version_info", SimpleNamespace(major=3, minor=99)),
    "versions.platform": (platform, "machine", lambda: "riscv64"),
    "machine.capability": (torch.backends.cpu, "get_cpu_capability", lambda: "AVX1024"),
    "machine.instructions": (installation, "_cpu_flags", lambda: "sse2 fpu"),
    "machine.threads": (torch, "get_num_threads", lambda: 77),
    "machine.gpu": (torch.cuda, "get_device_name", lambda: "B300"),
    "compile.fuses_prologue": (TorchAttention, "fuses_prologue", True),
    "compile.model": (key, "_name_of", lambda model: "Twin"),
}
"""Fact -> the attribute that it is read from, and another value of it."""

SETTINGS = (
    *("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_FREEZING", "TORCHINDUCTOR_USE_FAST_MATH"),
    *("TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"),
    *("TORCHINDUCTOR_CPP_SIMDLEN", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS"),
    *("TRITON_F32_DEFAULT", "TRITON_DEFAULT_FP_FUSION", "TRITON_OVERRIDE_ARCH"),
    "TORCHINDUCTOR_OF_A_LATER_TORCH",
)
"""Environment variables that are facts, some of many."""

NON_FACTS: dict[str, Any] = {
    **{"tokenizer": "elsewhere", "revision": "v2", "download_dir": "/d", "load_format": "auto"},
    **{"served_model_name": ("m",), "skip_tokenizer_init": True, "chat_template": "/t"},
    **{"generation_config": "none", "seed": 7, "max_model_len": 64},
    **{"block_size": 32, "max_total_tokens": 4096, "gpu_memory_utilization": 0.5},
    **{"kv_cache_dtype": "fp8_e4m3", "scheduling_policy": "priority", "api_processes": 2},
    **{"enable_prefix_caching": False, "max_num_seqs": 3, "chunked_prefill_size": 64},
    **{"disable_overlap_schedule": True, "prefill_first": True},
    **{"max_queued_requests": 9, "max_queued_tokens": 9},
    **{"level": 1, "require_cache": True, "jit_after_ready": "error", "cache_dir": "/c"},
    **{"attention_backend": "torch", "strict_backends": True, "cudagraph_capture_sizes": (1, 2)},
    **{"max_cudagraph_capture_size": 4, "dump_passes": "/d"},
    **{"disable_prefill_graph": True, "disable_cuda_graph": True},
    **{"grammar_compile_timeout_secs": 9.0, "disable_any_whitespace": True},
    **{"reasoning_parser": "qwen3", "reasoning_field": "both", "tool_call_parser": "hermes"},
    **{"host": "0.0.0.0", "port": 1, "api_key": ("k",), "drain_timeout": 1.0},
    "admin_api_key": ("a",),
    **{"engine_startup_timeout": 9.0, "max_request_bytes": 4096, "write_timeout": 1.0},
    **{"response_store_bytes": 4096, "response_store_ttl": 9.0},
    **{"strict_fields": True, "enable_log_requests": True, "log_level": "debug"},
    **{"enable_log_request_stats": True, "log_stats_interval": 0, "metrics_compat": "vllm"},
    **{"disable_page": True, "profile_dir": "/p", "engine_restarts": 3},
    **{"plain_messages": True, "api_key_file": "/k", "allowed_origins": ("*",)},
    **{"allowed_methods": ("GET",), "allowed_headers": ("a",), "allow_credentials": True},
    **{"max_header_bytes": 4096, "max_json_depth": 9, "max_messages": 9, "max_tools": 9},
    **{"max_prompts": 9, "max_sequences": 9, "body_timeout": 9.0, "request_timeout": 9.0},
    **{"watchdog_timeout": 9.0, "ssl_certfile": "/c", "ssl_keyfile": "/k"},
    **{"ssl_keyfile_password": "p", "ssl_ca_certs": "/a", "ssl_cert_reqs": 2},
    **{"forwarded_allow_ips": ("10.0.0.0/8",), "prompt_timeout": 9.0},
}
"""Option -> a value that changes no fact, on a CPU."""

Find = Callable[..., Facts]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """The facts of a start: settings, config.json (its changes in `hf`), the family's name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(engine_facts, "HAS_KERNELS", True)
    for name in filter(installation.SETTING.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)

    def facts(
        family: str = "LlamaForCausalLM",
        hf: dict[str, Any] | None = None,
        folder: str = "model",
        **options: Any,
    ) -> Facts:
        (tmp_path / folder).mkdir(exist_ok=True)
        hf_config = {"architectures": [family]} | HF_CONFIG | (hf or {})
        (tmp_path / folder / "config.json").write_text(json.dumps(hf_config))
        values = {"load_format": "dummy", "device": "cpu", "dtype": "float32"} | options
        config = make_config({"model": str(tmp_path / folder)} | values)
        return facts_of(target_of(resolve_served(config, need_weights=False), config))

    return facts


def assert_misses(changed: Facts, base: Facts, name: str) -> None:
    assert digest_of(changed) != digest_of(base)
    assert any(name in str(change) for change in differences(changed, base))


def names_of(facts: Facts) -> set[str]:
    return {name for name, _ in flat(facts)}


CASES = [(family, fact) for family in MODELS for fact in CONFIG_FACTS]


@pytest.mark.parametrize(("family", "fact"), CASES)
def test_what_reaches_a_graph_misses(find: Find, family: str, fact: str) -> None:
    base = find(family)
    if f"model.{fact}" in names_of(base):
        assert_misses(find(family, CONFIG_FACTS[fact]), base, f"model.{fact} ")
    else:
        assert family != "LlamaForCausalLM"


def test_another_family_misses(find: Find) -> None:
    assert_misses(find("Qwen2ForCausalLM"), find(), "sources.models/qwen2.py ")


@pytest.mark.parametrize("option", OPTION_FACTS)
def test_settings_that_count_miss(find: Find, option: str) -> None:
    value, fact = OPTION_FACTS[option]
    assert_misses(find(**{option.split()[0]: value}), find(), f"{fact} ")


@pytest.mark.parametrize("fact", MACHINE_FACTS)
def test_versions_and_machine_miss(find: Find, monkeypatch: pytest.MonkeyPatch, fact: str) -> None:
    device = "cuda" if fact == "machine.gpu" else "cpu"
    base = find(device=device)
    monkeypatch.setattr(*MACHINE_FACTS[fact])
    assert_misses(find(device=device), base, f"{fact} ")


def test_another_build_of_torch_misses(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    base = find()
    other = TORCH._replace(git_version="0000")
    monkeypatch.setattr(installation, "torch_build", lambda: other)
    assert_misses(find(), base, "versions.torch ")


def test_another_capability_of_a_gpu_misses(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    base = find(device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert_misses(find(device="cuda"), base, "machine.capability ")


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_inductor_miss(find: Find, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    base = find()
    monkeypatch.setenv(name, "1")
    assert_misses(find(), base, f"settings.{name} ")


def test_every_source_misses(find: Find, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line of any file, and only of that file."""
    base = find()
    copies = tmp_path / "copies"
    for package in (*PACKAGES, "models"):
        shutil.copytree(installation._ROOT / package, copies / package, dirs_exist_ok=True)
    monkeypatch.setattr(installation, "_ROOT", copies)
    for name, module in list(sys.modules.items()):
        if name.startswith("tokenspeed.models."):
            path = copies / "models" / f"{name.rpartition('.')[2]}.py"
            monkeypatch.setattr(module, "__file__", str(path))
    assert find() == base, "where sources lie is no fact"
    for name in base["sources"]:
        path = copies / name
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        (change,) = differences(find(), base)
        assert str(change).startswith(f"sources.{name} ")
        path.write_bytes(before)


def test_every_fact_has_its_row(find: Find) -> None:
    on_cuda = find(device="cuda")
    facts = names_of(on_cuda).union(*(names_of(find(family)) for family in MODELS))
    rows = {f"model.{name}" for name in CONFIG_FACTS} | MACHINE_FACTS.keys()
    rows |= {name for _, name in OPTION_FACTS.values() if not name.startswith(" ")}
    rest = {name for name in facts if not name.startswith("sources.")}
    passes = {name for name in rest if name.startswith("compile.passes.")}
    assert {name.rpartition(" ")[2] for name in passes} == PASS_NAMES
    assert rest - passes == rows
    folders = {name.rpartition("/")[0] for name in facts - rest}
    assert folders == {f"sources.{package}" for package in (*PACKAGES, "models")}


def test_every_option_has_its_row() -> None:
    counting = {name.split()[0] for name in OPTION_FACTS}
    assert counting | NON_FACTS.keys() | {"model"} == OPTIONS.keys()
    assert not counting & NON_FACTS.keys()


@pytest.mark.parametrize("option", NON_FACTS)
def test_other_settings_hit(find: Find, option: str) -> None:
    needed = {"allowed_origins": ("*",), "ssl_certfile": "/c", "ssl_ca_certs": "/a"}
    assert find(**needed | {option: NON_FACTS[option]}) == find()


def test_where_a_model_lies_hits(find: Find) -> None:
    assert find(folder="elsewhere") == find()


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "/home/somebody/model"},
        {"eos_token_id": 5},
        {"transformers_version": "9"},
        {"torch_dtype": "float16"},
        {"initializer_range": 0.5},
        {"max_position_embeddings": 64},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_reaches_no_graph_hits(find: Find, changes: dict[str, Any]) -> None:
    assert find(hf=changes) == find()


@pytest.mark.parametrize(
    "name",
    [
        *("HOME", "XDG_CACHE_HOME", "TMPDIR", "HOSTNAME", "USER", "PATH", "PYTHONPATH"),
        *("TOKENSPEED_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "PORT"),
        *("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_FX_GRAPH_CACHE", "TRITON_CACHE_DIR"),
        *("TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_ALWAYS_COMPILE", "TRITON_PRINT_AUTOTUNING"),
        *("TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH"),  # torch sets them when it compiles
    ],
)
def test_surroundings_hit(find: Find, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    base = find()
    monkeypatch.setenv(name, "/somewhere/else")
    assert find() == base


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        (socket, "gethostname", "other"),
        (platform, "node", "other"),
        (os, "getpid", 1),
        (os, "getcwd", "/"),
        (memory, "available_ram", 1 << 20),
        (torch.cuda, "mem_get_info", (1, 2)),
        (torch, "initial_seed", 99),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_state_of_a_machine_hits(
    find: Find, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, value: Any
) -> None:
    base = find()
    monkeypatch.setattr(holder, name, lambda: value)
    assert find() == base


def test_the_largest_decode_step_is_no_fact(find: Find) -> None:
    assert find(device="cuda", max_num_seqs=8) == find(device="cuda", max_num_seqs=257)


def test_all_threads_of_one_machine_are_not_those_of_another(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor writes their number into its loops, and leaves them serial for one."""

    def with_threads(threads: int, cores: int) -> Facts:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        return find()

    assert with_threads(1, 1) != with_threads(64, 64) == with_threads(64, 128)
