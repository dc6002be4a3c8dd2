"""Rows for the sampler's tests, and one call that samples them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tokenspeed.batch import SlotStart
from tokenspeed.engine.sampler import Sampled, plan_sampling, sample
from tokenspeed.request import SamplingParams

EOS = frozenset({7})
MAX_LEN = 24
CPU = torch.device("cpu")


def start(
    slot: int, token_ids: list[int], num_prompt: int | None = None, **params: Any
) -> SlotStart:
    seed, index = params.pop("seed", 0), params.pop("sample_index", 0)
    return SlotStart(
        slot=slot,
        generation=1,
        token_ids=token_ids,
        num_prompt=len(token_ids) if num_prompt is None else num_prompt,
        params=SamplingParams(**params),
        seed=seed,
        sample_index=index,
    )


def draw(logits: np.ndarray, starts: list[SlotStart], masks: torch.Tensor | None = None) -> Sampled:
    """Sample one token for each start; row i of `logits` is that of `starts[i]`."""
    tokens = torch.zeros(1 + max(each.slot for each in starts), MAX_LEN, dtype=torch.int32)
    for each in starts:
        tokens[each.slot, : len(each.token_ids)] = torch.tensor(each.token_ids, dtype=torch.int32)
    plan = plan_sampling(starts, EOS, logits.shape[1], MAX_LEN, CPU)
    lengths = torch.tensor([len(each.token_ids) for each in starts])
    before = torch.from_numpy(logits.astype(np.float32))
    given = before.clone()
    found = sample(given, plan, tokens, lengths, masks)
    assert torch.equal(given.nan_to_num(5.5), before.nan_to_num(5.5)), (
        "logits must stay as they are"
    )
    return found
