"""`tokenspeed cache why` names the changed fact, for every row of the key's matrix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_entries import fill
from test_compile_key_matrix import (
    CONFIG_FACTS,
    HF_CONFIG,
    MACHINE_FACTS,
    NON_FACTS,
    OPTION_FACTS,
    SETTINGS,
)

from tokenspeed.compile import installation, key
from tokenspeed.compile.cache import CompileCache
from tokenspeed.config import Config, make_config
from tokenspeed.engine import facts as engine_facts
from tokenspeed.engine.cache_commands import run
from tokenspeed.engine.warmup import wanted

Ask = Callable[..., tuple[int, str]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """The settings of a start on a machine that has a GPU as well."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(engine_facts, "HAS_KERNELS", True)

    def config(
        hf: dict[str, Any] | None = None, family: str = "LlamaForCausalLM", **options: Any
    ) -> Config:
        (tmp_path / "model").mkdir(exist_ok=True)
        hf_config = {"architectures": [family]} | HF_CONFIG | (hf or {})
        (tmp_path / "model" / "config.json").write_text(json.dumps(hf_config))
        values = {"model": str(tmp_path / "model"), "cache_dir": str(tmp_path / "cache")}
        values |= {"load_format": "dummy", "device": "cpu", "dtype": "float32"}
        return make_config(values | options)

    return config


NEEDED = {
    "allowed_origins": ("allow_credentials", "allowed_headers", "allowed_methods"),
    "ssl_certfile": ("ssl_ca_certs", "ssl_cert_reqs", "ssl_keyfile", "ssl_keyfile_password"),
    "ssl_ca_certs": ("ssl_cert_reqs",),
}
"""Options that others cannot be without."""


@pytest.fixture
def ask(start: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> Ask:
    """The answer and the exit code; the first time, an entry is put there beforehand."""

    def why(*args: Any, as_json: bool = False, **options: Any) -> tuple[int, str]:
        config = start(*args, **options)
        cache = CompileCache(Path(str(config.compile.cache_dir)))
        if not cache.root.exists():
            cache.store(wanted(config)[1], "model", fill)
        status = run("why", config, as_json=as_json)
        return status, capsys.readouterr().out

    return why


def assert_named(answer: tuple[int, str], name: str) -> None:
    status, text = answer
    assert status == 1
    head, columns, *lines = text.splitlines()
    assert head.startswith("miss: the nearest entry, model-")
    assert columns.split() == ["FACT", "HERE", "THERE", "SET", "BY"]
    assert any(name in line for line in lines), text


def test_a_hit_is_said_with_its_path(ask: Ask, tmp_path: Path) -> None:
    status, text = ask()
    assert status == 0
    assert text.startswith(f"hit: {tmp_path}/cache/v1/model-") and text.count("\n") == 1


@pytest.mark.parametrize("fact", CONFIG_FACTS)
def test_a_config_that_differs_is_named(ask: Ask, fact: str) -> None:
    family = "Qwen3ForCausalLM" if fact == "head_dim" else "LlamaForCausalLM"
    ask(family=family)
    assert_named(ask(CONFIG_FACTS[fact], family=family), f"model.{fact} ")


@pytest.mark.parametrize("option", OPTION_FACTS)
def test_a_setting_that_differs_is_named(ask: Ask, option: str) -> None:
    value, fact = OPTION_FACTS[option]
    ask()
    assert_named(ask(**{option.split()[0]: value}), f"{fact} ")


@pytest.mark.parametrize("fact", MACHINE_FACTS)
def test_a_machine_that_differs_is_named(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    device = "cuda" if fact == "machine.gpu" else "cpu"
    ask(device=device)
    monkeypatch.setattr(*MACHINE_FACTS[fact])
    assert_named(ask(device=device), f"{fact} ")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_variable_that_differs_is_named(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ask()
    monkeypatch.setenv(name, "another")
    assert_named(ask(), f"settings.{name} ")


def test_a_source_that_differs_is_named(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask()
    digest = key.digest_of_file

    def edited(path: Path) -> str:
        return "0" if path.name == "silu_mul.py" else digest(path)

    for module in (key, installation):
        monkeypatch.setattr(module, "digest_of_file", edited)
    assert_named(ask(), "sources.passes/silu_mul.py ")
    assert_named(ask(family="Qwen2ForCausalLM"), "sources.models/qwen2.py ")


@pytest.mark.parametrize("option", sorted(NON_FACTS.keys() - {"cache_dir", "load_format"}))
def test_what_is_no_fact_hits(ask: Ask, option: str) -> None:
    ask()
    needed = {name: NON_FACTS[name] for name in NEEDED if option in NEEDED[name]}
    assert ask(**needed | {option: NON_FACTS[option]})[0] == 0


def test_json_says_the_same(ask: Ask) -> None:
    assert json.loads(ask(as_json=True)[1])["hit"] is True
    status, text = ask(dtype="bfloat16", as_json=True)
    answer = json.loads(text)
    assert (status, answer["hit"], answer["path"]) == (1, False, None)
    facts = {fact["name"]: fact for fact in answer["facts"]}
    dtype = {"here": "'bfloat16'", "there": "'float32'", "set_by": "--dtype"}
    assert facts["compile.dtype"] == {"name": "compile.dtype"} | dtype


def test_only_what_was_given_is_called_so(ask: Ask) -> None:
    """The entry has float32, given; a start on a GPU takes another dtype, and other passes."""
    ask()
    rows = ask(device="cuda", dtype="auto")[1].splitlines()[2:]
    causes = {row.split()[0]: row.partition("  ")[2].split("  ")[-1].strip() for row in rows}
    assert causes["compile.device"] == "--device"
    assert causes["compile.dtype"] == causes["machine.gpu"] == "follows from compile.device"
    flags = {word for row in rows for word in row.split() if word.startswith("--")}
    assert flags == {"--device"}
    follows = ["follows from" in row for row in rows]
    assert follows == sorted(follows)
