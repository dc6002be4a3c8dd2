"""`tokenspeed warmup`: fill the compile cache without weights, as a start would with them.

What a start compiles or measures beside its program is left by a rehearsal of one, with made-up
weights: on CUDA always, since its kernels are compiled for what it launches; on a CPU if asked for.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from tokenspeed.compile.archive import ArchiveError, write_archive
from tokenspeed.compile.cache import CompileCache, cache_root
from tokenspeed.compile.entry import Entry
from tokenspeed.compile.facts import Facts, digest_of, group
from tokenspeed.compile.key import facts_of
from tokenspeed.compile.transfer import pack
from tokenspeed.config import Config
from tokenspeed.engine.block_weights import settle_layout
from tokenspeed.engine.compile_job import CompileChild, CompileFailed, CompileJob
from tokenspeed.engine.compile_settings import check_compile, make_dump_folder
from tokenspeed.engine.model import ServedModel, resolve_served
from tokenspeed.engine.native import obtain_native
from tokenspeed.engine.program import chooses_linear, target_of
from tokenspeed.engine.rehearsal import Rehearsal, RehearsalFailed, rehearse
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.output_file import check_target
from tokenspeed.text.errors import ModelError

_PIECE = re.compile(r"piece (\d+) of (\d+)")
_MIB = 1 << 20


def warmup(configs: Sequence[Config], export: str | None = None, autotune: bool = False) -> int:
    """Compile what each of these settings would run, where the cache does not have it, and with
    `autotune` measure its linear kernels (on CUDA for -O3); then write all of it into an archive.
    The exit code. Raises ConfigError for settings that cannot be taken.
    """
    if export is not None:
        check_target("--export", export)
    cache = CompileCache(cache_root(configs[0].compile.cache_dir))
    try:
        entries = {}
        for config in configs:
            if config.compile.level == 0:
                logger.info("level 0 runs pieces as they are: there is nothing to compile")
                continue
            entry = _prepared(cache, config, autotune)
            entries[entry.folder.name] = entry
        if export is not None:
            write_entries(cache, list(entries.values()), export)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    except (ArchiveError, CompileError, OSError) as error:
        logger.error("%s", error)
        return 1
    return 0


class CompileError(RuntimeError):
    """What was to be compiled is not in the cache: one line that says why."""


def wanted(config: Config) -> tuple[ServedModel, Facts]:
    """The model that a start with these settings would run, and the facts of its program. Raises
    ModelError or ConfigError.
    """
    model = settle_layout(resolve_served(config, need_weights=False), config)
    return model, facts_of(target_of(model, config))


def write_entries(cache: CompileCache, entries: Sequence[Entry], path: str) -> None:
    """Write an archive of entries, and its digest to stdout, as sha256sum does. Raises ArchiveError
    and OSError.
    """
    members = pack(cache, entries)
    digest = write_archive(Path(path), members)
    num_bytes = sum(map(len, members.values()))
    logger.info(
        "%s: %d %s, %.1f MiB; to use it: tokenspeed cache import %s --sha256 %s",
        *(path, len(entries), "entry" if len(entries) == 1 else "entries", num_bytes / _MIB),
        *(shlex.quote(path), digest),
    )
    for entry in entries:
        machine = ", ".join(f"{k} {v}" for k, v in group(entry.manifest.facts, "machine").items())
        logger.info("%s is for machines with %s", entry.folder.name, machine)
    print(f"{digest}  {path}")


def _prepared(cache: CompileCache, config: Config, autotune: bool) -> Entry:
    """The entry for these settings, and all that a start needs beside it, made where it lacks."""
    entry = filled(cache, config)
    model, _ = wanted(config)
    what = _name_of(model)
    if model.device.type == "cuda":
        tuning = replace(config, compile=replace(config.compile, level=3))
        for start in (*([tuning] if autotune else []), config):
            if _rehearsed(start, what):  # of what it tried it has kept none: now what it chose
                _rehearsed(start, what)
    elif autotune and chooses_linear(target_of(model, config)):
        _rehearsed(config, what)
    return entry


def _name_of(model: ServedModel) -> str:
    return f"{model.source.name} on {model.device} in {model.dtype_name}"


def filled(cache: CompileCache, config: Config) -> Entry:
    """The entry for these settings, made if there is none."""
    settings = config.compile
    check_compile(settings)
    make_dump_folder(settings)
    model, facts = wanted(config)
    what = _name_of(model)
    found = cache.find(facts)
    if isinstance(found, Entry):
        logger.info("%s: in the cache already, %s", what, found.folder)
        entry = found
        if settings.dump_passes is not None:
            _dump(config, model, facts, what)
    else:
        logger.info("%s: %s", what, found.reason)
        if reason := cache.why_unwritable():
            raise CompileError(f"nothing can be stored: {reason}; set --cache-dir")
        entry = _compiled(cache, config, model, facts, what)
    if chooses_linear(target_of(model, config)):
        obtain_native(config)
    return entry


def _dump(config: Config, model: ServedModel, facts: Facts, what: str) -> None:
    """Compile what the cache has once more, for the graphs that the compiler writes on its way."""
    logger.info("%s: compiled once more for --dump-passes, and not kept", what)
    with tempfile.TemporaryDirectory(prefix="tokenspeed-dump-") as place:
        _compiled(CompileCache(Path(place)), config, model, facts, what)


def _rehearsed(config: Config, what: str) -> bool:
    """Rehearse a start; whether it measured something. Raises CompileError."""
    with _Progress(what) as progress:
        done = rehearse(Rehearsal(config, torch.get_num_threads()), progress)
    if isinstance(done, RehearsalFailed):
        raise CompileError(
            f"{what}: compiled, but a start with made-up weights fails: {done.message}; "
            "`tokenspeed cache export` writes what there is"
        )
    made = ", ".join(f"{each.count} {each.kind}" for each in done.jit) or "nothing was missing"
    logger.info("%s: a start rehearsed in %.1f s: %s", what, done.seconds, made)
    return any(each.kind == "tuning" for each in done.jit)


def _compiled(
    cache: CompileCache, config: Config, model: ServedModel, facts: Facts, what: str
) -> Entry:
    job = CompileJob(
        config=config,
        root=str(cache.root),
        digest=digest_of(facts),
        num_threads=torch.get_num_threads(),
        in_blocks=bool(model.layout),
    )
    child = CompileChild(job)
    try:
        with _Progress(what) as progress:
            done = child.wait(progress)
    finally:
        child.close()
    if isinstance(done, CompileFailed):
        raise CompileError(f"{what}: compiling failed: {done.message}")
    found = cache.find(facts)
    if not isinstance(found, Entry):
        raise CompileError(f"{what}: compiled, but not found afterwards: {found.reason}")
    logger.info("%s: compiled in %.1f s: %s", what, done.seconds, done.summary)
    logger.info("%s: %s", what, found.folder)
    return found


class _Progress:
    """What the compiler tells: a bar on a terminal, else a line of the log for each step."""

    def __init__(self, what: str) -> None:
        self._last = ""
        self._what = what
        self._is_terminal = sys.stderr.isatty()
        form = "{desc}: {n_fmt}/{total_fmt} pieces |{bar}| {elapsed}{postfix}"
        self._bar = tqdm(
            desc=what, total=0, leave=False, bar_format=form, disable=not self._is_terminal
        )

    def __call__(self, detail: str) -> None:
        """Told the same again and again while it lasts."""
        if detail != self._last and not self._is_terminal:
            logger.info("%s: %s", self._what, detail)
        if detail != self._last and (piece := _PIECE.match(detail)):
            self._bar.n, self._bar.total = int(piece[1]) - 1, int(piece[2])
        self._last = detail
        self._bar.set_postfix_str(detail)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
