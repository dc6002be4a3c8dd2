"""The compiler's process: `python -m tokenspeed.engine.compile_process`, started by a
`CompileChild`. See `compile_job` for what goes in and out.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import time
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from tokenspeed import ledger
from tokenspeed.compile import receipt
from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.cold import compile_model
from tokenspeed.compile.entry import RECEIPT, Contents
from tokenspeed.compile.facts import digest_of
from tokenspeed.compile.key import facts_of
from tokenspeed.engine.child import end_with_parent, read_orders
from tokenspeed.engine.compile_job import (
    Compiled,
    CompileFailed,
    CompileJob,
    Compiling,
    FromCompiler,
)
from tokenspeed.engine.model import ServedModel, resolve_served
from tokenspeed.engine.program import target_of
from tokenspeed.log import logger, setup_logging
from tokenspeed.passes.manager import PassFailed
from tokenspeed.spans import process_import

_TRIES = 5


class _Compiler:
    """Does one job. Messages go to `out`."""

    def __init__(self, job: CompileJob, out: BinaryIO) -> None:
        self._job = job
        self._out = out
        self._build: Path | None = None

    def run(self) -> None:
        began = time.monotonic()
        config = self._job.config
        torch.set_num_threads(self._job.num_threads)
        model = resolve_served(config, need_weights=False)
        if not self._job.in_blocks:
            model = dataclasses.replace(model, layout={})
        facts = facts_of(target_of(model, config))
        if digest_of(facts) != self._job.digest:
            raise RuntimeError("its process sees other facts than the engine's")
        entry = CompileCache(Path(self._job.root)).store(
            facts,
            model.source.name,
            lambda folder: self._fill(model, folder),
            waiting=lambda: self._report("another process compiles this model: waiting for it"),
        )
        summary = _summary(entry.files[RECEIPT])
        self._send(Compiled(time.monotonic() - began, summary, ledger.totals()))

    def tidy(self) -> None:
        """Remove what is half made, or written late; the process is about to end."""
        for _ in range(_TRIES):  # who still writes may put something back
            if self._build is not None and self._build.exists():
                shutil.rmtree(self._build, ignore_errors=True)

    def fail(self, error: Exception) -> None:
        is_strict = isinstance(error, PassFailed)
        message = str(error) if is_strict else f"{type(error).__name__}: {error}"
        self._send(CompileFailed(message.splitlines()[0][:500], is_strict))

    def _fill(self, model: ServedModel, folder: Path) -> Contents:
        self._build = folder
        config = self._job.config
        dump = None if config.compile.dump_passes is None else Path(config.compile.dump_passes)
        return compile_model(model.make, target_of(model, config), folder, self._report, dump)

    def _report(self, detail: str) -> None:
        self._send(Compiling(detail))

    def _send(self, message: FromCompiler) -> None:
        self._out.write(msgspec.json.encode(message) + b"\n")
        self._out.flush()


def main() -> int:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whoever prints does not garble messages
    job = read_orders(CompileJob)
    setup_logging(job.config.server.log_level)
    process_import()
    compiler = _Compiler(job, out)
    end_with_parent(compiler.tidy)
    try:
        compiler.run()
    except Exception as error:
        logger.debug("compiling failed", exc_info=True)
        compiler.fail(error)
        return 1
    finally:
        compiler.tidy()
    return 0


def _summary(data: bytes) -> str:
    totals = receipt.decode(data).totals()
    return ", ".join(f"{name} {count}" for name, count in totals.items()) or "no pass matched"


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Taking the interpreter down would take another second, and the parent waits for our end.
    os._exit(status)
