"""Compiled GPU kernels of this start: those that are kept, and new ones to keep.

    TRITON_CACHE_DIR, FLASHINFER_WORKSPACE_BASE    name a folder of this process (`kernel_home.py`),
                                                   unless the user has set them: then nothing is
                                                   taken from the cache folder, or put there

Triton and FlashInfer have one set of folders a process, and so has this file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from tokenspeed.compile.cache import VERSION, cache_root
from tokenspeed.compile.kernel_home import PREFIX, KernelHome
from tokenspeed.compile.kernel_store import environment_of
from tokenspeed.compile.key import surroundings
from tokenspeed.config import Config
from tokenspeed.kernels import flashinfer_builds
from tokenspeed.kernels.triton_jit import load_driver
from tokenspeed.log import logger
from tokenspeed.spans import span

TRITON_VARIABLE, FLASHINFER_VARIABLE = "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"

_NOT_OF_USERS = re.compile(rf"/{VERSION}/{re.escape(PREFIX)}\w+/|/tokenspeed-kernels-\w+/")
"""In a variable's value: a process above this one has set it as is done here."""

_TORCHS = re.compile(r"/torchinductor_[^/]+/triton/\d+$")
"""torch sets TRITON_CACHE_DIR to this, if it is not set, when Inductor's first kernel is loaded."""

_home: KernelHome | None = None
_place: tuple[Path, str] | None = None


def use_kept_kernels(config: Config) -> None:
    """Have what is compiled from now on looked for in the cache folder first. To be called before
    settings are settled (what FlashInfer has built is a reason to take it), before a kernel is
    launched and before FlashInfer is imported. Never raises.
    """
    global _home, _place
    if config.model.device == "cpu" or not torch.cuda.is_available():
        return
    place = cache_root(config.compile.cache_dir), environment_of(surroundings("cuda"))
    if place == _place:
        return
    try:
        with span("kernels.kept"):
            home = KernelHome(*place)
    except OSError as error:
        logger.info("compiled GPU kernels are not taken from the cache folder: %s", error)
        return
    _home, _place = home, place
    if _is_ours(TRITON_VARIABLE):
        os.environ[TRITON_VARIABLE] = str(home.triton)
        _load_driver()
    if _is_ours(FLASHINFER_VARIABLE):
        os.environ[FLASHINFER_VARIABLE] = str(home.workspace)
        flashinfer_builds.use_kept(home.builds)


def has_kept_kernels() -> bool:
    """Did the cache folder have some, so that few are left to compile?"""
    return _home is not None and _home.num_kept > 0


def keep_kernels() -> None:
    """Keep what was compiled so far; what comes later is kept when the process ends."""
    if _home is not None and (new := _home.keep()):
        logger.info("%d compiled GPU kernels are kept with the compile cache", len(new))


@contextlib.contextmanager
def trying_kernels() -> Iterator[None]:
    """Many are compiled meanwhile, to be measured, and few of them will run again: none is kept.
    The next start compiles those few.
    """
    keep_kernels()
    try:
        yield
    finally:
        if _home is not None:
            _home.leave_out()


def _load_driver() -> None:
    try:
        with span("kernels.kept"):
            load_driver()
    except Exception as error:  # whoever launches a kernel will say what is wrong
        logger.debug("Triton's driver: %s", error)


def _is_ours(variable: str) -> bool:
    """May the variable be set? If not, the log says so."""
    value = os.environ.get(variable)
    if value is None or _NOT_OF_USERS.search(f"{value}/") or _TORCHS.search(value):
        return True
    logger.info("%s is set: its kernels stay in %s, and no archive has them", variable, value)
    return False
