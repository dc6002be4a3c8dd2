"""What the engine relies on: tables that match the module. (That its functions can be captured is
tried in tests/compile/test_compile_families.py.)
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from checkpoints import SIZES
from torch import nn

from tokenspeed.kv.specs import FullAttention, cache_groups
from tokenspeed.loader.slots import weight_slots
from tokenspeed.models import MODELS

EXTRA = [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}]
CASES = [(name, extra) for name in MODELS for extra in EXTRA]
every_family = pytest.mark.parametrize(("name", "extra"), CASES, ids=str)


def config_of(name: str, extra: dict[str, Any], num_layers: int = 2) -> Any:
    fields = {**SIZES, **extra, "num_hidden_layers": num_layers}
    return MODELS[name].config.from_dict(fields, None)


def build(name: str, extra: dict[str, Any], num_layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name].model(config_of(name, extra, num_layers)).requires_grad_(False)
    model.fill_buffers()
    return model


@every_family
def test_tables_match_the_module(name: str, extra: dict[str, Any]) -> None:
    family, model = MODELS[name], build(name, extra)
    slots = weight_slots(model, family.weights)
    assert sum(slot.numel() for slot in slots.values()) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    modules = {re.sub(r"\.\d+\.", ".*.", path) for path, _ in model.named_modules()}
    assert not modules & {"embed", "forward", "head"}


@every_family
def test_a_tied_head_is_one_parameter(name: str, extra: dict[str, Any]) -> None:
    model, tied = build(name, extra), bool(extra)
    names = [path for path, _ in model.named_parameters()]
    assert ("lm_head.weight" in names) != tied
    rows = torch.randn(3, SIZES["hidden_size"])
    weight = model.embed_tokens.weight if tied else model.lm_head.weight
    assert torch.equal(model.head(rows), rows @ weight.T)


@every_family
def test_cache_specs(name: str, extra: dict[str, Any]) -> None:
    (group,) = cache_groups(MODELS[name].cache_specs(config_of(name, extra, num_layers=3)))
    assert group.layers == (0, 1, 2)
    assert group.spec == FullAttention(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
