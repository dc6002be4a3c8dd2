"""GGUF weights: equal to the gguf package's, named and ordered as the HF checkpoint has them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from tokenspeed.loader.gguf import GgufFile, halves_apart
from tokenspeed.text.errors import ModelError
from tokenspeed.text.gguf import read_gguf
from tokenspeed.text.source import resolve_model


@pytest.fixture(scope="module")
def bundled() -> Path:
    return resolve_model("smollm2").path


def packaged(path: Path, name: str) -> Tensor:
    """A tensor as the gguf package reads it, in the order of the file."""
    info = read_gguf(path).tensors[name]
    raw = np.memmap(path, np.uint8, "r", info.start, info.num_bytes)
    rows = raw.reshape(info.shape[0] if len(info.shape) > 1 else 1, -1)
    return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[info.type]).copy())


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
        ("model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"),
        ("model.layers.7.self_attn.v_proj.weight", "blk.7.attn_v.weight"),
        ("model.layers.29.self_attn.o_proj.weight", "blk.29.attn_output.weight"),
        ("model.layers.12.mlp.gate_proj.weight", "blk.12.ffn_gate.weight"),
        ("model.layers.12.mlp.up_proj.weight", "blk.12.ffn_up.weight"),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
    ],
)
def test_bundled_tensors_equal_the_packages(bundled: Path, name: str, stored: str) -> None:
    tensor = GgufFile(bundled).read(name)
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, packaged(bundled, stored).view(tensor.shape))


@pytest.mark.parametrize(("part", "heads"), [("q", 9), ("k", 3)])
def test_bundled_q_and_k_rows_are_put_back(bundled: Path, part: str, heads: int) -> None:
    """Row 2i of a head in the file is row i in HF, row 2i + 1 is row i + D / 2."""
    tensor = GgufFile(bundled).read(f"model.layers.5.self_attn.{part}_proj.weight")
    stored = packaged(bundled, f"blk.5.attn_{part}.weight")
    for head in range(heads):
        ours, theirs = tensor[head * 64 :][:64], stored[head * 64 :][:64]
        assert torch.equal(ours[:32], theirs[0::2]) and torch.equal(ours[32:], theirs[1::2])


def test_bundled_file_is_read_in_seconds(bundled: Path) -> None:
    began = time.process_time()
    file = GgufFile(bundled)
    num_elements = sum(file.read(name).numel() for name in file.shapes)
    assert num_elements == 134_515_008
    assert time.process_time() - began < 20  # 1 to 3 s; the limit is for a busy machine


def write_gguf(
    path: Path, arch: str, tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType]]
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    for name, (values, kind) in tensors.items():
        data = quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", TYPES)
def test_every_common_type(tmp_path: Path, kind: str) -> None:
    values = random(6, 64)
    stored = {"blk.0.ffn_up.weight": (values, GGMLQuantizationType[kind])}
    file = GgufFile(write_gguf(tmp_path / "x.gguf", "llama", stored))
    read = file.read("model.layers.0.mlp.up_proj.weight")
    assert file.shapes == {"model.layers.0.mlp.up_proj.weight": (6, 64)}
    assert read.shape == (6, 64) and (read - torch.from_numpy(values)).abs().max() < 0.5
    if kind == "F32":
        assert torch.equal(read, torch.from_numpy(values))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_only_llama_files_are_interleaved(tmp_path: Path, arch: str) -> None:
    """Biases too: a llama with attention_bias has them in the order of its rows."""
    f32 = GGMLQuantizationType.F32
    values = {
        "attn_q.weight": random(32, 8),
        "attn_q.bias": random(32),
        "attn_k.weight": random(16, 8),
        "attn_v.weight": random(16, 8),
    }
    stored = {f"blk.0.{name}": (value, f32) for name, value in values.items()}
    file = GgufFile(write_gguf(tmp_path / "x.gguf", arch, stored))
    for name, value in values.items():
        part, leaf = name.removeprefix("attn_").split(".")
        heads = {"q": 4, "k": 2}.get(part)
        expected = torch.from_numpy(value)
        if arch == "llama" and heads:
            expected = halves_apart(expected, heads)
            assert not torch.equal(expected, torch.from_numpy(value))
        assert torch.equal(file.read(f"model.layers.0.self_attn.{part}_proj.{leaf}"), expected)


def test_halves_apart() -> None:
    rows = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 10, 14, 11, 15, 12, 16, 13, 17])
    expected = [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17]
    assert halves_apart(rows, 2).tolist() == expected
    assert halves_apart(rows[:, None], 2).flatten().tolist() == expected


def test_unknown_names_stay_and_rope_factors_belong_to_the_config(tmp_path: Path) -> None:
    f32 = GGMLQuantizationType.F32
    stored = {"rope_freqs.weight": (random(4), f32), "blk.0.odd.weight": (random(4), f32)}
    file = GgufFile(write_gguf(tmp_path / "x.gguf", "llama", stored))
    assert list(file.shapes) == ["blk.0.odd.weight"]


def test_types_that_are_not_weights_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("output_norm.weight", np.arange(4, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"output_norm\.weight has type I32"):
        GgufFile(path).read("model.norm.weight")


def test_a_file_that_shrinks_after_the_check(tmp_path: Path) -> None:
    stored = {"output_norm.weight": (random(64), GGMLQuantizationType.F32)}
    path = write_gguf(tmp_path / "x.gguf", "qwen2", stored)
    file = GgufFile(path)
    path.write_bytes(path.read_bytes()[:-70])
    with pytest.raises(ModelError, match=r"shorter.*output_norm\.weight"):
        file.read("model.norm.weight")


def test_the_package_is_asked_for(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent: Any = None
    monkeypatch.setitem(sys.modules, "gguf", absent)
    with pytest.raises(ModelError, match=r"pip install 'tokenspeed\[gguf\]'"):
        GgufFile(bundled)
