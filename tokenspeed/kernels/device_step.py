"""One step as attention backends on a device see it: tensors of the device, and a few bounds.

Made once a step, or once for a CUDA graph whose replays change only what the tensors hold. Sizes: B
rows of T query tokens in sum. A padded batch of decodes has rows of a scratch slot, whose table
points to a scratch page and whose context is one token long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tokenspeed.batch import SequenceState
from tokenspeed.kernels.attend import FusesPrologue
from tokenspeed.kernels.attention_step import AttentionStep


@dataclass(frozen=True)
class DeviceStep:
    """Row i has the query tokens `query_starts[i]` up to `query_starts[i + 1]`: the last of its
    `context_lens[i]` tokens, in the pages that the table of slot `slots[i]` names.
    """

    num_rows: int
    num_tokens: int
    max_query_len: int
    """1: decodes alone, one token a row."""
    max_context_len: int
    """A bound that the host knows; kernels read the lengths themselves on the device."""
    slots: Tensor
    """int32 [B]."""
    query_starts: Tensor
    """int32 [B + 1]."""
    context_lens: Tensor
    """int32 [B], with this step's tokens."""
    positions: Tensor
    """int64 [T]: the place of each token in its sequence."""
    token_rows: Tensor
    """int32 [T]: the row of each token."""
    num_decodes: int = 0
    """So many of the first rows are known to have one token each: kernels for decodes take them."""
    host: AttentionStep | None = None
    """The rows behind those as the host knows them, for kernels that are planned there; starts
    count from the first token of these rows. None where only the device knows: in a CUDA graph.
    """

    def __post_init__(self) -> None:
        sizes = {
            "slots": (self.slots, self.num_rows, torch.int32),
            "query_starts": (self.query_starts, self.num_rows + 1, torch.int32),
            "context_lens": (self.context_lens, self.num_rows, torch.int32),
            "positions": (self.positions, self.num_tokens, torch.int64),
            "token_rows": (self.token_rows, self.num_tokens, torch.int32),
        }
        for name, (tensor, size, dtype) in sizes.items():
            assert tensor.shape == (size,) and tensor.dtype == dtype and tensor.is_contiguous(), (
                f"{name} must be dense {dtype} [{size}], not {tensor.dtype} {list(tensor.shape)}"
            )
        assert 0 < self.max_query_len <= self.num_tokens, f"{self.max_query_len} tokens in a row"
        assert self.max_query_len <= self.max_context_len, "a context holds its queries"
        assert self.max_query_len > 1 or self.num_tokens == self.num_rows, "a token for each row"
        assert 0 <= self.num_decodes < self.num_rows + (self.max_query_len == 1), (
            f"{self.num_decodes} rows of decodes among {self.num_rows}"
        )
        assert self.host is None or self.host.query_starts[-1] == self.num_tokens - self.num_decodes

    def decodes(self) -> DeviceStep:
        """The first `num_decodes` rows."""
        n = self.num_decodes
        return replace(
            self, num_rows=n, num_tokens=n, max_query_len=1, slots=self.slots[:n],
            query_starts=self.query_starts[: n + 1], context_lens=self.context_lens[:n],
            positions=self.positions[:n], token_rows=self.token_rows[:n], host=None,
        )  # fmt: skip

    def chunks(self) -> DeviceStep:
        """The rows behind them, whose query tokens keep their places among all T of the step:
        the tensors of tokens still hold those of the decodes.
        """
        n = self.num_decodes
        return replace(
            self, num_rows=self.num_rows - n, slots=self.slots[n:],
            query_starts=self.query_starts[n:], context_lens=self.context_lens[n:], num_decodes=0,
            host=None,
        )  # fmt: skip


class DeviceAttention(SequenceState, FusesPrologue, Protocol):
    """A backend that works from device tensors alone, so that its calls fit into a CUDA graph."""

    fuses_prologue: ClassVar[bool]

    def plan_device(self, step: DeviceStep, results: Tensor | None = None) -> None:
        """Keep `step` for the calls to come: no copy, no wait for the device, no allocation, unless
        it brings what the `host` knows. With `results` (one dimension, room for every token's) each
        call leaves its result there, where the next call overwrites it, instead of in a new tensor.
        """

    def room_for_results(self, num_tokens: int) -> Tensor:
        """A tensor for `plan_device` that holds the results of any layer."""
