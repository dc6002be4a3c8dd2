"""The facts of this installation: what torch need not be imported for, which takes seconds.

Sources are facts file by file, so that a miss can name the one that was edited. Of the variables of
the environment only those are facts that change what is compiled (`key.py` says why).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tokenspeed.compile.facts import Facts

PACKAGES = ("compile", "kernels", "kernels/cpu", "passes")
"""Folders whose every source can change what is compiled, or what it calls."""

SUFFIXES = (".py", ".cpp", ".h")

SETTING = re.compile(r"(TORCHINDUCTOR|TRITON)_\w+")
"""Environment variables by which people change what Inductor and Triton make. There are hundreds,
and many change numbers (fast math, contraction, freezing). All that are set are facts, less:
"""

INERT_SETTINGS = re.compile(
    # Places. (torch sets some of them itself, to what it has found.)
    r"\w+_(DIR|HOME|PATH|LOGPATH|FILE|HOST|PORT|URL)"
    # How many compile, how long they wait, what they say, and what they need not compile again.
    r"|TORCHINDUCTOR_(COMPILE_THREADS|COMPILE_WORKER_WAIT_TIMEOUT|FILE_LOCK_TIMEOUT)"
    r"|TORCHINDUCTOR_(QUIESCE_ASYNC_COMPILE_POOL|WORKER_START|WORKER_SUPPRESS_LOGGING)"
    r"|TORCHINDUCTOR_(FX_GRAPH|AUTOGRAD)(_REMOTE)?_CACHE"
    r"|TRITON_(ALWAYS_COMPILE|CACHE_AUTOTUNING|DUMP_PTXAS_LOG|KERNEL_DUMP|PRINT_AUTOTUNING)"
)

_ROOT = Path(__file__).parent.parent
_SOURCE = re.compile(r"[a-z_]+(/[a-z_]+)?/\w+\.[a-z]+")
_DISTRIBUTIONS = ("triton", "flashinfer-python")


class TorchBuild(NamedTuple):
    """What torch says of itself; `cuda` is None for a build without."""

    version: str
    git_version: str
    cuda: str | None


def installation() -> Facts:
    """Versions and settings."""
    return {"versions": _version_facts(), "settings": _setting_facts(os.environ)}


def installed_sources(names: Iterable[str]) -> Facts:
    """The facts of sources that every model has, and of those of `names` that are installed."""
    paths = dict(package_sources())
    plain = (name for name in names if _SOURCE.fullmatch(name))
    paths |= {name: _ROOT / name for name in plain if (_ROOT / name).is_file()}
    return {name: digest_of_file(path) for name, path in sorted(paths.items())}


def package_sources() -> Iterator[tuple[str, Path]]:
    """Names and paths of the sources that every model has."""
    for package in PACKAGES:
        for path in (_ROOT / package).iterdir():
            if path.suffix in SUFFIXES:
                yield f"{package}/{path.name}", path


def digest_of_file(path: Path) -> str:
    """16 hex digits of what is in it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def cpu_instructions() -> str:
    """16 hex digits, the same for CPUs that know the same instructions."""
    return hashlib.sha256(_cpu_flags().encode()).hexdigest()[:16]


@functools.cache
def torch_build() -> TorchBuild | None:
    """The torch that an import would find, by the file in which its build wrote this down."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).with_name("version.py")
    spec = importlib.util.spec_from_file_location("torch_version_alone", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return TorchBuild(module.__version__, module.git_version, module.cuda)


def _setting_facts(variables: Mapping[str, str]) -> Facts:
    names = filter(SETTING.fullmatch, variables)
    return {name: variables[name] for name in names if not INERT_SETTINGS.fullmatch(name)}


def _version_facts() -> Facts:
    torch = torch_build()
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    return {
        **versions,
        "torch": f"{torch.version} {torch.git_version}" if torch else None,
        "cuda": torch.cuda if torch else None,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "platform": f"{sys.platform} {platform.machine()}",
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_flags() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return " ".join(sorted(found[1].split())) if found else platform.processor()
