"""Every model family, tiny: captured without weights, few layers give the plan of all, and it runs
as the module does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_tiny import VOCAB, one_sequence, random_model, tiny_family
from torch import nn

from tokenspeed.compile.pipeline import plan_model
from tokenspeed.compile.runner import Executable
from tokenspeed.models import MODELS

CPU = torch.device("cpu")
EXTRA = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    ("extra", "dtype"),
    [({}, torch.float32), ({}, torch.bfloat16), (EXTRA, torch.float32)],
    ids=["float32", "bfloat16", "extra"],
)
@pytest.mark.parametrize("architecture", MODELS)
def test_the_plan_of_a_family(architecture: str, extra: dict[str, Any], dtype: torch.dtype) -> None:
    family, config = tiny_family(architecture, **extra)

    def make() -> nn.Module:
        return family.model(config)

    program, whole = (
        plan_model(make, dtype=dtype, device=CPU, every_layer=every) for every in (False, True)
    )
    assert program.plan == whole.plan
    assert program.pieces.keys() == whole.pieces.keys()
    assert len(program.pieces) == 5

    model: Any = random_model(make, dtype)
    model.fill_buffers()
    run = Executable(program, model)
    for size in (1, 7, 64):
        ids, positions = torch.arange(size) * 7 % VOCAB, torch.arange(size)
        with one_sequence():
            hidden = model(model.embed(ids), positions)
            assert torch.equal(run.forward(run.embed(ids), positions), hidden)
        assert torch.equal(run.head(hidden), model.head(hidden))
