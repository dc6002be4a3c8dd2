"""Which attention backend is taken, and what becomes of one that fails."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed.config import make_config
from tokenspeed.engine import attention
from tokenspeed.engine.attention import Choice, PendingAttention, attention_backend
from tokenspeed.engine.slots import Slots
from tokenspeed.kernels.attention_flashinfer import FlashInferAttention
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import FullAttention, cache_groups
from tokenspeed.options import ConfigError

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def model(device: str = "cuda", dtype: torch.dtype = BF16, head_dim: int = 128) -> Any:
    spec = FullAttention(num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=0.1)
    return SimpleNamespace(
        device=torch.device(device),
        dtype=dtype,
        dtype_name=str(dtype).removeprefix("torch."),
        family=SimpleNamespace(cache_specs=lambda config: [spec] * 2),
        config=None,
    )


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which everything runs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "is_installed", lambda: True)
    monkeypatch.setattr(attention, "is_built", lambda name: name.endswith("sm90"))
    monkeypatch.setattr(attention, "HAS_KERNELS", True)


def choice(name: str, served: Any) -> Choice:
    return attention_backend(make_config({"attention_backend": name}), served)


def test_auto_takes_the_best_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice("auto", model("cpu")).backend is TorchAttention
    assert choice("auto", model()).backend is FlashInferAttention
    assert choice("auto", model(dtype=torch.float16)).backend is FlashInferAttention
    for name, backend in (("torch", TorchAttention), ("triton", TritonAttention)):
        assert choice(name, model()) == Choice(name, "as asked")
        assert choice(name, model()).backend is backend
    monkeypatch.setattr(attention, "is_built", lambda name: False)
    assert choice("auto", model()).backend is TritonAttention
    assert "takes minutes to compile" in choice("auto", model()).reason
    assert choice("flashinfer", model()).backend is FlashInferAttention


@pytest.mark.parametrize(
    ("served", "lacks", "reason"),
    [
        (model(dtype=torch.float32), {}, "it computes in bfloat16 or float16, not in float32"),
        (model(head_dim=64), {}, "it serves head size 128, which no layer has"),
        (model(), {"capability": (8, 6)}, "it needs a GPU of compute capability 9.0, not 8.6"),
        (model(), {"installed": False}, "flashinfer-python is not installed"),
    ],
    ids=["dtype", "head", "gpu", "package"],
)
def test_what_flashinfer_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, served: Any, lacks: dict[str, Any], reason: str
) -> None:
    capability, installed = lacks.get("capability", (9, 0)), lacks.get("installed", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "is_installed", lambda: installed)
    assert choice("auto", served) == Choice("triton", f"not flashinfer: {reason}")
    with pytest.raises(ConfigError) as caught:
        choice("flashinfer", served)
    assert str(caught.value) == f"--attention-backend flashinfer: {reason}; use triton"


def test_a_cpu_has_only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "HAS_KERNELS", False)
    for name in ("triton", "flashinfer"):
        with pytest.raises(ConfigError, match=f"--attention-backend {name}: .* CUDA; use torch"):
            choice(name, model("cpu"))


def result(name: str) -> Any:
    """The backend over a small pool on a CPU, where FlashInfer's place is taken."""
    pending = PendingAttention(make_config({"attention_backend": name}), model())
    groups = cache_groups(model().family.cache_specs(None))
    slots = Slots(2, 64, 1, 16, CPU, scratch_page=0)
    return pending.result(groups, PagePool(groups, 8, 16, BF16, CPU), slots)


def test_a_backend_is_made_with_its_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[torch.device] = []

    class Prefill:
        def plan(self, *arguments: Any, **options: Any) -> None: ...
        def run(self, *arguments: Any, **options: Any) -> None: ...

    def make_prefill(device: torch.device) -> Prefill:
        made.append(device)
        return Prefill()

    library = SimpleNamespace(make_prefill=make_prefill)
    monkeypatch.setattr(attention, "_import_flashinfer", lambda: library)
    with caplog.at_level(logging.INFO, logger="tokenspeed"):
        assert type(result("auto")) is FlashInferAttention
        assert type(result("triton")) is TritonAttention
        assert type(result("torch")) is TorchAttention
    assert made == [CPU] * 2, "two wrappers of one group"
    assert "attention: flashinfer (FlashAttention-3 for prompts" in caplog.text
    assert "attention: triton (as asked)" in caplog.text


def test_a_library_that_fails_costs_speed_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("versions do not match\nmore lines")

    monkeypatch.setattr(attention, "_import_flashinfer", fail)
    with caplog.at_level(logging.INFO, logger="tokenspeed"):
        assert type(result("auto")) is TritonAttention
    assert "flashinfer is left out, since it fails here: versions do not match\n" in caplog.text
    with pytest.raises(ConfigError) as caught:
        result("flashinfer")
    assert str(caught.value) == (
        "--attention-backend flashinfer: it fails here: versions do not match; use triton"
    )
