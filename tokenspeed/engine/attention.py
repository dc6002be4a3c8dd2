"""Which attention backend runs, why, and how it is made.

    auto    on a CPU   torch
            on a GPU   flashinfer where it serves the model and its kernel comes built, else triton

FlashInfer takes seconds to import: by its own file, beside the loading of weights.
"""

from __future__ import annotations

import contextlib
import importlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed import ledger
from tokenspeed.config import Config
from tokenspeed.engine.model import ServedModel
from tokenspeed.engine.slots import Slots
from tokenspeed.kernels.attention_flashinfer import (
    DTYPES,
    HEAD_DIM,
    FlashInferAttention,
    is_served,
)
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.flashinfer_builds import is_built, is_installed, prefill_name
from tokenspeed.kernels.triton_jit import HAS_KERNELS
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import CacheGroup
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.spans import carried, span

Attention = TorchAttention | TritonAttention

ATTENTION_BACKENDS: dict[str, type[Attention]] = {
    "torch": TorchAttention,
    "triton": TritonAttention,
    "flashinfer": FlashInferAttention,
}

_FLASHINFER = "tokenspeed.kernels.flashinfer_prefill"


@dataclass(frozen=True)
class Choice:
    """A row of ATTENTION_BACKENDS, and why it was taken."""

    name: str
    reason: str

    @property
    def backend(self) -> type[Attention]:
        return ATTENTION_BACKENDS[self.name]


def attention_backend(config: Config, model: ServedModel) -> Choice:
    """The backend that the settings mean. Raises ConfigError where it cannot run."""
    name, device = config.compile.attention_backend, model.device.type
    if name == "auto":
        return _best(model)
    if name == "triton" and not HAS_KERNELS:
        raise ConfigError("--attention-backend triton: its kernels need CUDA; use torch on a CPU")
    if name == "flashinfer" and (reason := _why_not_flashinfer(model)):
        other = "torch" if device == "cpu" else "triton"
        raise ConfigError(f"--attention-backend flashinfer: {reason}; use {other}")
    return Choice(name, "as asked")


def _best(model: ServedModel) -> Choice:
    if model.device.type == "cpu":
        return Choice("torch", "the backend of CPUs")
    reason = _why_not_flashinfer(model)
    if reason is None and not is_built(prefill_name(model.dtype, HEAD_DIM)):
        reason = "its kernel takes minutes to compile and comes built with flashinfer-jit-cache"
    if reason is None:
        return Choice("flashinfer", "FlashAttention-3 for prompts, Triton for the rest")
    return Choice("triton", f"not flashinfer: {reason}")


def _why_not_flashinfer(model: ServedModel) -> str | None:
    """What FlashInfer lacks here: None if it can run."""
    if model.device.type != "cuda":
        return "it needs CUDA"
    if (capability := torch.cuda.get_device_capability(model.device)) != (9, 0):
        return "it needs a GPU of compute capability 9.0, not {}.{}".format(*capability)
    if model.dtype not in DTYPES:
        return f"it computes in bfloat16 or float16, not in {model.dtype_name}"
    if not any(map(is_served, model.family.cache_specs(model.config))):
        return f"it serves head size {HEAD_DIM}, which no layer has"
    return None if is_installed() else "flashinfer-python is not installed"


class PendingAttention:
    """A backend on its way: what it imports is imported beside other work."""

    def __init__(self, config: Config, model: ServedModel) -> None:
        """Raises ConfigError as `attention_backend` does."""
        self._choice = attention_backend(config, model)
        self._is_asked_for = config.compile.attention_backend != "auto"
        self._library: Future[Any] | None = None
        if self._choice.name == "flashinfer":
            importer = ThreadPoolExecutor(1, "import-attention")
            self._library = importer.submit(carried(_import_flashinfer))
            importer.shutdown(wait=False)

    def result(self, groups: list[CacheGroup], pool: PagePool, slots: Slots) -> Attention:
        """The backend, its kernels loaded. Raises ConfigError if one that was asked for fails."""
        choice = self._choice
        if self._library is not None:
            try:
                attention: Attention = _flashinfer(self._library.result(), groups, pool, slots)
            except (ImportError, OSError, RuntimeError) as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                if self._is_asked_for:
                    problem = f"--attention-backend flashinfer: it fails here: {lines[0]}"
                    raise ConfigError(f"{problem}; use triton") from error
                logger.warning("flashinfer is left out, since it fails here: %s", lines[0])
                choice = Choice("triton", "flashinfer failed")
                attention = TritonAttention(groups, pool, slots.device_tables)
        elif issubclass(choice.backend, TritonAttention):
            attention = TritonAttention(groups, pool, slots.device_tables)
        else:
            attention = TorchAttention(groups, pool)
        logger.info("attention: %s (%s)", choice.name, choice.reason)
        return attention


@span("process.import")
def _import_flashinfer() -> Any:
    return importlib.import_module(_FLASHINFER)


def _flashinfer(
    library: Any, groups: list[CacheGroup], pool: PagePool, slots: Slots
) -> FlashInferAttention:
    device, name = pool.keys[0].device, prefill_name(pool.keys[0].dtype, HEAD_DIM)
    compiles: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not is_built(name):
        logger.info("flashinfer compiles its prefill kernel, unless it did before: minutes")
        compiles = ledger.compiling("flashinfer", name, "it does not come built")
    with span("kernels.warmup"), compiles:
        return FlashInferAttention(
            groups, pool, slots.device_tables, lambda: library.make_prefill(device)
        )
