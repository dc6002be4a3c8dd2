"""How the attention backend that `resolve` has settled is made.

One that needs a library (FlashInfer takes seconds to import) has it imported beside the loading of
weights.
"""

from __future__ import annotations

import importlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tokenspeed.attention_backends import ATTENTION_BACKENDS
from tokenspeed.engine.attention_makers import ATTENTION_MAKERS, Attention, Parts
from tokenspeed.engine.model import ServedModel
from tokenspeed.engine.slots import Slots
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import CacheGroup
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.spans import carried, span

_INSTEAD = "triton"
"""What serves where a library fails."""


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
        if ATTENTION_BACKENDS[self._name].uses_triton and size & (size - 1):
            raise ConfigError(
                f"--block-size {size}: the {self._name} attention backend needs pages of a power "
                "of two tokens; use 16, or --attention-backend torch"
            )
        maker = ATTENTION_MAKERS[self._name]
        if not maker.is_built(model.dtype, model.kv_dtype):
            logger.info("%s compiles its kernel, unless it did before: minutes", self._name)
        if maker.library is not None:
            importer = ThreadPoolExecutor(1, "import-attention")
            self._library = importer.submit(carried(_import), maker.library)
            importer.shutdown(wait=False)

    def make(self, groups: list[CacheGroup], pool: PagePool, slots: Slots) -> Attention:
        """A backend on these pages, its kernels loaded; each is one of its own. Raises ConfigError
        if one that was asked for fails, or any under `--strict-backends`.
        """
        if self._library is not None:
            try:
                parts = Parts(groups, pool, slots, self._dtype, self._library.result())
                return ATTENTION_MAKERS[self._name].make(parts)
            except (ImportError, OSError, RuntimeError) as error:
                self._leave_out(error)
        return ATTENTION_MAKERS[self._name].make(Parts(groups, pool, slots, self._dtype))

    def _leave_out(self, error: Exception) -> None:
        """Go on without the library, or raise ConfigError where that is not wanted."""
        name = self._name
        told = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if self._is_asked_for:
            problem = f"--attention-backend {name}: it fails here: {told}"
            raise ConfigError(f"{problem}; use {_INSTEAD}") from error
        if self._is_strict:
            problem = f"--strict-backends: {name} fails here: {told}"
            raise ConfigError(f"{problem}; use --attention-backend {_INSTEAD}") from error
        logger.warning("%s is left out, since it fails here: %s", name, told)
        self._name, self._reason, self._library = _INSTEAD, f"{name} failed", None

    def result(self, groups: list[CacheGroup], pool: PagePool, slots: Slots) -> Attention:
        """The one that serves."""
        attention = self.make(groups, pool, slots)
        logger.info("attention: %s (%s)", self._name, self._reason)
        return attention


@span("process.import")
def _import(library: str) -> Any:
    return importlib.import_module(library)
