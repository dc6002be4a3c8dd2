"""Weights from a folder of safetensors files, checked before a byte of them is used.

A file is `u64 header length | JSON header | data`; the header gives each tensor's dtype, shape and
place in the data. Sizes are compared with the file first, so that a cut or damaged download is
refused by name and is never noise in the model. Tensors are then read one by one (not mapped: a
file that shrinks meanwhile gives an error here, and a SIGBUS there).
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from tokenspeed.text.errors import ModelError
from tokenspeed.text.json_file import read_json

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_RANK = 8

# Bits of an element. All that the format defines, since sizes are checked for every tensor.
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8}
_BITS |= {"F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16}
_BITS |= {"F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
_BITS |= {"I64": 64, "U64": 64, "F64": 64, "C64": 64}

_TORCH = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: `start` counts from the first byte of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsFolder:
    """All tensors of a folder by name, in the order in which they are stored."""

    def __init__(self, folder: Path) -> None:
        index = _read_index(folder)
        self._entries: dict[str, Entry] = {}
        for file in _files(folder, index):
            for name, entry in read_header(file).items():
                if name in self._entries:
                    other = self._entries[name].file.name
                    raise ModelError(f"{folder}: tensor {name} is in both {other} and {file.name}")
                if entry.dtype not in _TORCH:
                    raise ModelError(
                        f"{file}: tensor {name} is {entry.dtype}, which cannot be loaded; weights "
                        f"can be {', '.join(_TORCH)}"
                    )
                self._entries[name] = entry
        for name, file_name in index.items():
            if name not in self._entries or self._entries[name].file != folder / file_name:
                raise ModelError(
                    f"{folder}: {INDEX} puts tensor {name} in {file_name}, but it is not there; "
                    "fetch the folder again"
                )
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def num_bytes(self, name: str) -> int:
        return self._entries[name].num_bytes

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
        with _opened(entry.file) as file:
            file.seek(entry.start)
            view, done = raw.numpy().data, 0
            while done < entry.num_bytes:  # one call reads at most 2 GiB
                count = file.readinto(view[done:])
                if not count:
                    raise ModelError(f"{entry.file}: became shorter while tensor {name} was read")
                done += count
        return raw.view(_TORCH[entry.dtype]).reshape(entry.shape)


def read_header(file: Path) -> dict[str, Entry]:
    """A file's tensors in stored order. Raises ModelError if the header and the size disagree."""
    with _opened(file) as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(
                f"{file}: not a safetensors file, or cut: it has {size} bytes and claims a header "
                f"of {length}; fetch the file again"
            )
        header = _parse(file, stream.read(length))
    header.pop("__metadata__", None)
    end = 8 + length
    entries = [(name, _entry(file, name, raw, end)) for name, raw in header.items()]
    entries.sort(key=lambda item: (item[1].start, item[1].num_bytes))
    for name, entry in entries:
        if entry.start != end:
            raise ModelError(f"{file}: tensor {name} does not begin where the one before it ends")
        end += entry.num_bytes
        if end > size:
            raise ModelError(
                f"{file}: cut short: it has {size} bytes, but tensor {name} ends at byte {end}; "
                "fetch the file again"
            )
    if end != size:
        raise ModelError(f"{file}: has {size} bytes, but its tensors end at byte {end}")
    return dict(entries)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[io.FileIO]:
    try:
        with file.open("rb", buffering=0) as stream:
            yield stream
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from None


def _entry(file: Path, name: str, raw: Any, base: int) -> Entry:
    """Check one header entry by itself: types, bounds, and bytes against shape and dtype."""
    try:
        dtype, shape, (begin, end) = raw["dtype"], raw["shape"], raw["data_offsets"]
        numbers = [*shape, begin, end]
        sound = isinstance(shape, list) and len(shape) <= MAX_RANK
        sound = sound and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
        sound = sound and math.prod(shape) * _BITS[dtype] == (end - begin) * 8
    except (TypeError, ValueError, KeyError):
        sound = False
    if not sound:
        raise ModelError(f"{file}: the header's entry of tensor {name} is damaged: {raw!r:.100}")
    return Entry(file, dtype, tuple(shape), base + begin, end - begin)


def _files(folder: Path, index: dict[str, str]) -> list[Path]:
    """The files to read: those that the index names, or else all that lie there."""
    if index:
        return [folder / name for name in sorted(set(index.values()))]
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder}: holds no *.safetensors file; fetch the weights in that format, or use "
            "--load-format dummy"
        )
    return files


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty without an index. Paths may not leave the folder."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ModelError(f"{path}: has no weight_map")
    for name, file_name in index.items():
        if not isinstance(file_name, str) or not _is_inside(file_name):
            raise ModelError(f"{path}: tensor {name} points outside the folder: {file_name!r:.100}")
        if not (folder / file_name).is_file():
            raise ModelError(
                f"{folder}: {INDEX} names {file_name} (for tensor {name}), which is absent; fetch "
                "the folder again"
            )
    return index


def _is_inside(file_name: str) -> bool:
    """A relative path without `..`. Links are followed: hub caches are made of them."""
    path = PurePosixPath(file_name)
    plain = not path.is_absolute() and ".." not in path.parts
    return plain and path.suffix == ".safetensors" and file_name.isprintable()


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ModelError(f"{file}: its header is not a JSON object; fetch the file again")
    return header
