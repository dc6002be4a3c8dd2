"""A warm start: the program out of a cache entry, with no capture, no compile and no Dynamo."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from compile_tiny import one_sequence, random_model
from torch import Tensor, nn
from torch._inductor.exc import InvalidCxxCompiler

from tokenspeed.compile import artifacts, calls, receipt, warm
from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.entry import CALLS, Damaged, Entry, Unloadable, read_entry
from tokenspeed.compile.plan import decode
from tokenspeed.compile.runner import Executable
from tokenspeed.kernels import linear_cpu_choices
from tokenspeed.models import family_of
from tokenspeed.text.source import resolve_model

SIZES = (1, 7, 64)


PHASES = {"capture", "inductor", "nearest misses"}


def entry_in(root: Path) -> Entry:
    (folder,) = (root / "v1").glob("[!.]*")
    return read_entry(folder)


def module_of(folder: str) -> nn.Module:
    hf_config = resolve_model(folder).config
    family = family_of(hf_config)
    module = random_model(lambda: family.model(family.config.from_dict(hf_config)))
    module.fill_buffers()
    return module


def outputs(run: Executable, size: int) -> tuple[Tensor, Tensor]:
    ids, positions = torch.arange(size) * 7 % 199, torch.arange(size)
    with one_sequence():
        hidden = run.forward(run.embed(ids), positions)
    return hidden, run.head(hidden)


@pytest.fixture(autouse=True)
def kernels_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where no engine has measured linear layers."""
    monkeypatch.setattr(linear_cpu_choices, "_choices", {})


@pytest.fixture(scope="module")
def entry(tiny_cache: Path) -> Entry:
    return entry_in(tiny_cache)


def test_the_pieces_equal_the_module(entry: Entry, tiny_model: str) -> None:
    module = module_of(tiny_model)
    run = Executable(warm.load_program(entry), module)
    for size in SIZES:
        ids, positions = torch.arange(size) * 7 % 199, torch.arange(size)
        with one_sequence():
            expected = module(module.embed(ids), positions)
        hidden, logits = outputs(run, size)
        torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(logits, module.head(hidden))


FRESH = """
import json, sys
from pathlib import Path
import torch
import test_compile_warm as t
entry = t.entry_in(Path(sys.argv[1]))
program = t.warm.load_program(entry)
run = t.Executable(program, t.module_of(sys.argv[2]))
torch.save([t.outputs(run, size) for size in t.SIZES], sys.argv[3])
from torch._dynamo.utils import counters
print(json.dumps({
    "frames": dict(counters["frames"]), "stats": dict(counters["stats"]),
    "compiler": "torch._inductor.compile_fx" in sys.modules,
    "pipeline": "tokenspeed.compile.pipeline" in sys.modules,
    "matcher": "tokenspeed.compile.matcher" in sys.modules,
}))
"""


def test_a_fresh_process_computes_the_same_bits_without_dynamo(
    entry: Entry, tiny_cache: Path, tiny_model: str, tmp_path: Path
) -> None:
    """Also with nothing of Inductor's own on the machine."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "HOME")
    for name in names:
        (tmp_path / name).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tiny_cache), tiny_model, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parent,
        env=os.environ | {name: str(tmp_path / name) for name in names},
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts == {
        "frames": {},
        "stats": {},
        "compiler": False,
        "pipeline": False,
        "matcher": False,
    }
    assert "objects were compiled" not in done.stderr
    assert not list((tmp_path / "TORCHINDUCTOR_CACHE_DIR").rglob("*.so"))
    run = Executable(warm.load_program(entry), module_of(tiny_model))
    there = torch.load(tmp_path / "out", weights_only=True)
    for size, (hidden, logits) in zip(SIZES, there, strict=True):
        expected = outputs(run, size)
        assert torch.equal(hidden, expected[0]) and torch.equal(logits, expected[1])


def test_loading_leaves_the_entry_and_its_folder_alone(entry: Entry) -> None:
    def listing() -> list[tuple[str, int]]:
        paths = entry.folder.parent.rglob("*")
        return sorted((str(path), path.stat().st_mtime_ns) for path in paths)

    before = listing()
    warm.load_program(entry)
    assert listing() == before


def test_an_entry_beside_which_nothing_can_be_written_loads(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = artifacts.tempfile.mkdtemp

    def refuse(prefix: str, dir: Path | None = None) -> str:
        if dir is not None:
            raise OSError(30, "Read-only file system")
        return make(prefix=prefix)

    monkeypatch.setattr(artifacts.tempfile, "mkdtemp", refuse)
    assert warm.load_program(entry).pieces


def test_what_kernels_are_read_from_later_stays_as_long_as_they(
    entry: Entry, tmp_path: Path
) -> None:
    """On CUDA that is their first launch; another process may sweep before."""
    shutil.copytree(entry.folder, tmp_path / "v1" / entry.folder.name)
    copy = entry_in(tmp_path)
    copy.manifest.facts["compile"]["device"] = "cuda"
    descriptors = len(os.listdir("/proc/self/fd"))
    program = warm.load_program(copy)
    (folder,) = (tmp_path / "v1").glob(".load-*")
    os.utime(folder, (0, 0))
    CompileCache(tmp_path).sweep()
    assert list(folder.rglob("*.so"))
    pieces = list(program.pieces.values())
    del program
    gc.collect()
    assert folder.exists()
    del pieces
    gc.collect()
    assert not folder.exists()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def broken(entry: Entry, **changes: object) -> Entry:
    contents = msgspec.structs.replace(entry.manifest.contents, **changes)
    manifest = msgspec.structs.replace(entry.manifest, contents=contents)
    return dataclasses.replace(entry, manifest=manifest)


def without_piece(entry: Entry) -> Entry:
    pieces = dict(entry.manifest.contents.pieces)
    pieces.popitem()
    return broken(entry, pieces=pieces)


def with_bytes(name: str, data: bytes) -> Callable[[Entry], Entry]:
    def change(entry: Entry) -> Entry:
        names = [each for each in entry.files if each.startswith(name)]
        return dataclasses.replace(entry, files=entry.files | dict.fromkeys(names, data))

    return change


def with_other_calls(**changes: Any) -> Callable[[Entry], Entry]:
    """Of the pieces that are calls alone."""

    def change(entry: Entry) -> Entry:
        kept = {name: data for name, data in entry.files.items() if name.startswith("pieces/")}
        other = {
            name: calls.encode(msgspec.structs.replace(calls.decode(data), **changes))
            for name, data in kept.items()
            if name.endswith(CALLS)
        }
        assert other
        return dataclasses.replace(entry, files=entry.files | other)

    return change


@pytest.mark.parametrize(
    "change",
    [
        with_bytes("pieces/", b""),
        with_bytes("pieces/", b"\x80\x04N."),
        with_bytes("plan.json", b"{}"),
        with_bytes("plan.json", b"\xff\xfe"),
        without_piece,
        with_other_calls(num_inputs=3),
        with_other_calls(results=()),
        lambda entry: broken(entry, isa={"name": 1}),
    ],
)
def test_what_cannot_be_loaded_is_damaged_and_says_so(
    entry: Entry, change: Callable[[Entry], Entry]
) -> None:
    with pytest.raises(Damaged) as caught:
        warm.load_program(change(entry))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        MemoryError(),
        InvalidCxxCompiler("g++"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_what_this_machine_cannot_load_is_not_damaged(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(data: bytes) -> None:
        raise RuntimeError("loading failed") from error

    monkeypatch.setattr(artifacts.inductor_api, "load", fail)
    with pytest.raises(Unloadable, match="loading failed"):
        warm.load_program(entry)


def test_no_room_for_objects_leaves_no_folder(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    shutil.copytree(entry.folder, tmp_path / "v1" / entry.folder.name)
    copy = entry_in(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(Unloadable, match="No space left"):
        warm.load_program(copy)
    assert [path.name for path in (tmp_path / "v1").iterdir()] == [entry.folder.name]


def test_the_receipt_counts_what_passes_did(entry: Entry) -> None:
    done = receipt.decode(entry.files["receipts/counts.json"])
    plan = decode(entry.files["plan.json"].decode())
    assert done.pieces.keys() == plan.piece_hashes()
    totals = done.totals()
    # Two blocks' worth of distinct code: the middle piece, and the halves at either end.
    assert totals["add_rms_norm"] == 4 and totals["silu_mul"] == 2 and totals["rope"] == 4
    assert all(each.error is None for piece in done.pieces.values() for each in piece["all"])
    assert done.seconds.keys() == done.cpu_seconds.keys() == PHASES
    assert receipt.decode(receipt.encode(done)) == done


def test_a_copy_elsewhere_serves(entry: Entry, tmp_path: Path) -> None:
    shutil.copytree(entry.folder, tmp_path / "v1" / entry.folder.name)
    assert (
        warm.load_program(entry_in(tmp_path)).pieces.keys() == entry.manifest.contents.pieces.keys()
    )
