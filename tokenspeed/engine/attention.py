"""How the attention backend that `resolve` has settled is made.

FlashInfer takes seconds to import: by its own file, beside the loading of weights.
"""

from __future__ import annotations

import importlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from tokenspeed.engine.model import ServedModel
from tokenspeed.engine.slots import Slots
from tokenspeed.kernels.attention_backends import Attention
from tokenspeed.kernels.attention_flashinfer import HEAD_DIM, FlashInferAttention
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.flashinfer_builds import fp8_prefill_name, is_built, prefill_name
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import CacheGroup
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.spans import carried, span

_FLASHINFER = "tokenspeed.kernels.flashinfer_prefill"


class PendingAttention:
    """A backend on its way: what it imports is imported beside other work. Raises ConfigError for
    pages that it does not take.
    """

    def __init__(self, model: ServedModel) -> None:
        option = "attention_backend"
        self._name = model.settings.compile.attention_backend
        self._dtype = model.dtype
        self._is_strict = model.settings.compile.strict_backends
        self._is_asked_for = model.resolution.is_given(option)
        self._reason = model.resolution.reasons.get(option, "as asked")
        self._library: Future[Any] | None = None
        size = model.settings.cache.block_size
        if self._name != "torch" and size & (size - 1):
            raise ConfigError(
                f"--block-size {size}: the {self._name} attention backend needs pages of a power "
                "of two tokens; use 16, or --attention-backend torch"
            )
        if self._name == "flashinfer":
            _tell_of_builds(model.dtype, model.kv_dtype)
            importer = ThreadPoolExecutor(1, "import-attention")
            self._library = importer.submit(carried(_import_flashinfer))
            importer.shutdown(wait=False)

    def make(self, groups: list[CacheGroup], pool: PagePool, slots: Slots) -> Attention:
        """A backend on these pages, its kernels loaded; each is one of its own. Raises ConfigError
        if one that was asked for fails, or any under `--strict-backends`.
        """
        if self._library is not None:
            try:
                return _flashinfer(self._library.result(), groups, pool, slots, self._dtype)
            except (ImportError, OSError, RuntimeError) as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                if self._is_asked_for:
                    problem = f"--attention-backend flashinfer: it fails here: {lines[0]}"
                    raise ConfigError(f"{problem}; use triton") from error
                if self._is_strict:
                    problem = f"--strict-backends: flashinfer fails here: {lines[0]}"
                    raise ConfigError(f"{problem}; use --attention-backend triton") from error
                logger.warning("flashinfer is left out, since it fails here: %s", lines[0])
                self._name, self._reason = "triton", "flashinfer failed"
                self._library = None
        if self._name == "torch":
            return TorchAttention(groups, pool, self._dtype)
        return TritonAttention(groups, pool, slots.device_tables, self._dtype)

    def result(self, groups: list[CacheGroup], pool: PagePool, slots: Slots) -> Attention:
        """The one that serves."""
        attention = self.make(groups, pool, slots)
        logger.info("attention: %s (%s)", self._name, self._reason)
        return attention


@span("process.import")
def _import_flashinfer() -> Any:
    return importlib.import_module(_FLASHINFER)


def _tell_of_builds(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    names = [prefill_name(dtype, HEAD_DIM)]
    if kv_dtype != dtype:
        names.append(fp8_prefill_name(dtype, HEAD_DIM))
    if not all(map(is_built, names)):
        logger.info("flashinfer compiles its prefill kernel, unless it did before: minutes")


def _flashinfer(
    library: Any, groups: list[CacheGroup], pool: PagePool, slots: Slots, dtype: torch.dtype
) -> FlashInferAttention:
    device, converts = pool.keys[0].device, pool.keys[0].dtype != dtype

    def make() -> Any:
        return library.make_prefill(device, converts=converts)

    with span("kernels.warmup"):
        return FlashInferAttention(groups, pool, slots.device_tables, make, dtype)
