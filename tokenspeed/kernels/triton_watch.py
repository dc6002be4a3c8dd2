"""Triton's compiles in the ledger, by Triton's own hooks (`triton.knobs`, 3.4 to 3.6).

They see every compile of the process: of the kernels here, and of those that Inductor writes. What
Triton finds in its cache on disk is loaded, not compiled, and not counted.
"""

from __future__ import annotations

from typing import Any

from tokenspeed import ledger


def watch(knobs: Any) -> None:
    """Report to the ledger from now on. Hooks that are installed already are called as before."""
    listener, cache_hook = knobs.compilation.listener, knobs.runtime.jit_cache_hook

    def compiled(*, src: Any, metadata: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        if listener is not None:
            listener(src=src, metadata=metadata, times=times, cache_hit=cache_hit, **others)
        if not cache_hit:
            name = str(metadata.get("name") or src.name)
            ledger.report("triton", name, times.total / 1e6, _arguments(src))

    def before_compile(*, repr: str, fn: Any, **others: Any) -> Any:
        """Called at the first launch of a kernel for arguments of new types, before its cache on
        disk is asked: where compiles are forbidden, so is this.
        """
        ledger.require_allowed("triton", fn.name, repr)
        return None if cache_hook is None else cache_hook(repr=repr, fn=fn, **others)

    knobs.compilation.listener = compiled
    knobs.runtime.jit_cache_hook = before_compile
    ledger.watches_triton()


def _arguments(src: Any) -> str:
    """What a kernel was compiled for: types, and the values that are part of it."""
    types = {str(name): str(kind) for name, kind in (getattr(src, "signature", None) or {}).items()}
    return ", ".join(f"{name}: {kind}" for name, kind in types.items()) or "of unknown arguments"
