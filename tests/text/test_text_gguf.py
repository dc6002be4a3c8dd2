"""The GGUF reader: right on good files, one line on damaged ones, never a crash or a huge list."""

from __future__ import annotations

import struct
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf as peer
import numpy as np
import pytest
from gguf_writer import ARRAY, STRING, UINT32, gguf_bytes, llama_metadata, text
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.text.errors import ModelError
from tokenspeed.text.gguf import MAX_ELEMENTS, TENSOR_TYPES, Gguf, read_gguf
from tokenspeed.text.source import ModelSource

SMALL = gguf_bytes(
    llama_metadata(general__alignment=32, general__languages=["en", "de"], x__flags=[True, False]),
    {"token_embd.weight": ((4, 8), [0.5] * 32), "output_norm.weight": ((8,), [1.0] * 8)},
)
HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
FOLDER = tempfile.TemporaryDirectory()


def read(raw: bytes) -> Gguf:
    path = Path(FOLDER.name) / "file.gguf"
    path.write_bytes(raw)
    return read_gguf(path)


def refused(raw: bytes) -> str:
    with pytest.raises(ModelError) as caught:
        read(raw)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


def test_reads_every_kind_of_value() -> None:
    out = gguf_bytes({"a": -3, "b": 2.5, "c": True, "d": "ä", "e": [1, 2], "f": ["x", ""]})
    assert read(out).metadata == {
        "a": -3,
        "b": 2.5,
        "c": True,
        "d": "ä",
        "e": [1, 2],
        "f": ["x", ""],
    }


def test_tensor_table_gives_row_major_shapes_and_true_places() -> None:
    found = read(SMALL).tensors["output_norm.weight"]
    assert (found.shape, found.type, found.num_bytes) == ((8,), "F32", 32)
    assert struct.unpack_from("<8f", SMALL, found.start) == (1.0,) * 8
    assert read(SMALL).tensors["token_embd.weight"].shape == (4, 8)


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = peer.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_rope_freq_base(5e5)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([-1.0, 0.5])
    writer.add_add_bos_token(True)
    writer.add_tensor("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("y", np.ones((2, 34), np.uint8), raw_dtype=peer.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = read_gguf(path), peer.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents()
    assert [
        (t.name, t.data_offset, t.n_bytes, t.tensor_type.name, [int(n) for n in reversed(t.shape)])
        for t in theirs.tensors
    ] == [(t.name, t.start, t.num_bytes, t.type, list(t.shape)) for t in ours.tensors.values()]


def test_bundled_file_is_read_in_well_under_a_second(smollm2_source: ModelSource) -> None:
    began = time.perf_counter()
    found = read_gguf(smollm2_source.path)
    assert time.perf_counter() - began < 1.0  # 0.05 s when idle
    assert (len(found.metadata), len(found.tensors)) == (33, 272)
    assert len(found.array("tokenizer.ggml.merges", str)) == 48900


def test_type_table_agrees_with_the_gguf_package() -> None:
    for kind, (name, block, width) in TENSOR_TYPES.items():
        known = peer.GGMLQuantizationType(kind)
        assert (known.name, *peer.GGML_QUANT_SIZES[known]) == (name, block, width)


def test_every_truncation_is_refused() -> None:
    for length in range(len(SMALL)):
        refused(SMALL[:length])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"PK\x03\x04" + bytes(60),
        SMALL.replace(struct.pack("<I", 3), struct.pack("<I", 1), 1),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0),
        HEADER + struct.pack("<Q", 1 << 62) + b"key",
        HEADER + text("k") + struct.pack("<I", 77) + bytes(16),
        HEADER + text("k") + struct.pack("<IIQ", ARRAY, UINT32, 1 << 60),
        HEADER + text("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 60),
        HEADER + text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1 << 60),
        HEADER + text("k") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 50,
        HEADER + text("k") + struct.pack("<IB", 7, 9),
        HEADER + struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", UINT32, 1),
        gguf_bytes({"general.alignment": 0}, {"t": ((1,), [1.0])}),
        gguf_bytes({"general.alignment": "32"}, {"t": ((1,), [1.0])}),
    ],
)
def test_damage_is_one_line(raw: bytes) -> None:
    refused(raw)


def test_duplicate_keys_and_tensors_are_refused() -> None:
    entry = text("k") + struct.pack("<II", UINT32, 1)
    assert "twice" in refused(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry * 2)
    row = text("t") + struct.pack("<IQIQ", 1, 0, 0, 0)
    assert "share a name" in refused(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + row * 2 + bytes(64))


def test_tensor_outside_the_file_is_named() -> None:
    row = text("wide") + struct.pack("<IQIQ", 1, 1 << 40, 0, 0)
    assert "wide" in refused(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + row + bytes(64))
    row = text("odd") + struct.pack("<IQIQ", 1, 33, 3, 0)
    assert "odd" in refused(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + row + bytes(64))
    row = text("strange") + struct.pack("<IQIQ", 1, 1, 99, 0)
    assert "type 99" in refused(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + row + bytes(64))


def test_many_small_elements_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.text.gguf.MAX_ELEMENTS", 100)
    assert MAX_ELEMENTS > 100
    read(gguf_bytes({"a": [1] * 60}))
    refused(gguf_bytes({"a": [1] * 60, "b": [1] * 60}))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_crash_or_allocate(data: st.DataObject) -> None:
    raw = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(raw) - 8))
        patch = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([1 << 63, (1 << 64) - 1, 1 << 32, 0]).map(
                    lambda number: struct.pack("<Q", number)
                ),
            )
        )
        raw[at : at + len(patch)] = patch
    tracemalloc.start()
    try:
        read(bytes(raw))
    except ModelError as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("k.int", 1.5),
        ("k.int", True),
        ("k.int", -1),
        ("k.text", 3),
        ("k.list", [1]),
        ("k.list", "x"),
    ],
)
def test_getters_name_the_key_of_a_wrong_type(key: str, bad: Any) -> None:
    found = read(gguf_bytes({key: bad}))
    getters = {
        "k.int": lambda: found.integer(key),
        "k.text": lambda: found.text(key),
        "k.list": lambda: found.array(key, str),
    }
    with pytest.raises(ModelError, match=key):
        getters[key]()


def test_numbers_must_be_finite_and_flags_booleans() -> None:
    found = read(
        gguf_bytes({"nan": float("nan"), "inf": float("inf"), "one": 1, "eps": 1e-5, "flag": False})
    )
    for key in ("nan", "inf", "flag", "absent"):
        with pytest.raises(ModelError, match=key):
            found.number(key)
    with pytest.raises(ModelError, match="one"):
        found.flag("one", True)
    assert found.number("eps") == 1e-5


def test_unreadable_path_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf(tmp_path / "absent.gguf")
