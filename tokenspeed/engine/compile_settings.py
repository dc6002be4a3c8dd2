"""Settings of the compiler that no start could take, whatever the model: told before any work."""

from __future__ import annotations

from pathlib import Path

from tokenspeed.config import CompileConfig
from tokenspeed.options import ConfigError
from tokenspeed.passes import PASS_NAMES


def check_compile(settings: CompileConfig) -> None:
    """Raise ConfigError for a pass that there is not, which is a typing error at every level, and
    for options that contradict each other.
    """
    for name in settings.disable_pass:
        if name not in PASS_NAMES:
            known = ", ".join(sorted(PASS_NAMES))
            raise ConfigError(f"--disable-pass {name}: there is no such pass (known: {known})")
    if settings.dump_passes is not None:
        if settings.level == 0:
            raise ConfigError("--dump-passes is about passes, and -O0 runs none")
        if settings.require_cache:
            raise ConfigError("--dump-passes compiles anew, which --require-cache forbids")
    if settings.level == 0 and settings.require_cache:
        raise ConfigError("--require-cache is about compiled pieces, and -O0 runs none")


def make_dump_folder(settings: CompileConfig) -> None:
    """Raises ConfigError where `--dump-passes` can write nothing."""
    if settings.dump_passes is None:
        return
    try:
        Path(settings.dump_passes).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--dump-passes {settings.dump_passes}: {error.strerror}") from error
