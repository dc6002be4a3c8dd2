"""A GGUF served with its matrices in blocks: when it is, and that nothing but memory changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from block_gguf import HIDDEN, VOCAB, write_llama
from tiny_checkpoint import write_tiny_checkpoint
from torch import Tensor, nn

from tokenspeed.compile import inductor_api
from tokenspeed.compile.facts import differences
from tokenspeed.compile.key import facts_of
from tokenspeed.compile.kinds import kind_of
from tokenspeed.compile.lower import lower
from tokenspeed.compile.pipeline import plan_graphs, plan_model
from tokenspeed.compile.plan import Input, Tokens
from tokenspeed.compile.runner import Executable
from tokenspeed.config import Config, make_config
from tokenspeed.engine import block_weights
from tokenspeed.engine.block_weights import settle_layout
from tokenspeed.engine.model import ServedModel, resolve_served
from tokenspeed.engine.program import target_of
from tokenspeed.kernels import block_formats, blocks
from tokenspeed.loader import empty_model, load_weights
from tokenspeed.passes.rewrite import TokenRange
from tokenspeed.text.errors import ModelError


def served(path: Path | str, **options: Any) -> ServedModel:
    return resolve_served(config_of(path, **options))


def config_of(path: Path | str, **options: Any) -> Config:
    return make_config({"model": str(path), "device": "cpu", **options})


def loaded(model: ServedModel) -> nn.Module:
    module = empty_model(model.make, model.dtype, model.device)
    load_weights(module, model.family.weights, model.source)
    return module


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """References run: what is computed has the bits of the plain model."""
    monkeypatch.setattr(blocks, "_native", [])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    types = {"token_embd": "Q8_0", "blk.1.ffn_down": "Q4_0", "blk.2.attn_v": "Q8_0"}
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf", types)


def test_the_bundled_model_stays_as_it_is_stored() -> None:
    layout = served("smollm2").layout
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    expected = {f"layers.{i}.{name}": "Q4_1" for i in range(30) for name in names}
    assert layout == {"embed_tokens": "Q8_0", **expected}


def test_a_merged_weight_stored_in_two_formats_is_expanded(path: Path) -> None:
    layout = served(path).layout
    assert "layers.2.self_attn.qkv_proj" not in layout
    assert layout["layers.1.self_attn.qkv_proj"] == "Q4_1"
    assert layout["layers.1.mlp.down_proj"] == "Q4_0"
    assert len(layout) == 12


@pytest.mark.parametrize("stored", ["F16", "F32", "Q5_1"])
def test_types_without_kernels_are_expanded(tmp_path: Path, stored: str) -> None:
    assert served(write_llama(tmp_path / "x.gguf", {}, stored)).layout == {}


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"weight_layout": "plain"}, {"load_format": "dummy"}],
    ids=str,
)
def test_where_blocks_do_not_serve(path: Path, options: dict[str, str]) -> None:
    assert served(path, **options).layout == {}


def test_a_folder_has_no_blocks(tmp_path: Path) -> None:
    model = served(write_tiny_checkpoint(tmp_path))
    assert model.source.kind == "folder" and model.layout == {}


def test_without_a_compiler_the_model_is_plain(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(path)
    monkeypatch.setattr(block_weights, "obtain_native", lambda config: None)
    model = settle_layout(resolve_served(config), config)
    assert model.layout == {}
    assert not any(each.dtype == torch.uint8 for each in model.make().parameters())


def test_weights_are_the_same_numbers(path: Path) -> None:
    """Rows of q and k are put back in both."""
    plain = dict(loaded(served(path, weight_layout="plain")).named_parameters())
    packed = loaded(served(path))
    num_packed = 0
    for name, parameter in packed.named_parameters():
        module = packed.get_submodule(name.rpartition(".")[0])
        value: Tensor = parameter
        if isinstance(format := getattr(module, "format", None), str):
            value, num_packed = block_formats.expand(parameter, format), num_packed + 1
        assert torch.equal(value, plain[name]), name
    assert num_packed == 12


def test_the_program_computes_the_same(path: Path) -> None:
    results = []
    for layout in ("auto", "plain"):
        model = served(path, weight_layout=layout)
        program = plan_model(model.make, dtype=model.dtype, device=model.device)
        executable = Executable(program, loaded(model))
        ids = torch.tensor([1, 5, VOCAB - 1])
        results.append((executable.embed(ids), executable.head(torch.ones(2, HIDDEN))))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # inside Inductor
def test_compiled_pieces_compute_the_same(path: Path, tmp_path: Path) -> None:
    """`embed` and `head`: the two that read a packed weight and nothing else."""
    model, module = served(path), loaded(served(path))
    planned = plan_graphs(model.make, dtype=model.dtype, device=model.device)
    weight = cast(Any, module).embed_tokens.weight
    inputs = {"embed": torch.tensor([3, 0, VOCAB - 1]), "head": torch.randn(3, HIDDEN)}
    with inductor_api.compiling_in(tmp_path):
        for name, x in inputs.items():
            (row,) = cast(Any, getattr(planned.plan, name)).rows
            piece = planned.pieces[row.piece]
            given = {Input(0): x, Tokens(): 3}
            args = [given.get(arg, weight) for arg in row.args]
            compiled = inductor_api.load(lower(piece, "cpu", TokenRange(), None).data)
            assert "_blocks" in piece.code
            assert torch.equal(compiled(*args)[0], piece(*args)[0])


def test_layers_of_other_formats_are_of_another_kind(path: Path) -> None:
    model = served(path)
    layers = cast(Any, empty_model(model.make, model.dtype, model.device)).layers
    assert len({kind_of(layer, i) for i, layer in enumerate(layers)}) == 3


def test_the_layout_is_a_fact_of_the_key(path: Path) -> None:
    config, model = config_of(path), served(path)
    facts = facts_of(target_of(model, config))
    assert facts["layout"]["layers.*.mlp.down_proj"] == "0-0 Q4_1, 1-1 Q4_0, 2-2 Q4_1"
    assert facts["layout"]["layers.*.self_attn.qkv_proj"] == "0-1 Q4_1"
    assert "models/blocks.py" in facts["sources"]
    other = dataclasses.replace(model, layout={**model.layout, "embed_tokens": "Q4_1"})
    (found,) = differences(facts, facts_of(target_of(other, config)))
    assert found.name == "layout.embed_tokens"


def test_a_file_that_does_not_fit_is_refused_in_words(path: Path) -> None:
    model = served(path)
    config = dataclasses.replace(cast(Any, model.config), num_layers=2, intermediate_size=64)
    module = empty_model(dataclasses.replace(model, config=config).make, model.dtype, model.device)
    with pytest.raises(ModelError, match=r"unknown tensors: model\.layers\.2.*wrong shape"):
        load_weights(module, model.family.weights, model.source)
