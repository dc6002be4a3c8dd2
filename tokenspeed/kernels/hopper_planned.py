"""Prefill of rows that begin their sequence, by `hopper_prefill`, planned on the host.

A plan is a table of blocks of queries, made once for all layers of a step: it lies on the way to a
first token, so it is a few numpy calls and one copy that nobody waits for. Programs find in it what
is theirs by counting (`hopper_blocks.item_of`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed.kernels.hopper_blocks import BLOCK, DTYPES
from tokenspeed.kernels.hopper_prefill import launch


class HopperPrefill:
    """A `RaggedPrefill` of `attention_flashinfer.py`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: Tensor | None = None
        self._num_tokens = 0
        self._scale = 0.0

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
    ) -> None:
        """Rows begin and end at `qo_indptr` (int32, on the host), their keys at the same places."""
        assert causal and torch.equal(qo_indptr, kv_indptr), "rows attend to their own tokens"
        assert num_qo_heads % num_kv_heads == 0, f"{num_qo_heads} heads of {num_kv_heads}"
        assert head_dim_qk == BLOCK, f"heads of {BLOCK}, not {head_dim_qk}"
        assert q_data_type in DTYPES, f"no kernel for {q_data_type}"
        table = torch.from_numpy(blocks_of(qo_indptr.numpy()))
        if self._device.type == "cuda":
            table = table.pin_memory().to(self._device, non_blocking=True)
        self._blocks, self._num_tokens, self._scale = table, int(qo_indptr[-1]), sm_scale

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> None:
        """For the planned rows' tokens: q and out [T, Hq, 128], k and v [T, Hkv, 128]."""
        assert self._blocks is not None, "run before plan"
        assert len(q) == self._num_tokens, f"{len(q)} tokens, {self._num_tokens} planned"
        launch(q, k, v, out, self._blocks, self._scale)


def blocks_of(starts: NDArray[np.int32]) -> NDArray[np.int32]:
    """As `hopper_prefill.launch` takes them, of rows that begin at `starts` and end at the next."""
    lengths = np.diff(starts)
    counts = -(-lengths // BLOCK)
    rows = np.repeat(np.arange(len(lengths)), counts)
    numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    # A block reads as many blocks of keys as its place in its sequence says.
    order = np.argsort(-numbers, kind="stable")
    rows, numbers = rows[order], numbers[order]
    columns = (numbers * BLOCK, lengths[rows], starts[1:][rows])
    return np.stack(columns, axis=1, dtype=np.int32, casting="same_kind")
