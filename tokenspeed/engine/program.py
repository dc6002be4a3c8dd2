"""Where a model's program comes from: eager pieces, the compile cache, or a compiler process.

    level 0                 planned here, run eagerly
    level 1, a cache hit    loaded by a thread, while the weights are
    level 1, a miss         compiled by a process, while the weights are loaded; then loaded
    level 2                 as level 1; CUDA graphs are made later, of whatever runs
    level 3                 as level 2; before that, tiles of linear kernels are measured, or read
    no level, on a CPU      level 1, but a miss runs eagerly and the log says so

Whatever goes wrong with a cache or a compiler costs speed, and a warning; never the start, unless
`--require-cache` says that a start without a hit is none, or `--strict-passes` that one is none in
which a pass fails.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from tokenspeed import ledger
from tokenspeed.compile.cache import CompileCache, Miss, cache_root
from tokenspeed.compile.entry import Damaged, Entry, Unloadable
from tokenspeed.compile.facts import Facts, digest_of
from tokenspeed.compile.key import Target, facts_of
from tokenspeed.compile.plan import Program
from tokenspeed.compile.ranges import token_ranges
from tokenspeed.compile.warm import import_inductor, load_program
from tokenspeed.config import COMPILE_TIME, Config
from tokenspeed.engine.attention_makers import ATTENTION_MAKERS
from tokenspeed.engine.compile_job import CompileChild, CompileFailed, CompileJob
from tokenspeed.engine.compile_settings import check_compile, make_dump_folder
from tokenspeed.engine.linear_tables import LinearKernels
from tokenspeed.engine.model import ServedModel
from tokenspeed.engine.native import obtain_native
from tokenspeed.engine.tile_tables import TileKernels, machine_name
from tokenspeed.kernels.native import Native
from tokenspeed.log import logger
from tokenspeed.models.blocks import pack
from tokenspeed.options import ConfigError
from tokenspeed.passes import weight_layout
from tokenspeed.spans import carried, span

Progress = Callable[[str, str], None]
"""Told the phase, and a line for people."""

_PIPELINE = "tokenspeed.compile.pipeline"
"""Named, not imported: it imports Dynamo, for seconds, and only an eager start needs it."""


@dataclass(frozen=True)
class Obtained:
    """A program, its level in words ("level 1 (compile cache hit)"), and what its linear layers
    choose from, if they do.
    """

    program: Program
    level: str
    linear: LinearKernels | TileKernels | None = None


def target_of(model: ServedModel, config: Config) -> Target:
    """What the compiler has to know. Raises ConfigError for an unknown pass."""
    settings = model.settings.compile
    check_compile(config.compile)
    disabled = set(config.compile.disable_pass)
    if settings.weight_layout == "plain":
        disabled.add(weight_layout.PASS.name)
    return Target(
        model=model.family.model,
        config=model.config,
        dtype=model.dtype,
        device=model.device,
        ranges=token_ranges(settings.compile_ranges),
        fuses_prologue=ATTENTION_MAKERS[settings.attention_backend].kind.fuses_prologue,
        disabled_passes=tuple(sorted(disabled)),
        strict_passes=settings.strict_passes,
        layout=model.layout,
        changed_by=(pack,) if model.layout else (),
    )


def obtain_program(model: ServedModel, config: Config) -> PendingProgram:
    """Begin with what can be done beside loading weights; `result` ends it. Raises ConfigError for
    settings that cannot be taken, and for a miss where `--require-cache` allows none.
    """
    settings = config.compile
    check_compile(settings)
    make_dump_folder(settings)
    if settings.level == 0:
        return PendingProgram(model, None)
    return PendingProgram(model, _Compiled(model, config))


class PendingProgram:
    """A program on its way. Leave it as a context manager: no process stays behind."""

    def __init__(self, model: ServedModel, compiled: _Compiled | None) -> None:
        self._model = model
        self._compiled = compiled

    @property
    def is_loading(self) -> bool:
        """Does Inductor load an entry in a thread? Until `result` has returned, new kernels of
        Triton would go where the entry's lie, and be lost.
        """
        return self._compiled is not None and self._compiled.is_loading

    def result(self, progress: Progress) -> Obtained:
        """The program, eager if there is no other."""
        progress("compile", "")
        if self._compiled and (obtained := self._compiled.result(progress)):
            logger.info("program: %d pieces, %s", len(obtained.program.pieces), obtained.level)
            return obtained
        began = time.monotonic()
        with span("process.import"):
            pipeline = importlib.import_module(_PIPELINE)
        program: Program = pipeline.plan_model(
            self._model.make, dtype=self._model.dtype, device=self._model.device
        )
        seconds = time.monotonic() - began
        logger.info("program: %d pieces, level 0, in %.1f s", len(program.pieces), seconds)
        return Obtained(program, "level 0")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._compiled:
            self._compiled.close()


class _Compiled:
    """Level 1: an entry that is being loaded, or a child that is making one, or neither."""

    def __init__(self, model: ServedModel, config: Config) -> None:
        self._model = model
        self._config = config
        is_dump = config.compile.dump_passes is not None
        has_level = config.compile.level is not None
        is_checked = is_dump or config.compile.strict_passes
        self._is_asked_for = has_level or is_checked or model.device.type != "cpu"
        target = target_of(model, config)
        self._facts: Facts = facts_of(target)
        self._cache = CompileCache(cache_root(config.compile.cache_dir))
        self._loader = ThreadPoolExecutor(1, "load-program")
        self._loading: Future[Program] | None = None
        self._entry: Entry | None = None
        self._child: CompileChild | None = None
        self._temporary: Path | None = None
        self._native: Future[Native | None] | None = None
        if is_dump:
            found: Entry | Miss = Miss("--dump-passes compiles anew", is_barred=True)
        else:
            found = self._cache.find(self._facts)
        if isinstance(found, Miss) and config.compile.require_cache:
            raise _required(found.reason)
        if isinstance(found, Entry):
            self._cache.sweep()  # a start that finds all stores nothing
            self._entry = found
            self._loading = self._loader.submit(carried(load_program), found)
        elif self._is_asked_for:
            logger.info("compile cache miss: %s", found.reason)
            self._child = self._start_child(found.reason if found.is_barred else None)
        else:
            name = config.model.model
            logger.info(
                "not compiled yet, so pieces run eagerly; `tokenspeed warmup %s` compiles them for "
                "good (%s): %s",
                *(name, COMPILE_TIME, found.reason),
            )
            return
        if chooses_linear(target):
            self._native = self._loader.submit(carried(obtain_native), config)

    @property
    def is_loading(self) -> bool:
        return self._entry is not None and bool(self._entry.artifacts)

    def result(self, progress: Progress) -> Obtained | None:
        """The program; None if there is none to be had, which has been logged."""
        if self._entry is not None and self._loading is not None:
            try:
                return self._obtained(self._loading.result(), "compile cache hit", self._entry)
            except Damaged as error:
                self._cache.set_aside(self._entry.folder, str(error))
                if self._config.compile.require_cache:
                    raise _required(str(error)) from error
            except Unloadable as error:
                if self._config.compile.require_cache:
                    raise ConfigError(f"--require-cache: there is an entry, but {error}") from error
                self._give_up(str(error))
                return None
            if self._is_asked_for:
                self._child = self._start_child()
        return self._from_child(progress) if self._child else None

    def _give_up(self, reason: str) -> None:
        """Say why there is no program. Raises ConfigError under `--strict-backends`."""
        if self._config.compile.strict_backends:
            raise ConfigError(f"--strict-backends: {reason}; use -O0 to run without")
        logger.warning("pieces run eagerly (-O0): %s", reason)

    def close(self) -> None:
        """Nothing of it goes on beside the engine: no process, no thread."""
        if self._child:
            self._child.close()
        self._loader.shutdown(wait=True, cancel_futures=True)
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _start_child(self, barred: str | None = None) -> CompileChild | None:
        """Compile into the cache; where that is `barred`, into a folder for this start only."""
        if reason := barred or self._cache.why_unwritable():
            logger.warning("what is compiled is kept for this start only: %s", reason)
            self._temporary = Path(tempfile.mkdtemp(prefix="tokenspeed-cache-"))
            self._cache = CompileCache(self._temporary)
        job = CompileJob(
            config=self._config,
            root=str(self._cache.root),
            digest=digest_of(self._facts),
            num_threads=torch.get_num_threads(),
            in_blocks=bool(self._model.layout),
        )
        try:
            child = CompileChild(job)
        except OSError as error:
            self._give_up(f"compiling failed: its process cannot be started: {error}")
            return None
        if self._model.device.type == "cpu":  # where loops are left for Inductor
            self._loader.submit(carried(import_inductor))  # while the child compiles
        return child

    def _from_child(self, progress: Progress) -> Obtained | None:
        assert self._child is not None
        done = self._child.wait(lambda detail: progress("compile", detail))
        if isinstance(done, CompileFailed):
            if done.is_strict:
                raise ConfigError(
                    f"--strict-passes: {done.message}; --disable-pass leaves a pass out"
                )
            self._give_up(f"compiling failed: {done.message}")
            return None
        found = self._cache.find(self._facts)
        if isinstance(found, Miss):
            self._give_up(f"compiling failed: {found.reason}")
            return None
        logger.info("compiled in %.1f s: %s", done.seconds, done.summary)
        ledger.add(done.jit)
        try:
            return self._obtained(load_program(found), f"compiled in {done.seconds:.1f} s", found)
        except Damaged as error:
            self._cache.set_aside(found.folder, str(error))
            self._give_up(f"compiling failed: {error}")
        except Unloadable as error:
            self._give_up(f"compiled, but {error}")
        return None

    def _obtained(self, program: Program, how: str, entry: Entry) -> Obtained:
        linear: LinearKernels | TileKernels | None = None
        if self._native:
            linear = LinearKernels(self._native.result(), entry)
        elif self._model.settings.compile.level == 3:
            linear = TileKernels(entry, machine_name())
        return Obtained(program, f"level 1 ({how})", linear)


def chooses_linear(target: Target) -> bool:
    """Does the program call `linear` as an op that chooses its kernel?"""
    is_served = target.device.type == "cpu" and target.dtype == torch.float32
    return is_served and weight_layout.PASS.name not in target.disabled_passes


def _required(reason: str) -> ConfigError:
    """What a start without a hit is, if a hit is required."""
    return ConfigError(
        f"--require-cache: {reason}; fill the cache with `tokenspeed warmup` and the same options, "
        "or with `tokenspeed cache import`"
    )
