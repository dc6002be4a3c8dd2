"""The storage of the paged cache: one tensor of keys and one of values a layer.

Its dtype may be narrower than the one that is computed in: then numbers are divided by their
layer's scale when they are written, and multiplied by it when they are read.

A page is a row of every layer's tensors at once: page id p of a group names `keys[layer][p]` for
all the layers of that group. Which page belongs to whom is the allocator's business.
"""

from __future__ import annotations

import math
import mmap

import torch

from tokenspeed.kv.specs import CacheGroup, LayerScales

KV_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""What `kv_cache_dtype` settles to."""


def bytes_per_page(groups: list[CacheGroup], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one more page costs, summed over all layers."""
    elements = sum(len(group.layers) * group.spec.elements_per_token() for group in groups)
    return elements * block_size * dtype.itemsize


class PagePool:
    """`keys[layer]` and `values[layer]`: [num_pages + 1, block_size, num_kv_heads, head_dim], zero
    at first. The last page is `scratch_page`. `k_scales[layer]` and `v_scales[layer]` multiply what
    is read.
    """

    def __init__(
        self,
        groups: list[CacheGroup],
        num_pages: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: LayerScales | None = None,
    ) -> None:
        """One page more than `num_pages` is made, for rows that only fill a batch up. `scales`: of
        each layer's keys and values; 1 if not given.
        """
        assert num_pages > 0 and block_size > 0, f"a pool of {num_pages} pages of {block_size}"
        spec_of = {layer: group.spec for group in groups for layer in group.layers}
        assert sorted(spec_of) == list(range(len(spec_of))), "cache groups must cover every layer"
        self.num_pages = num_pages
        self.scratch_page = num_pages
        self.block_size = block_size
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        scales = [(1.0, 1.0)] * len(spec_of) if scales is None else scales
        assert len(scales) == len(spec_of), f"scales of {len(scales)} of {len(spec_of)} layers"
        self.k_scales = [k_scale for k_scale, _ in scales]
        self.v_scales = [v_scale for _, v_scale in scales]
        for layer in range(len(spec_of)):
            spec = spec_of[layer]
            shape = (num_pages + 1, block_size, spec.num_kv_heads, spec.head_dim)
            self.keys.append(_zeros(shape, dtype, device))
            self.values.append(_zeros(shape, dtype, device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU a private anonymous mapping: zero without being written, and a page of it takes
    memory only once it is used, so that a pool sized for the whole machine starts at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"a KV cache with {num_bytes / 2**30:.1f} GiB of keys in each layer does not fit into "
            "memory; lower --max-total-tokens"
        ) from error
    return torch.frombuffer(mapping, dtype=dtype).view(shape)
