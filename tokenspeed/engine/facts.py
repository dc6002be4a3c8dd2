"""The facts that `resolve` settles open settings by: of this machine, and of a model's files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.compile.cache import cache_root
from tokenspeed.config import Config
from tokenspeed.engine.attention_makers import ATTENTION_MAKERS
from tokenspeed.kernels.attention_flashinfer import DTYPES, HEAD_DIM, leaves_to_triton
from tokenspeed.kernels.attention_step import AttentionSpec
from tokenspeed.kernels.flashinfer_builds import (
    fp8_prefill_name,
    is_built,
    is_installed,
    prefill_name,
)
from tokenspeed.kernels.triton_jit import HAS_KERNELS
from tokenspeed.machine_facts import FlashInferFacts, MachineFacts
from tokenspeed.models.family import DecoderConfig, Family
from tokenspeed.resolve import ModelFacts
from tokenspeed.text.source import ModelSource, is_local


def machine_facts(config: Config) -> MachineFacts:
    """What this machine has, as far as a start with these settings would use it."""
    root = str(cache_root(config.compile.cache_dir))
    has_cuda = config.model.device != "cpu" and torch.cuda.is_available()
    if not has_cuda:
        return MachineFacts(has_cuda=False, has_kernels=HAS_KERNELS, cache_root=root)
    built = [each for each in DTYPES if is_built(prefill_name(each, HEAD_DIM))]
    built_fp8 = [each for each in built if is_built(fp8_prefill_name(each, HEAD_DIM))]
    return MachineFacts(
        has_cuda=True,
        capability=torch.cuda.get_device_capability(),
        has_kernels=HAS_KERNELS,
        flashinfer=FlashInferFacts(
            is_installed=is_installed(),
            built=list(map(_name, built)),
            built_fp8=list(map(_name, built_fp8)),
            dtypes=[_name(dtype) for dtype in DTYPES],
            head_dim=HEAD_DIM,
        ),
        cache_root=root,
    )


def model_facts(source: ModelSource, family: Family, numbers: DecoderConfig) -> ModelFacts:
    """What the files of a model say of it."""
    stored = source.config.get("torch_dtype")
    return ModelFacts(
        stored="gguf" if source.kind == "gguf" else "safetensors",
        dtype=None if stored is None else str(stored),
        max_model_len=numbers.max_model_len,
        unserved=unserved(family.cache_specs(numbers)),
        is_local=is_local(source.name),
    )


def unserved(specs: Sequence[AttentionSpec]) -> dict[str, str]:
    """Why attention backends cannot run these layers, or would gain nothing there, by their names;
    those that can are left out.
    """
    found: dict[str, str] = {}
    for name, maker in ATTENTION_MAKERS.items():
        lacks = [why for spec in specs if (why := maker.kind.supports(spec)) is not None]
        if lacks:
            found[name] = lacks[0]
    left = [leaves_to_triton(spec) for spec in specs]
    if "flashinfer" not in found and left[0] is not None and None not in left:
        found["flashinfer"] = f"{left[0]}, and would attend no layer"
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
