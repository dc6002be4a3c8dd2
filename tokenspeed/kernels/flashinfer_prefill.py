"""FlashInfer itself, 0.6.11: causal prefill by FlashAttention-3, of pages, and of a step's own keys
where no kernel of our own serves; pages of another dtype than the queries by FlashAttention-2.
Importing it takes seconds.

The kernel is made for a dtype and a head size. Where no build of it comes with the package (as
flashinfer-jit-cache does) or is kept, FlashInfer compiles it when it is first planned: for five
minutes.
"""

from __future__ import annotations

import torch
from flashinfer.jit import env
from flashinfer.jit.core import JitSpec
from flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)

from tokenspeed.kernels.attention_flashinfer import Prefill
from tokenspeed.kernels.flashinfer_builds import offer_kept, watch
from tokenspeed.kernels.gluon_jit import runs_gluon
from tokenspeed.kernels.hopper_planned import HopperPrefill

offer_kept(env)
watch(JitSpec)


def make_prefill(device: torch.device, *, converts: bool) -> Prefill:
    """Wrappers for one cache group: layouts [pages, page size, heads, head size] and [tokens,
    heads, head size]. `converts`: pages have another dtype than queries.
    """
    # For rows whose keys are split among programs: FlashAttention-3 never does that, and plans of
    # the other forbid it.
    workspace = torch.empty(1 << 16, dtype=torch.uint8, device=device)
    paged = BatchPrefillWithPagedKVCacheWrapper(
        workspace, "NHD", backend="fa2" if converts else "fa3"
    )
    if runs_gluon(device):
        return Prefill(paged, HopperPrefill(device))
    return Prefill(paged, BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3"))
