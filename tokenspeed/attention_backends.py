"""The attention backends, the best first: what each needs of a machine and of dtypes.

How they are made, and which layers they serve, stands under the same names in
`engine/attention_makers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tokenspeed.machine_facts import MachineFacts

FP8 = "fp8_e4m3"
"""What a cache of fp8 is unless said otherwise."""


class Wanted(NamedTuple):
    """Where attention is to run, and in what: `cache_dtype` is that of the pages."""

    device: str
    dtype: str
    cache_dtype: str


Says = Callable[[MachineFacts, Wanted], str | None]
"""A reason, or None if there is none."""


def _nothing(machine: MachineFacts, wanted: Wanted) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """`devices`: where `auto` looks for it. `lacks`: why it cannot run here, whatever is installed.
    `missing`: what would have to be installed. `unbuilt`: why it would keep a start waiting, so
    that `auto` leaves it. `fits`: why it is the best.

    `uses_triton`: decodes are Triton's kernels, which CUDA graphs record, which read pages of a
    power of two tokens, and which know the dtypes that Triton knows on the GPU.
    """

    devices: tuple[str, ...]
    uses_triton: bool
    fits: Says
    lacks: Says = _nothing
    missing: Says = _nothing
    unbuilt: Says = _nothing


def _triton_lacks(machine: MachineFacts, wanted: Wanted) -> str | None:
    return None if machine.has_kernels else "its kernels need CUDA"


def _flashinfer_lacks(machine: MachineFacts, wanted: Wanted) -> str | None:
    library = machine.flashinfer
    if wanted.device == "cpu":
        return "it needs CUDA"
    if machine.capability != (9, 0):
        there = ".".join(map(str, machine.capability or ()))
        return f"it needs a GPU of compute capability 9.0, not {there}"
    if wanted.dtype not in library.dtypes:
        return f"it computes in {' or '.join(library.dtypes)}, not in {wanted.dtype}"
    if wanted.cache_dtype not in (wanted.dtype, FP8):
        return f"it reads a cache of {wanted.dtype} or {FP8}, not of {wanted.cache_dtype}"
    return None


def _flashinfer_missing(machine: MachineFacts, wanted: Wanted) -> str | None:
    return None if machine.flashinfer.is_installed else "flashinfer-python is not installed"


def _flashinfer_unbuilt(machine: MachineFacts, wanted: Wanted) -> str | None:
    library = machine.flashinfer
    built = library.built if wanted.cache_dtype == wanted.dtype else library.built_fp8
    if wanted.dtype in built:
        return None
    return "its kernel takes minutes to compile and comes built with flashinfer-jit-cache"


def _flashinfer_fits(machine: MachineFacts, wanted: Wanted) -> str:
    there = "".join(map(str, machine.capability or ()))
    with_past = "FlashAttention-2 for those with a past in fp8, "
    return (
        f"head size {machine.flashinfer.head_dim} on sm_{there}: FlashAttention-3 for prompts, "
        f"{'' if wanted.cache_dtype == wanted.dtype else with_past}Triton for the rest"
    )


ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    "flashinfer": AttentionBackend(
        devices=("cuda",),
        uses_triton=True,
        fits=_flashinfer_fits,
        lacks=_flashinfer_lacks,
        missing=_flashinfer_missing,
        unbuilt=_flashinfer_unbuilt,
    ),
    "triton": AttentionBackend(
        devices=("cuda",),
        uses_triton=True,
        fits=lambda machine, wanted: "the backend of GPUs",
        lacks=_triton_lacks,
    ),
    "torch": AttentionBackend(
        devices=("cuda", "cpu"),
        uses_triton=False,
        fits=lambda machine, wanted: "the backend of CPUs",
    ),
}


def uses_triton(name: str | None) -> bool:
    """Does this backend, or the one that may yet be chosen, decode by Triton's kernels?"""
    backend = ATTENTION_BACKENDS.get(name or "auto")
    return backend is None or backend.uses_triton
