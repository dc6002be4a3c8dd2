"""GPU kernels with nothing real in them, and folders of Triton and FlashInfer as those lay them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenspeed.compile.kernel_store import (
    BUILD,
    FLASHINFER,
    NAME,
    TRITON,
    Kernel,
    build_key,
    environment_of,
)

ELF = b"\x7fELF"
ENVIRONMENT = environment_of({"versions": {"torch": "2.13"}})
KEY, MODULE_KEY = "6YQNJ" + "A" * 47, "7Z" * 26
LAUNCHER = "__triton_launcher.cpython-311-x86_64-linux-gnu.so"
PREFILL = "batch_prefill_with_kv_cache_" + "_".join(["dtype_q_bf16"] * 14) + "_use_swa_False_sm90"


def triton_kernel(key: str = KEY, environment: str = ENVIRONMENT) -> Kernel:
    metadata = json.dumps({"name": "fill", "shared": 0}).encode()
    return Kernel(TRITON, environment, key, {"fill.cubin": ELF + b"cubin", "fill.json": metadata})


def triton_module() -> Kernel:
    return Kernel(TRITON, ENVIRONMENT, MODULE_KEY, {LAUNCHER: ELF + b"launcher"})


def flashinfer_build(name: str = PREFILL) -> Kernel:
    files = {BUILD: ELF + b"prefill", NAME: name.encode()}
    return Kernel(FLASHINFER, ENVIRONMENT, build_key(name), files)


def all_kinds() -> list[Kernel]:
    return [triton_kernel(), triton_module(), flashinfer_build()]


def fill_triton(cache: Path, kernel: Kernel, *, is_finished: bool = True) -> None:
    """Put a kernel into a cache of Triton's as Triton 3.6 does, with its intermediate code."""
    folder = cache / kernel.key
    folder.mkdir(parents=True)
    files = dict(kernel.files)
    if "fill.json" in files:
        files |= {f"fill.{end}": b"text" for end in ("source", "ttir", "ttgir", "llir", "ptx")}
        paths = {name: str(folder / name) for name in files}
        if is_finished:
            files["__grp__fill.json"] = json.dumps({"child_paths": paths}).encode()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def fill_workspace(base: Path, kernel: Kernel) -> None:
    """Put a build into a workspace of FlashInfer's as FlashInfer 0.6.11 and ninja do."""
    name = kernel.files[NAME].decode()
    folder = base / ".cache" / "flashinfer" / "90a" / "cached_ops" / name
    folder.mkdir(parents=True)
    for file in ("build.ninja", ".ninja_log", f"{name}.cuda.o"):
        (folder / file).write_text(str(folder))
    (folder / f"{name}.so").write_bytes(kernel.files[BUILD])
    (folder.parent / "tmp").mkdir()
    (folder.parent / "tmp" / f"{name}.lock").touch()
