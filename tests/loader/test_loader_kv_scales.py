"""Scales for a cache of fp8 in a checkpoint: found by all their names, complete and positive."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenspeed.loader import LoadReport, empty_model, load_weights
from tokenspeed.models import family_of
from tokenspeed.text.errors import ModelError
from tokenspeed.text.source import ModelSource, resolve_model

FORMS = {
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
    "compressed-tensors": ("k_scale", "v_scale"),
    "older": ("k_proj.output_scale", "v_proj.output_scale"),
}
VALUES = [(0.25, 3.0), (0.5, 1.0), (0.125, 0.75)]


def scales(form: str = "ModelOpt", shape: tuple[int, ...] = (1,)) -> dict[str, Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.full(shape, value)
        for layer, values in enumerate(VALUES)
        for name, value in zip(FORMS[form], values, strict=True)
    }


def load(tiny_model: str, folder: Path, more: dict[str, Tensor], config: str = "") -> LoadReport:
    save_file(load_file(Path(tiny_model, "model.safetensors")) | more, folder / "model.safetensors")
    text = Path(tiny_model, "config.json").read_text()
    (folder / "config.json").write_text(text[:-1] + config + "}")
    source: ModelSource = resolve_model(str(folder))
    family = family_of(source.config)
    model = empty_model(
        lambda: family.model(family.config.from_dict(source.config)), torch.float32, "cpu"
    )
    return load_weights(model, family.weights, source)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_are_read(
    tiny_model: str, tmp_path: Path, form: str, shape: tuple[int, ...]
) -> None:
    assert load(tiny_model, tmp_path, scales(form, shape)).kv_scales == VALUES


def test_most_checkpoints_have_none(tiny_model: str, tmp_path: Path) -> None:
    assert load(tiny_model, tmp_path, {}).kv_scales is None


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("model.layers.1.self_attn.v_proj.v_scale", None, "no scale of v of layer 1"),
        ("model.layers.3.self_attn.k_proj.k_scale", 1.0, "scales of layers that it has not"),
        ("model.layers.1.self_attn.k_scale", 1.0, "is a second scale of the same layer"),
        ("model.layers.1.self_attn.q_scale", 1.0, "unknown tensors: model.layers.1.self_attn.q_"),
        *(
            ("model.layers.2.self_attn.k_proj.k_scale", bad, "a scale is a positive number")
            for bad in (0.0, -1.0, math.inf, math.nan)
        ),
    ],
)
def test_scales_that_mean_nothing_are_refused(
    tiny_model: str, tmp_path: Path, name: str, value: float | None, says: str
) -> None:
    more = scales()
    if value is None:
        del more[name]
    else:
        more[name] = torch.tensor([value])
    with pytest.raises(ModelError, match=says):
        load(tiny_model, tmp_path, more)


def test_a_scale_of_each_head_is_refused(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="one scale a layer is understood"):
        load(tiny_model, tmp_path, scales(shape=(2,)))


def test_a_config_that_quantises_the_cache_alone_is_taken(tiny_model: str, tmp_path: Path) -> None:
    scheme = '"kv_cache_scheme": {"num_bits": 8, "type": "float"}'
    config = f', "quantization_config": {{"quant_method": "compressed-tensors", {scheme}'
    report = load(tiny_model, tmp_path, scales(), config + ', "config_groups": {}}')
    assert report.kv_scales == VALUES
    for groups in ("", ', "config_groups": {"group_0": {"targets": ["Linear"]}}'):
        with pytest.raises(ModelError, match="weights quantised with 'compressed-tensors'"):
            load(tiny_model, tmp_path, scales(), config + groups + "}")
