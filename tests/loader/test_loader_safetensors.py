"""Weight folders that are incomplete, cut, contradictory or hostile are refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smollm2_folder import write_json, write_weights
from torch import Tensor

from tokenspeed.loader.safetensors import INDEX, SafetensorsFolder, read_header
from tokenspeed.text.errors import ModelError


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(4, 6, generator=generator),
        "b.weight": torch.randn(5, generator=generator).bfloat16(),
        "c.weight": torch.randn(2, 3, generator=generator).half(),
        "d.weight": torch.zeros(0, 7),
    }


def write_raw(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_reads_what_was_written(tmp_path: Path, num_shards: int) -> None:
    write_weights(tmp_path, tensors(), num_shards)
    folder = SafetensorsFolder(tmp_path)
    assert folder.shapes == {name: tuple(t.shape) for name, t in tensors().items()}
    for name, expected in tensors().items():
        read = folder.read(name)
        assert read.dtype == expected.dtype and torch.equal(read, expected)
        assert folder.num_bytes(name) == expected.nbytes


def test_shards_without_an_index(tmp_path: Path) -> None:
    write_weights(tmp_path, tensors(), num_shards=2)
    (tmp_path / INDEX).unlink()
    assert set(SafetensorsFolder(tmp_path).shapes) == set(tensors())


def test_data_at_an_odd_offset(tmp_path: Path) -> None:
    header = json.dumps({"a": entry("F32", [2], 0, 8)}).encode()
    header += b" " * (1 - len(header) % 2)
    write_raw(tmp_path / "model.safetensors", header, struct.pack("<2f", 1.5, -2.0))
    assert SafetensorsFolder(tmp_path).read("a").tolist() == [1.5, -2.0]


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_cut_file_is_named_with_its_tensor(tmp_path: Path, num_shards: int) -> None:
    write_weights(tmp_path, {"big.weight": torch.ones(1024), "other": torch.ones(3)}, num_shards)
    file = min(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1024])
    with pytest.raises(ModelError, match=rf"{file.name}.*cut short.*big\.weight"):
        SafetensorsFolder(tmp_path)


def test_a_file_that_shrinks_after_the_check(tmp_path: Path) -> None:
    write_weights(tmp_path, {"big.weight": torch.ones(1024)})
    folder = SafetensorsFolder(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"shorter.*big\.weight"):
        folder.read("big.weight")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a safetensors file"),
        (b"\x02\0\0", "not a safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "claims a header of 1152921504606846976"),
        (struct.pack("<Q", 0), "claims a header of 0"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 4) + b'{"a"', "not a JSON object"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "not a JSON object"),
        (struct.pack("<Q", 2) + b"{}x", "has 11 bytes, but its tensors end at byte 10"),
    ],
    ids=["empty", "3 bytes", "2^60", "zero", "list", "cut json", "deep json", "surplus byte"],
)
def test_damaged_files(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=match):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry("F32", [2], 0, 4)},
        {"a": entry("F32", [-1], 0, -4)},
        {"a": entry("F32", [1 << 62, 4], 0, 0)},
        {"a": entry("F32", [1.0], 0, 4)},  # type: ignore[list-item]
        {"a": entry("F32", [True], 0, 4)},
        {"a": entry("Q9", [1], 0, 4)},
        {"a": entry("F32", [1] * 99, 0, 4)},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}},
        {"a": None},
        {"a": entry("F32", [1], 4, 8)},
        {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)},
        {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)},
    ],
    ids=str,
)
def test_damaged_headers(tmp_path: Path, header: dict[str, Any]) -> None:
    file = tmp_path / "model.safetensors"
    write_raw(file, json.dumps(header).encode(), bytes(12))
    with pytest.raises(ModelError, match=r"model\.safetensors: .*tensor [ab]"):
        read_header(file)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "U8"])
def test_unsupported_dtypes_are_named(tmp_path: Path, dtype: str) -> None:
    header = json.dumps({"a.weight": entry(dtype, [12], 0, 12)}).encode()
    write_raw(tmp_path / "model.safetensors", header, bytes(12))
    with pytest.raises(ModelError, match=rf"a\.weight is {dtype}"):
        SafetensorsFolder(tmp_path)


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    write_json(folder / INDEX, index)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/a.safetensors",
        "../a.safetensors",
        "x/../../a.safetensors",
        "a.bin",
        "",
        "a\0.safetensors",
    ],
)
def test_index_paths_stay_inside(tmp_path: Path, path: str) -> None:
    write_weights(tmp_path, tensors(), num_shards=2)
    edit_index(tmp_path, lambda weight_map: weight_map.update({"a.weight": path}))
    with pytest.raises(ModelError, match=r"a\.weight points outside the folder"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("value", [3, None, ["a.safetensors"]])
def test_index_entries_are_strings(tmp_path: Path, value: Any) -> None:
    write_weights(tmp_path, tensors(), num_shards=2)
    edit_index(tmp_path, lambda weight_map: weight_map.update({"a.weight": value}))
    with pytest.raises(ModelError, match=r"a\.weight"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map(tmp_path: Path, text: str) -> None:
    write_weights(tmp_path, tensors(), num_shards=2)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json"):
        SafetensorsFolder(tmp_path)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    write_weights(tmp_path, tensors(), num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors.*absent"):
        SafetensorsFolder(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    write_weights(tmp_path, tensors(), num_shards=2)
    other = "model-00002-of-00002.safetensors"
    edit_index(tmp_path, lambda weight_map: weight_map.update({"a.weight": other}))
    with pytest.raises(ModelError, match=rf"a\.weight in {other}, but it is not there"):
        SafetensorsFolder(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write_weights(tmp_path, tensors(), num_shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"a\.weight is in both model-00001.*model-00002"):
        SafetensorsFolder(tmp_path)


def test_links_are_followed(tmp_path: Path) -> None:
    """A hub cache's snapshot folder consists of links to blobs beside it."""
    (tmp_path / "blobs").mkdir(), (tmp_path / "snapshot").mkdir()
    write_weights(tmp_path / "blobs", tensors(), num_shards=2)
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(Path("../blobs") / file.name)
    assert set(SafetensorsFolder(tmp_path / "snapshot").shapes) == set(tensors())


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"a\.safetensors: cannot be read: Is a directory"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "a.safetensors").rmdir()
    write_weights(tmp_path, tensors())
    folder = SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        folder.read("a.weight")


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        SafetensorsFolder(tmp_path)
