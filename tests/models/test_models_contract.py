"""What the engine relies on: tables that match the module, functions that can be captured."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from checkpoints import SIZES
from dense_state import DenseState
from torch import nn

from tokenspeed.batch import forward_context
from tokenspeed.compile.pipeline import plan_model
from tokenspeed.compile.runner import Executable
from tokenspeed.kv.specs import FullAttention, cache_groups
from tokenspeed.loader.slots import weight_slots
from tokenspeed.models import MODELS

CPU = torch.device("cpu")
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
    assert set(family.shards) - {"lm_head"} <= modules
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


@every_family
def test_captured_without_weights_and_at_any_depth(name: str, extra: dict[str, Any]) -> None:
    """Dynamo takes the module as it is; few layers give the plan of all; the plan computes the
    model.
    """
    family, config = MODELS[name], config_of(name, extra, num_layers=6)
    program, whole = (
        plan_model(lambda: family.model(config), dtype=torch.float32, device=CPU, every_layer=every)
        for every in (False, True)
    )
    assert program.plan == whole.plan and len(program.plan.piece_hashes()) == 5
    model = build(name, extra, num_layers=6)
    executable = Executable(program, model)
    for num_tokens in (1, 5):
        ids, positions = torch.arange(num_tokens), torch.arange(num_tokens)
        with forward_context(DenseState(6, 0.25)):
            expected = model.head(model(model.embed(ids), positions))
        with forward_context(DenseState(6, 0.25)):
            logits = executable.head(executable.forward(executable.embed(ids), positions))
        assert torch.allclose(logits, expected, atol=1e-5)
