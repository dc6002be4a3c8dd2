"""Weights in blocks: values are the gguf package's, and products those of the expanded weight."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from block_weights import packed, unpacked
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tokenspeed.kernels import block_formats, blocks, native
from tokenspeed.kernels.block_formats import FORMATS, row_bytes, row_size
from tokenspeed.kernels.blocks import embedding_blocks, linear_blocks
from tokenspeed.kernels.native import BuildError, Native
from tokenspeed.text.gguf import TENSOR_TYPES

every_format = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Native:
    target = tmp_path_factory.mktemp("kernel") / "native.so"
    try:
        native.build(target)
    except BuildError as error:
        pytest.skip(f"hardware: {error}")
    return native.load(target)


@pytest.fixture
def installed(built: Native, monkeypatch: pytest.MonkeyPatch) -> Native:
    monkeypatch.setattr(blocks, "_native", [built.blocks])
    return built


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blocks, "_native", [])
    yield


@every_format
def test_formats_are_those_of_the_file(format: str) -> None:
    each = FORMATS[format]
    assert TENSOR_TYPES[each.number] == (format, each.elements, each.num_bytes)
    assert row_size(format, row_bytes(format, 4 * each.elements)) == 4 * each.elements
    with pytest.raises(AssertionError, match="has no rows of"):
        row_bytes(format, each.elements + 1)


@every_format
def test_values_are_the_packages(format: str) -> None:
    w = packed(format, 6, 512)
    assert torch.equal(block_formats.expand(w, format), unpacked(format, w))


@every_format
@pytest.mark.parametrize("num_rows", [1, 3, 4, 7])
def test_the_kernel_expands_to_the_same_bits(built: Native, format: str, num_rows: int) -> None:
    w = packed(format, num_rows, 2304)  # more than one run of scales
    out = torch.empty(num_rows, 2304)
    built.blocks.expand(w, format, out)
    assert torch.equal(out, unpacked(format, w))


@every_format
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_the_expanded_weight(
    installed: Native, format: str, with_bias: bool
) -> None:
    for num_rows in (4, 92, 93, 2):
        w = packed(format, num_rows, 256)
        expanded, bias = unpacked(format, w), torch.randn(num_rows) if with_bias else None
        for num_tokens in (0, 1, 2, 3, 4, 5, 8, 70, blocks.FEW_TOKENS + 1):
            x = torch.randn(num_tokens, 256)
            found = linear_blocks(x, w, format, bias)
            assert found.is_contiguous()
            torch.testing.assert_close(found, F.linear(x, expanded, bias), rtol=1e-4, atol=1e-4)
            if num_rows % 4 == 0 and num_tokens <= blocks.FEW_TOKENS:
                assert torch.equal(found, installed.rows(x, expanded, bias))


@every_format
def test_a_token_is_the_same_in_every_batch(installed: Native, format: str) -> None:
    w, x = packed(format, 95, 256), torch.randn(70, 256)
    bias = torch.randn(95)
    alone = torch.cat([linear_blocks(row[None], w, format, bias) for row in x])
    for num_tokens in range(1, 71):
        assert torch.equal(linear_blocks(x[:num_tokens], w, format, bias), alone[:num_tokens])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("with_bias", [False, True])
def test_panels_are_seamless(monkeypatch: pytest.MonkeyPatch, with_bias: bool) -> None:
    w, x = packed("Q4_1", 50, 64), torch.randn(blocks.FEW_TOKENS + 5, 64)
    bias = torch.randn(50) if with_bias else None
    expected = F.linear(x, unpacked("Q4_1", w), bias)
    for num_bytes in (1, 64 * 4 * 7, 64 * 4 * 25, 1 << 20):
        monkeypatch.setattr(blocks, "_PANEL_BYTES", num_bytes)
        torch.testing.assert_close(linear_blocks(x, w, "Q4_1", bias), expected)


@every_format
def test_without_kernels_the_reference_runs(format: str) -> None:
    w, x = packed(format, 9, 256), torch.randn(3, 256)
    assert torch.equal(linear_blocks(x, w, format), F.linear(x, unpacked(format, w)))
    ids = torch.tensor([8, 0, 8])
    assert torch.equal(embedding_blocks(ids, w, format), unpacked(format, w)[ids])


@every_format
@pytest.mark.usefixtures("installed")
def test_embeddings_are_rows(format: str) -> None:
    w = packed(format, 9, 256)
    for ids in ([8, 0, 8], [], [1]):
        rows = embedding_blocks(torch.tensor(ids, dtype=torch.int64), w, format)
        assert torch.equal(rows, unpacked(format, w)[ids])


@pytest.mark.usefixtures("installed")
def test_inputs_with_strides_are_served() -> None:
    w, wide = packed("Q4_0", 8, 64), torch.randn(5, 128)
    expected = F.linear(wide[:, ::2], unpacked("Q4_0", w))
    torch.testing.assert_close(linear_blocks(wide[:, ::2], w, "Q4_0"), expected)


def test_the_kernel_reads_no_further_than_its_weight(built: Native) -> None:
    """Blocks of 18 bytes at the end of a page whose successor may not be read."""
    w = packed("Q4_0", 4, 64)
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = mmap.PAGESIZE - w.nbytes
    pages[start : mmap.PAGESIZE] = w.numpy().tobytes()
    assert protect(address + mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
    guarded: Tensor = torch.frombuffer(pages, dtype=torch.uint8, count=w.nbytes, offset=start)
    x = torch.randn(2, 64)
    found = built.blocks.linear(x, guarded.view_as(w), "Q4_0", None)
    assert torch.equal(found, built.blocks.linear(x, w, "Q4_0", None))


def test_fakes_give_shapes_and_refuse_what_does_not_fit() -> None:
    with FakeTensorMode():
        x, w = torch.empty(5, 64), torch.empty(92, 40, dtype=torch.uint8)
        assert linear_blocks(x, w, "Q4_1").shape == (5, 92)
        rows = embedding_blocks(torch.empty(5, dtype=torch.int64), w, "Q4_1")
        assert rows.shape == (5, 64) and rows.dtype == torch.float32
        strange = [
            (x[:, :32], w, "Q4_1"),
            (x, w, "Q8_0"),
            (x, w.float(), "Q4_1"),
            (x.double(), w, "Q4_1"),
            (x[0], w, "Q4_1"),
            (x, w, "Q4_1", torch.empty(5)),
        ]
        for case in strange:
            with pytest.raises(AssertionError):
                linear_blocks(*case)
