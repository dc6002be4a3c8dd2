"""The CPU kernels written in C++, for this start: out of the cache folder, built there if missing.

    ROOT/native/NAME          the shared object; its name holds the digest of its sources
    ROOT/native/NAME.sha256   the digest of its bytes, written after it

It is code, so it is read only from a folder that belongs to this user and that nobody else may
write; what is loaded are the bytes that were checked, from a private copy. Where there is no such
folder it is built for this start alone; where it cannot be built, torch's kernels do the work.
Neither is an error, unless `--strict-backends` makes the latter one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from tokenspeed import ledger
from tokenspeed.compile.cache import cache_root
from tokenspeed.compile.transfer import NATIVE
from tokenspeed.compile.trust import check_folder, own_folder, read_own_file, write_file
from tokenspeed.config import Config
from tokenspeed.kernels import native
from tokenspeed.kernels.native import BuildError, Native
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.spans import span

_MAX_KEPT = 4
"""Objects that stay, of several CPUs and versions: those used last."""

_STALE_S = 86400.0


def obtain_native(config: Config) -> Native | None:
    """The kernels; None on other devices, under `--weight-layout plain`, and where they cannot be
    had. Milliseconds, but seconds when they are built. Raises ConfigError where they cannot be had
    under `--strict-backends`.
    """
    device = config.model.device
    is_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    if not is_cpu or config.compile.weight_layout == "plain":
        return None
    folder = cache_root(config.compile.cache_dir) / NATIVE
    try:
        with span("kernels.native"):
            name = native.file_name()
            return _stored(folder / name) or _made(folder, name)
    except (BuildError, OSError) as error:
        if config.compile.strict_backends:
            raise ConfigError(
                f"--strict-backends: the CPU kernels cannot be built: {error}; "
                "--weight-layout plain does without"
            ) from error
        logger.info("torch's kernels alone are used on this CPU: %s", error)
        return None


def _stored(path: Path) -> Native | None:
    """What lies there, if it is whole and only this user can have written it."""
    try:
        check_folder(path.parent.parent)
        check_folder(path.parent)
        digest = read_own_file(_digest_path(path), 128).decode(errors="replace")
        data = read_own_file(path)
        if _digest(data) != digest:
            return None
        kernels = _load_copy(data, path)
        with contextlib.suppress(OSError):
            os.utime(_digest_path(path))  # it is used
        return kernels
    except (BuildError, OSError):
        return None


def _load_copy(data: bytes, path: Path) -> Native:
    """Load a private copy of an object, beside it or, where there is no room, elsewhere."""
    try:
        with contextlib.ExitStack() as stack:
            place, _ = _room(stack, path.parent)
            write_file(place / path.name, data)
            return native.load(place / path.name)
    except OSError:
        with _temporary("tokenspeed-native-", None) as other:
            write_file(Path(other) / path.name, data)
            return native.load(Path(other) / path.name)


def _made(folder: Path, name: str) -> Native:
    """Build, load and keep. Raises BuildError, or OSError without room for a file."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        place, reason = _room(stack, folder)
        built = place / name
        with ledger.compiling("cpp", name, "it is not in the cache folder"):
            native.build(built)
        kernels = native.load(built)
        if reason is None:
            _keep(built.read_bytes(), place, folder / name)
    kept = f"kept for this start only: {reason}" if reason else f"kept in {folder}"
    logger.info("CPU kernels: built in %.1f s, %s", time.monotonic() - began, kept)
    return kernels


def _room(stack: contextlib.ExitStack, folder: Path) -> tuple[Path, OSError | None]:
    """A new folder inside `folder`, or elsewhere and why. What is loaded from there stays mapped
    when it is gone, and nobody can change it any more: a mapped file must never be written.
    """
    try:
        own_folder(folder.parent)
        own_folder(folder)
        return Path(stack.enter_context(_temporary(".load-", folder))), None
    except OSError as error:
        return Path(stack.enter_context(_temporary("tokenspeed-native-", None))), error


def _keep(data: bytes, place: Path, path: Path) -> None:
    """Keep an object as `path`, through `place`. Readers take it only together with its digest,
    which comes last; of two processes that build at once either's will do.
    """
    contents = {path: data, _digest_path(path): _digest(data).encode()}
    with contextlib.suppress(OSError):
        for target, each in contents.items():
            write_file(place / f"kept-{target.name}", each)
            os.replace(place / f"kept-{target.name}", target)
        _thin(path.parent)


def _thin(folder: Path) -> None:
    """Remove objects that were not used for long, and what processes that were killed have left.
    Raises OSError.
    """
    digests = sorted(folder.glob("*.sha256"), key=lambda path: path.lstat().st_mtime)
    for path in digests[:-_MAX_KEPT]:
        path.unlink()  # without it the object is none
        path.with_suffix("").unlink(missing_ok=True)
    for path in folder.glob(".*"):
        if time.time() - path.lstat().st_mtime > _STALE_S:
            shutil.rmtree(path, ignore_errors=True)


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _temporary(prefix: str, folder: Path | None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True)
