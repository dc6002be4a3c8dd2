"""Every model family, tiny: few captured layers give the plan of all, and it runs as the module
does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_tiny import one_sequence, random_model

from tokenspeed.compile.pipeline import plan_model
from tokenspeed.compile.runner import Executable
from tokenspeed.models import MODELS, family_of

CPU = torch.device("cpu")


def tiny_config(architecture: str, **changes: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
    }
    return {"architectures": [architecture], **sizes, **changes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", MODELS)
def test_the_plan_of_a_family(architecture: str, dtype: torch.dtype) -> None:
    tied = architecture == "LlamaForCausalLM"
    hf_config = tiny_config(architecture, tie_word_embeddings=tied)
    family = family_of(hf_config)
    config = family.config.from_dict(hf_config)

    def make() -> torch.nn.Module:
        return family.model(config)

    program = plan_model(make, dtype=dtype, device=CPU)
    full = plan_model(make, dtype=dtype, device=CPU, every_layer=True)
    assert program.plan == full.plan
    assert program.pieces.keys() == full.pieces.keys()
    assert len(program.pieces) == 5

    model = random_model(make)
    model = model.to(dtype)
    for module in model.modules():  # buffers keep their own dtype
        if hasattr(module, "inv_freq"):
            module.inv_freq = torch.linspace(1.0, 0.01, module.inv_freq.numel())
    run = Executable(program, model)
    for size in (1, 7, 64):
        ids, positions = torch.arange(size) * 7 % 60, torch.arange(size)
        with one_sequence():
            hidden = model(model.embed(ids), positions)
            assert torch.equal(run.forward(run.embed(ids), positions), hidden)
        assert torch.equal(run.head(hidden), model.head(hidden))
