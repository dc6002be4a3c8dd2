"""The key: every fact that can change what is compiled, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.compile import key
from tokenspeed.compile.key import Target, differences, digest_of, facts_of
from tokenspeed.compile.ranges import token_ranges
from tokenspeed.models import MODELS

HF_CONFIG = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}


def target(family: str = "LlamaForCausalLM", **changes: Any) -> Target:
    """A target; `changes` are of it, or else of config.json."""
    names = {field.name for field in dataclasses.fields(Target)}
    config = HF_CONFIG | {k: v for k, v in changes.items() if k not in names | {"max_model_len"}}
    row = MODELS[family]
    base = Target(
        model=row.model,
        config=row.config.from_dict(config, changes.get("max_model_len")),
        dtype=torch.float32,
        device=torch.device("cpu"),
        ranges=token_ranges("cpu", 8),
    )
    return dataclasses.replace(base, **{k: v for k, v in changes.items() if k in names})


BASE = facts_of(target())


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "Qwen2ForCausalLM"},
        {"hidden_size": 64},
        {"num_hidden_layers": 7},
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 20000.0},
        {"tie_word_embeddings": True},
        {"dtype": torch.bfloat16},
        {"ranges": token_ranges("cuda", 8)},
        {"fuses_prologue": True},
        {"disabled_passes": ("silu_mul",)},
        {"strict_passes": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_reaches_a_graph_misses(changes: dict[str, Any]) -> None:
    changed = facts_of(target(**changes))
    assert digest_of(changed) != digest_of(BASE)
    assert differences(changed, BASE)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 64},
        {"_name_or_path": "/home/somebody/model"},
        {"architectures": ["Whatever"]},
        {"eos_token_id": 5},
        {"transformers_version": "9"},
        {"torch_dtype": "float16"},
        {"initializer_range": 0.5},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_does_not_hits(changes: dict[str, Any]) -> None:
    assert facts_of(target(**changes)) == BASE


def test_the_largest_decode_step_counts_by_powers_of_two() -> None:
    few, same, many = (facts_of(target(ranges=token_ranges("cuda", n))) for n in (8, 256, 257))
    assert few == same != many


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        (torch, "__version__", "2.99"),
        (torch.version, "git_version", "0000"),
        (torch.version, "cuda", "13.9"),
        (key.importlib.metadata, "version", lambda name: "9.9"),
        (key.sys, "version_info", (3, 99, 0)),
        (key.platform, "machine", lambda: "riscv64"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX1024"),
        (key, "_cpu_flags", lambda: "sse2 fpu"),
        (torch, "get_num_threads", lambda: 77),
        (key, "FORMAT", 999),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_versions_and_machine_miss(
    monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, value: Any
) -> None:
    if name == "version_info":
        value = type("Info", (), {"major": 3, "minor": 99})
    monkeypatch.setattr(holder, name, value)
    assert digest_of(facts_of(target())) != digest_of(BASE)


def test_a_gpu_is_known_by_name_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    facts = facts_of(target(device=torch.device("cuda", 0)))
    assert facts["machine"] == {"gpu": "H200", "capability": "9.0"}
    assert facts == facts_of(target(device=torch.device("cuda", 3)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert facts != facts_of(target(device=torch.device("cuda", 0)))


@pytest.mark.parametrize("name", key.SETTINGS)
def test_settings_of_inductor_miss(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1" if os.environ.get(name) != "1" else "0")
    assert digest_of(facts_of(target())) != digest_of(BASE)


@pytest.mark.parametrize(
    "name",
    [
        *("HOME", "XDG_CACHE_HOME", "TMPDIR", "HOSTNAME", "USER", "PATH", "PYTHONPATH"),
        *("TOKENSPEED_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "PORT"),
    ],
)
def test_surroundings_hit(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "/somewhere/else")
    assert facts_of(target()) == BASE


def test_all_threads_there_are_is_one_fact_on_every_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_threads(threads: int, cores: int) -> key.Facts:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        return facts_of(target())

    assert with_threads(2, 2) == with_threads(64, 64) != with_threads(2, 64)


@pytest.fixture
def copied_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's sources elsewhere, free to be edited."""
    for package in key.PACKAGES:
        shutil.copytree(key._ROOT / package, tmp_path / package, dirs_exist_ok=True)
    monkeypatch.setattr(key, "_ROOT", tmp_path)
    return tmp_path


def test_where_sources_lie_is_no_fact(copied_sources: Path) -> None:
    assert facts_of(target()) == BASE


@pytest.mark.parametrize("package", key.PACKAGES)
def test_a_line_of_a_source_misses(copied_sources: Path, package: str) -> None:
    path = sorted((copied_sources / package).glob("*.*"))[-1]
    path.write_text(path.read_text() + "\n# edited\n")
    (found,) = differences(facts_of(target()), BASE)
    assert found.startswith(f"sources.{package}/{path.name} ")
    (copied_sources / package / "new.py").write_text("")
    assert len(differences(facts_of(target()), BASE)) == 2


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], key.Facts]:
    """A model in a package of its own: edits a file of it, and gives the facts."""
    package = tmp_path / "zoo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text("class Layer: pass\n")
    (package / "names.py").write_text("NAME = 1\n")
    (package / "other.py").write_text("class Other: pass\n")
    (package / "model.py").write_text(
        "from zoo import names\nfrom zoo.layers import Layer\nclass Model(Layer): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("zoo.model").Model
    importlib.import_module("zoo.other")

    def edit(name: str) -> key.Facts:
        if name:
            (package / name).write_text((package / name).read_text() + "# edited\n")
        return facts_of(target(model=model))

    yield edit  # type: ignore[misc]
    for name in [name for name in sys.modules if name.split(".")[0] == "zoo"]:
        del sys.modules[name]


def test_a_model_is_its_file_and_those_it_is_made_of(
    own_model: Callable[[str], key.Facts],
) -> None:
    before = copy.deepcopy(own_model(""))
    assert {name for name in before["sources"] if name.startswith("zoo/")} == {
        *("zoo/model.py", "zoo/layers.py", "zoo/names.py")
    }
    assert own_model("other.py") == before
    for name in ("model.py", "layers.py", "names.py"):
        after = own_model(name)
        assert after != before
        before = after


def test_a_family_is_no_fact_of_another() -> None:
    models = {name for name in BASE["sources"] if name.startswith("models/")}
    assert {"models/llama.py", "models/layers.py", "models/rope.py"} <= models
    assert not models & {"models/qwen2.py", "models/qwen3.py", "models/__init__.py"}


def test_inert_fields_are_read_by_no_model() -> None:
    """What the deny-list promises: only the engine asks for them."""
    models = Path(key._ROOT / "models")
    for name in key.INERT_FIELDS:
        for path in models.glob("*.py"):
            assert f"config.{name}" not in path.read_text(), path


def test_facts_survive_json_and_processes() -> None:
    assert json.loads(json.dumps(BASE)) == BASE
    code = "import test_compile_key as t; print(t.digest_of(t.BASE))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent,
        env=os.environ | {"HOME": "/nowhere", "PYTHONHASHSEED": "7"},
    )
    assert done.stdout.strip() == digest_of(BASE), done.stderr


def test_differences_name_the_fact_and_both_values() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3, "d": None}}) == [
        "a.c 2 (there 3)",
        "a.d absent (there None)",
    ]
    assert differences({"a": 1}, {"a": 1}) == []
