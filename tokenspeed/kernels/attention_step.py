"""One step's rows as the host knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionStep:
    """Row i has the query tokens `query_starts[i]` up to `query_starts[i + 1]`, the last of its
    `context_lens[i]` tokens; `page_tables[group][i]` names its pages (int64, on the host), at least
    as many as the context needs.
    """

    query_starts: list[int]
    context_lens: list[int]
    page_tables: Sequence[Sequence[Tensor]]
