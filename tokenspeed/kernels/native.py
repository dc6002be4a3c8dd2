"""The CPU kernels written in C++ (`cpu/`): one shared object, compiled once and kept.

It is built for an instruction set, not for a machine, and holds code only. Its name tells it apart
from any other: a digest of the sources and of the compiler's flags. Kernels run on as many threads
as torch says, from torch's own pool: the process has one OpenMP.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenspeed.kernels import blocks_cpu, linear_cpu
from tokenspeed.kernels.blocks_cpu import BlockKernels
from tokenspeed.kernels.linear_cpu import Linear

FOLDER = Path(__file__).parent / "cpu"

_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fopenmp")
_ISA_FLAGS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
}
"""By torch's CPU capability, which ATEN_CPU_CAPABILITY can lower."""

_BUILD_S = 60


class BuildError(RuntimeError):
    """The kernels cannot be had here: one line, saying why."""


@dataclass(frozen=True)
class Native:
    """The kernels of a loaded object."""

    rows: Linear
    blocks: BlockKernels


def sources() -> list[Path]:
    """Every file that the object is made of."""
    return sorted(path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h"))


def file_name() -> str:
    """What the object for this CPU's instruction set is called. BuildError if there is none."""
    digest = hashlib.sha256(" ".join(_flags()).encode())
    for path in sources():
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return f"native-{digest.hexdigest()[:16]}.so"


def build(target: Path) -> None:
    """Compile the kernels for this CPU's instruction set into the shared object `target`, which
    appears whole or not at all. A few seconds. BuildError if there is no way to.
    """
    flags = _flags()
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++")
    if compiler is None:
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    units = [str(path) for path in sources() if path.suffix == ".cpp"]
    command = [compiler, *flags, "-o", str(partial), *units]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_BUILD_S
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise BuildError(f"{compiler} failed on the CPU kernels: {reason}")
        partial.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} failed on the CPU kernels: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path) -> Native:
    """The kernels in a shared object made by `build`, for this machine's instruction set. The
    object is code: load it only from where nobody else may write. BuildError if it does not load.
    """
    try:
        library = ctypes.CDLL(str(path))
        return Native(rows=linear_cpu.bind(library), blocks=blocks_cpu.bind(library))
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} holds no CPU kernels: {error}") from error


def _flags() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _ISA_FLAGS:
        raise BuildError(f"the CPU kernels are for AVX2 and AVX512, not for {capability}")
    return (*_FLAGS, *_ISA_FLAGS[capability])
