"""Filling a model: slots of merged parameters, what must fit, dtypes, progress, dummy weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from smollm2_folder import write_weights
from torch import Tensor, nn

from tokenspeed.loader import LoadReport, empty_model, load_weights
from tokenspeed.loader.slots import weight_slots
from tokenspeed.text.errors import ModelError
from tokenspeed.text.source import ModelSource

TABLE = {
    "model.layers.*.q_proj": ("layers.*.qk_proj", 0),
    "model.layers.*.k_proj": ("layers.*.qk_proj", 1),
    "model.norm": ("norm", 0),
    "lm_head": ("lm_head", 0),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk_proj = nn.Linear(3, 6)
        self.qk_proj.sizes = [4, 2]


class Model(nn.Module):
    """Two layers with a merged linear, a norm, perhaps a head, and a computed buffer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(3, bias=False)
        if not tied:
            self.lm_head = nn.Linear(3, 7, bias=False)
        self.register_buffer("positions", torch.empty(4, dtype=torch.float32), persistent=False)

    def fill_buffers(self) -> None:
        self.positions.copy_(torch.arange(4))


def checkpoint() -> dict[str, Tensor]:
    shapes = {"model.norm.weight": (3,), "lm_head.weight": (7, 3)}
    for layer in range(2):
        for part, rows in (("q", 4), ("k", 2)):
            shapes[f"model.layers.{layer}.{part}_proj.weight"] = (rows, 3)
            shapes[f"model.layers.{layer}.{part}_proj.bias"] = (rows,)
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def source_at(folder: Path, **config: Any) -> ModelSource:
    return ModelSource("tiny", folder, "folder", config, {})


def load(model: nn.Module, source: ModelSource, load_format: str = "auto", **kw: Any) -> LoadReport:
    kw = {"seed": 0, "progress": None} | kw
    return load_weights(model, TABLE, source, load_format=load_format, **kw)


def make(dtype: torch.dtype = torch.float32, tied: bool = False) -> Any:
    return empty_model(lambda: Model(tied), dtype, "cpu")


def test_an_empty_model_has_its_dtype_and_its_buffers() -> None:
    state = torch.get_rng_state()
    model = make(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.positions.dtype == torch.float32 and model.positions.tolist() == [0, 1, 2, 3]
    assert not model.training and torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), state)


def test_the_default_dtype_survives_a_failing_constructor() -> None:
    with pytest.raises(ZeroDivisionError):
        empty_model(lambda: 1 // 0, torch.bfloat16, "cpu")  # type: ignore[arg-type,return-value]
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_slot_is_filled_and_converted(
    tmp_path: Path, dtype: torch.dtype, stored: torch.dtype, num_shards: int
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in checkpoint().items()}
    write_weights(tmp_path, tensors, num_shards)
    model, seen = make(dtype), []
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    report = load(model, source_at(tmp_path), progress=lambda *p: seen.append(p))
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for leaf in ("weight", "bias"):
            merged = torch.cat([tensors[f"{prefix}{part}_proj.{leaf}"] for part in "qk"])
            assert torch.equal(getattr(model.layers[layer].qk_proj, leaf), merged.to(dtype))
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"].to(dtype))
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"].to(dtype))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert report.bytes == total and report.num_tensors == len(tensors) and report.seconds > 0
    done = [done for done, _ in seen]
    assert done == sorted(done) and seen[-1] == (total, total) and len(seen) == len(tensors)


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors["model.layers.1.k_proj.bias"]
    tensors["model.layers.2.q_proj.weight"] = torch.zeros(4, 3)
    tensors["model.norm.weight"] = torch.zeros(5)
    write_weights(tmp_path, tensors)
    with pytest.raises(ModelError) as error:
        load(make(), source_at(tmp_path))
    message = str(error.value)
    assert "missing tensors: model.layers.1.k_proj.bias;" in message
    assert "unknown tensors: model.layers.2.q_proj.weight;" in message
    assert "wrong shape: model.norm.weight [5] instead of [3]" in message
    assert "\n" not in message and message.startswith("tiny:")


def test_equal_sizes_of_other_shapes_do_not_fit(tmp_path: Path) -> None:
    """q with 2 rows and k with 4 would fill the merged weight, in the wrong places."""
    tensors = checkpoint()
    q, k = "model.layers.0.q_proj.weight", "model.layers.0.k_proj.weight"
    write_weights(tmp_path, {**tensors, q: tensors[k], k: tensors[q]})
    with pytest.raises(ModelError, match=r"layers\.0\.q_proj\.weight \[2, 3\] instead of \[4, 3\]"):
        load(make(), source_at(tmp_path))


def test_long_lists_are_cut(tmp_path: Path) -> None:
    surplus = {f"model.extra.{i}": torch.zeros(1) for i in range(40)}
    write_weights(tmp_path, {**checkpoint(), **surplus})
    with pytest.raises(
        ModelError, match=r"unknown tensors: (model\.extra\.\d+, ){4}.* and 35 more"
    ):
        load(make(), source_at(tmp_path))


def test_known_leftovers_are_ignored(tmp_path: Path) -> None:
    rope = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    write_weights(tmp_path, {**checkpoint(), **rope})
    assert load(make(tied=True), source_at(tmp_path)).num_tensors == len(checkpoint()) - 1
    report = load(make(), source_at(tmp_path))
    assert report.num_tensors == len(checkpoint())


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors["lm_head.weight"]
    write_weights(tmp_path, tensors)
    with pytest.raises(ModelError, match=r"missing tensors: lm_head\.weight"):
        load(make(), source_at(tmp_path))


@pytest.mark.parametrize("value", [{"quant_method": "fp8"}, {}, "x"])
def test_quantised_checkpoints_are_refused(tmp_path: Path, value: Any) -> None:
    write_weights(tmp_path, checkpoint())
    with pytest.raises(ModelError, match="weights quantised with"):
        load(make(), source_at(tmp_path, quantization_config=value))


def test_load_format_must_fit_the_source(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--load-format gguf does not fit"):
        load(make(), source_at(tmp_path), "gguf")
    gguf = ModelSource("x", tmp_path / "x.gguf", "gguf", {}, {})
    with pytest.raises(ModelError, match="--load-format safetensors does not fit"):
        load(make(), gguf, "safetensors")


def test_dummy_weights_need_no_file(tmp_path: Path) -> None:
    models = [make() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        load(model, source_at(tmp_path / "absent"), "dummy", seed=seed)
    first, same, other = (dict(model.named_parameters()) for model in models)
    for name in first:
        assert torch.equal(first[name], same[name]) and not torch.equal(first[name], other[name])
        assert first[name].isfinite().all()
    assert (first["norm.weight"] - 1).abs().max() < 0.2
    assert first["layers.0.qk_proj.bias"].abs().max() < 0.2
    assert not torch.equal(first["layers.0.qk_proj.weight"], first["layers.1.qk_proj.weight"])


def test_dummy_weights_depend_on_the_name_alone(tmp_path: Path) -> None:
    """Not on dtype (but for rounding) nor on which other tensors the model has."""
    wide, narrow = make(), make(torch.bfloat16, tied=True)
    for model in (wide, narrow):
        load(model, source_at(tmp_path), "dummy", seed=3)
    assert torch.equal(wide.norm.weight.bfloat16(), narrow.norm.weight)


def test_a_table_that_misses_a_slot_is_a_bug() -> None:
    model = Model()
    for source in TABLE:
        table = {name: target for name, target in TABLE.items() if name != source}
        with pytest.raises(AssertionError):
            weight_slots(model, table)
    with pytest.raises(AssertionError, match="two rows"):
        weight_slots(model, {**TABLE, "again": ("norm", 0)})
    with pytest.raises(AssertionError):
        weight_slots(model, {**TABLE, "again": ("layers.*.qk_proj", 2)})
