"""Linear layers and embeddings whose weight stays in blocks, as the checkpoint stores it.

    linear_blocks(x [T, K], w uint8 [N, bytes of K], format, bias [N]) -> [T, N]
    embedding_blocks(ids [T], w uint8 [N, bytes of K], format) -> [T, K]

A block's values are float32 numbers; expanding them where they are used gives the products that a
float32 copy of the weight would give, from a fraction of the bytes. A step with few tokens is bound
by these bytes. With many tokens, panels of the weight are expanded into the cache for torch's
product. All of it is float32; nothing is rounded to fewer bits.

With a native kernel a token's result is the same for every number of tokens up to `FEW_TOKENS`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels import block_formats
from tokenspeed.kernels.block_formats import row_size
from tokenspeed.kernels.blocks_cpu import BlockKernels

FEW_TOKENS = 128
"""Where torch's product of panels overtakes the kernel."""

_PANEL_BYTES = 4 << 20
"""Of expanded rows: little enough to be near when it is multiplied, enough for torch to be fast."""

_native: list[BlockKernels] = []
"""The kernels of this process, or none: the same for all models, whose results do not depend on
when they came.
"""


def install(kernels: BlockKernels) -> None:
    """Use these kernels from now on, in this process."""
    _native[:] = [kernels]


def reference(x: Tensor, w: Tensor, format: str, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, block_formats.expand(w, format), bias)


def run_linear(x: Tensor, w: Tensor, format: str, bias: Tensor | None = None) -> Tensor:
    """The op's body on a CPU."""
    if not _native:
        return reference(x, w, format, bias)
    x = x.contiguous()
    if x.shape[0] <= FEW_TOKENS:
        return _native[0].linear(x, w, format, bias)
    return _by_panels(x, w, format, bias, _native[0])


def _by_panels(
    x: Tensor, w: Tensor, format: str, bias: Tensor | None, native: BlockKernels
) -> Tensor:
    (num_tokens, size), num_rows = x.shape, w.shape[0]
    out = x.new_empty((num_tokens, num_rows))
    height = min(max(_PANEL_BYTES // (4 * size), 1), num_rows)
    room = x.new_empty((height, size))
    for first in range(0, num_rows, height):
        rows = w[first : first + height]
        panel, part = room[: len(rows)], out[:, first : first + len(rows)]
        native.expand(rows, format, panel)
        if bias is None:
            torch.mm(x, panel.t(), out=part)
        else:
            torch.addmm(bias[first : first + len(rows)], x, panel.t(), out=part)
    return out


def run_embedding(ids: Tensor, w: Tensor, format: str) -> Tensor:
    """The op's body on a CPU."""
    rows = w.index_select(0, ids)
    if not _native:
        return block_formats.expand(rows, format)
    out = torch.empty((len(rows), row_size(format, w.shape[1])))
    _native[0].expand(rows, format, out)
    return out


def _fake_linear(x: Tensor, w: Tensor, format: str, bias: Tensor | None = None) -> Tensor:
    assert x.dim() == w.dim() == 2, "linear_blocks takes x as [tokens, size] and w as rows of bytes"
    assert x.dtype == torch.float32, f"linear_blocks: x is {x.dtype}, not float32"
    assert w.dtype == torch.uint8 and w.is_contiguous(), "linear_blocks: w is no rows of bytes"
    size = row_size(format, w.shape[1])
    assert x.shape[1] == size, f"linear_blocks: x has rows of {x.shape[1]}, w of {size}"
    assert bias is None or bias.shape == (w.shape[0],), f"linear_blocks: bias {list(bias.shape)}"
    return x.new_empty(x.shape[0], w.shape[0])


def _fake_embedding(ids: Tensor, w: Tensor, format: str) -> Tensor:
    assert ids.dim() == 1 and w.dim() == 2, "embedding_blocks takes ids [tokens] and rows of bytes"
    assert w.dtype == torch.uint8 and w.is_contiguous(), "embedding_blocks: w is no rows of bytes"
    return w.new_empty(ids.shape[0], row_size(format, w.shape[1]), dtype=torch.float32)


_library: Any = torch.library.Library("tokenspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("linear_blocks(Tensor x, Tensor w, str format, Tensor? bias=None) -> Tensor")
_library.define("embedding_blocks(Tensor ids, Tensor w, str format) -> Tensor")
_library.impl("linear_blocks", run_linear, "CPU")
_library.impl("embedding_blocks", run_embedding, "CPU")
torch.library.register_fake("tokenspeed::linear_blocks", _fake_linear, lib=_library)
torch.library.register_fake("tokenspeed::embedding_blocks", _fake_embedding, lib=_library)

linear_blocks = torch.ops.tokenspeed.linear_blocks.default
embedding_blocks = torch.ops.tokenspeed.embedding_blocks.default
