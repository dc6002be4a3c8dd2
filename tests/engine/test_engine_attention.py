"""How the settled attention backend is made, and what becomes of one that fails."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed.attention_backends import ATTENTION_BACKENDS
from tokenspeed.config import OPTIONS, make_config
from tokenspeed.engine import attention, attention_makers
from tokenspeed.engine.attention import PendingAttention
from tokenspeed.engine.attention_makers import ATTENTION_MAKERS
from tokenspeed.engine.facts import unserved
from tokenspeed.engine.slots import Slots
from tokenspeed.kernels.attention_flashinfer import FlashInferAttention, Prefill
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import FullAttention, cache_groups
from tokenspeed.machine_facts import FlashInferFacts, MachineFacts
from tokenspeed.options import ConfigError
from tokenspeed.peers.table import PEER_VALUES
from tokenspeed.resolve import ModelFacts, resolve

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SPEC = FullAttention(num_heads=4, num_kv_heads=2, head_dim=128, scale=0.1)


def model(name: str, **options: Any) -> Any:
    """A model on a machine on which everything runs, as far as a backend looks at it."""
    library = FlashInferFacts(is_installed=True, built=("bfloat16",))
    machine = MachineFacts(has_cuda=True, capability=(9, 0), has_kernels=True, flashinfer=library)
    facts = ModelFacts(stored="safetensors", dtype="bfloat16", max_model_len=64)
    resolution = resolve(make_config({"attention_backend": name} | options), machine, facts)
    return SimpleNamespace(
        resolution=resolution, settings=resolution.config, dtype=BF16, kv_dtype=BF16
    )


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_makers, "is_built", lambda name: name.endswith("sm90"))


def test_a_backend_for_each_choice() -> None:
    assert OPTIONS["attention_backend"].choices == ("auto", *ATTENTION_BACKENDS)
    assert ATTENTION_MAKERS.keys() == ATTENTION_BACKENDS.keys()
    asked = {
        ours for (option, _), (ours, _) in PEER_VALUES.items() if option == "attention_backend"
    }
    assert asked <= {"auto", *ATTENTION_BACKENDS}
    for device in ("cpu", "cuda"):
        assert any(device in backend.devices for backend in ATTENTION_BACKENDS.values())


def test_each_backend_says_which_layers_it_serves() -> None:
    window, sinks = replace(SPEC, window=32), replace(SPEC, sinks=True)
    for specs in ([SPEC], [SPEC, window], [replace(SPEC, head_dim=64), SPEC]):
        assert unserved(specs) == {}
    no_gain = "and would attend no layer"
    lacks = {"flashinfer": f"it has no kernel for a sliding window, {no_gain}"}
    assert unserved([window, replace(window, head_dim=64)]) == lacks
    assert unserved([SPEC, sinks]) == {"torch": "it has no attention sinks"}
    wide = "its heads have 256 elements at most, not 512"
    assert unserved([SPEC, replace(SPEC, head_dim=512)]) == {"triton": wide, "flashinfer": wide}


@pytest.mark.parametrize(
    ("backend", "spec"),
    [
        (TorchAttention, replace(SPEC, sinks=True)),
        (TritonAttention, replace(SPEC, head_dim=512)),
    ],
)
def test_layers_that_a_backend_does_not_serve_are_never_run(backend: Any, spec: Any) -> None:
    groups = cache_groups([SPEC, spec])
    pool = PagePool(groups, 4, 16, BF16, CPU)
    slots = Slots(2, 64, 2, 16, CPU, scratch_page=0)
    given = (groups, pool) if backend is TorchAttention else (groups, pool, slots.device_tables)
    with pytest.raises(AssertionError, match=backend.supports(spec)):
        backend(*given)


def result(name: str, kv_dtype: torch.dtype = BF16, **options: Any) -> Any:
    """The backend over a small pool on a CPU, where FlashInfer's place is taken."""
    pending = PendingAttention(model(name, **options))
    groups = cache_groups([SPEC] * 2)
    slots = Slots(2, 64, 1, 16, CPU, scratch_page=0)
    return pending.result(groups, PagePool(groups, 8, 16, kv_dtype, CPU), slots)


def test_a_backend_is_made_with_its_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[tuple[torch.device, bool]] = []

    class Wrapper:
        def plan(self, *arguments: Any, **options: Any) -> None: ...
        def run(self, *arguments: Any, **options: Any) -> None: ...

    def make_prefill(device: torch.device, *, converts: bool) -> Prefill:
        made.append((device, converts))
        return Prefill(Wrapper(), Wrapper())

    library = SimpleNamespace(make_prefill=make_prefill)
    monkeypatch.setattr(attention, "_import", lambda name: library)
    with caplog.at_level(logging.INFO, logger="tokenspeed"):
        assert type(result("auto")) is FlashInferAttention
        assert type(result("triton")) is TritonAttention
        assert type(result("torch")) is TorchAttention
    assert made == [(CPU, False)] * 2, "two wrappers of one group"
    assert type(result("flashinfer", torch.float8_e4m3fn)) is FlashInferAttention
    assert made[2:] == [(CPU, True)] * 2, "which read pages of another dtype"
    assert (
        "attention: flashinfer (head size 128 on sm_90: FlashAttention-3 for prompts" in caplog.text
    )
    assert "attention: triton (as asked)" in caplog.text


def test_a_backend_is_made_anew_for_other_pages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for the trial, once to serve: a library that failed is not asked again."""
    asked = []

    def fail(name: str) -> None:
        asked.append(1)
        raise RuntimeError("no")

    monkeypatch.setattr(attention, "_import", fail)
    for name in ("auto", "triton"):
        pending, groups = PendingAttention(model(name)), cache_groups([SPEC])
        slots = Slots(2, 64, 1, 16, CPU, scratch_page=0)
        pools = [PagePool(groups, count, 16, BF16, CPU) for count in (1, 8)]
        first, second = (pending.make(groups, pool, slots) for pool in pools)
        assert type(first) is type(second) is TritonAttention
        pages = [each._layers[0].keys for each in (first, second)]  # type: ignore[union-attr]
        assert [len(each) for each in pages] == [2, 9]
    assert asked == [1] and caplog.text.count("flashinfer is left out") == 1


def test_a_library_that_fails_costs_speed_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("versions do not match\nmore lines")

    monkeypatch.setattr(attention, "_import", fail)
    with caplog.at_level(logging.INFO, logger="tokenspeed"):
        assert type(result("auto")) is TritonAttention
    assert "flashinfer is left out, since it fails here: versions do not match\n" in caplog.text
    with pytest.raises(ConfigError) as caught:
        result("flashinfer")
    assert str(caught.value) == (
        "--attention-backend flashinfer: it fails here: versions do not match; use triton"
    )
    with pytest.raises(ConfigError) as caught:
        result("auto", strict_backends=True)
    assert str(caught.value) == (
        "--strict-backends: flashinfer fails here: versions do not match; "
        "use --attention-backend triton"
    )


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_pages_that_kernels_cannot_read_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--block-size 24: the {name} attention backend needs"):
        PendingAttention(model(name, block_size=24))
    PendingAttention(model("torch", block_size=24))
    PendingAttention(model("triton", block_size=1))
