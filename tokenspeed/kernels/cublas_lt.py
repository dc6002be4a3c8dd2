"""x w^T by cuBLASLt with an algorithm of one's choice, where torch takes the library's first guess.

For a product cuBLASLt proposes some algorithms, the likely best first. `linear_tiles` says which of
them was measured to be fastest; this file asks for proposals and runs one.

An algorithm is the 64 bytes of a cublasLtMatmulAlgo_t, which "can be trivially serialized and later
restored for use with the same version of cuBLAS library" (cuBLAS documentation): hence the version
beside them, and a check of every shape before its first product. The library is the one that torch
has loaded. T tokens, K columns, N rows of w; to a library that counts columns first, out^T = w x^T.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed.kernels.linear_tiles import ALGORITHM_BYTES, Algorithm

WORKSPACE_BYTES = 32 << 20
"""As torch gives on Hopper. Kept and shared by all products: a model runs on one stream."""

_PROPOSALS = 16
_ALIGNMENT = 16
"""In bytes, of every row: what the library is told, and what operands are held to."""

_DTYPES = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
_COMPUTE_32F, _R_32F = 68, 0
_TRANSPOSE_A = 3  # CUBLASLT_MATMUL_DESC_TRANSA
_MAX_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_*
_EXACT_REDUCTIONS = 1 | 2
"""Parts of a sum meet in place or in float32, never in the operands' dtype."""


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_ubyte * ALGORITHM_BYTES),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Product(NamedTuple):
    """What is multiplied: x [T, K], its rows `x_stride` elements apart, and w [N, K], dense."""

    num_tokens: int
    num_rows: int
    size: int
    x_stride: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, w: Tensor) -> Product | None:
        """None for operands that are not served here."""
        itemsize = x.dtype.itemsize
        served = x.dtype in _DTYPES and x.dtype == w.dtype and x.stride(1) == 1
        rows = (x.data_ptr(), w.data_ptr(), x.stride(0) * itemsize, w.stride(0) * itemsize)
        if not served or any(place % _ALIGNMENT for place in (*rows, w.shape[0] * itemsize)):
            return None
        return cls(x.shape[0], w.shape[0], w.shape[1], max(x.stride(0), w.shape[1]), x.dtype)


class _Plan:
    """A product's descriptors, in the library's memory for as long as this lives."""

    def __init__(self, library: _Library, product: Product) -> None:
        tokens, rows, size, x_stride, dtype = product
        call = library.call
        made: list[tuple[str, ctypes.c_void_p]] = []

        def make(create: str, destroy: str, *args: Any) -> ctypes.c_void_p:
            found = ctypes.c_void_p()
            call(create, ctypes.byref(found), *args)
            made.append((destroy, found))
            return found

        def layout(num_rows: int, num_columns: int, stride: int) -> ctypes.c_void_p:
            sizes = ctypes.c_uint64(num_rows), ctypes.c_uint64(num_columns), ctypes.c_int64(stride)
            names = "cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy"
            return make(*names, _DTYPES[dtype], *sizes)

        names = "cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy"
        self.what = make(*names, _COMPUTE_32F, _R_32F)
        yes = ctypes.c_int32(1)
        call("cublasLtMatmulDescSetAttribute", self.what, _TRANSPOSE_A, ctypes.byref(yes), 4)
        self.w, self.x = layout(size, rows, size), layout(size, tokens, x_stride)
        self.out = layout(rows, tokens, rows)
        weakref.finalize(self, _destroy, call, made)

    @property
    def operands(self) -> tuple[ctypes.c_void_p, ...]:
        """The descriptors of a call: what, A, B, C and D."""
        return self.what, self.w, self.x, self.out, self.out


def _destroy(call: Callable[..., None], made: list[tuple[str, ctypes.c_void_p]]) -> None:
    for name, descriptor in made:
        call(name, descriptor)


class _Library:
    """cuBLASLt on one device."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError where there is no cuBLASLt, RuntimeError where it refuses to work."""
        if torch.version.cuda is None:
            raise OSError("this torch has no CUDA")
        self._library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version: int = self._library.cublasLtGetVersion()
        self._handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self.plan = functools.lru_cache(maxsize=256)(functools.partial(_Plan, self))
        self.is_valid = functools.lru_cache(maxsize=1 << 16)(self._check)

    def call(self, name: str, *args: Any) -> None:
        """Raises RuntimeError for a status that is no success."""
        if status := getattr(self._library, name)(*args):
            raise RuntimeError(f"{name} returned status {status}")

    def proposals(self, product: Product) -> list[bytes]:
        """The library's algorithms for a product, the likely best first."""
        preference = ctypes.c_void_p()
        self.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        found, count = (_Proposal * _PROPOSALS)(), ctypes.c_int()
        asked = [
            (_MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES)),
            (_REDUCTIONS, ctypes.c_uint32(_EXACT_REDUCTIONS)),
            *((each, ctypes.c_uint32(_ALIGNMENT)) for each in _ALIGNMENTS),
        ]
        try:
            for attribute, value in asked:
                size = ctypes.c_size_t(ctypes.sizeof(value))
                name = "cublasLtMatmulPreferenceSetAttribute"
                self.call(name, preference, attribute, ctypes.byref(value), size)
            self.call(
                "cublasLtMatmulAlgoGetHeuristic", self._handle, *self.plan(product).operands,
                preference, _PROPOSALS, found, ctypes.byref(count),
            )  # fmt: skip
        finally:
            self.call("cublasLtMatmulPreferenceDestroy", preference)
        return [bytes(each.algorithm) for each in found[: count.value] if each.state == 0]

    def _check(self, product: Product, algorithm: bytes) -> bool:
        """Does the library run this algorithm for this product, in the memory that there is?"""
        result = _Proposal()
        status: int = self._library.cublasLtMatmulAlgoCheck(
            self._handle, *self.plan(product).operands, algorithm, ctypes.byref(result)
        )
        return status == 0 and int(result.workspace) <= WORKSPACE_BYTES

    def run(
        self, product: Product, algorithm: bytes, x: Tensor, w: Tensor, added: Tensor | None
    ) -> Tensor:
        """x w^T, and `added` [T, N], dense, with one rounding for both."""
        out = x.new_empty(product.num_tokens, product.num_rows)
        plan, stream = self.plan(product), torch.cuda.current_stream(x.device).cuda_stream
        before = out if added is None else added
        factor = self._zero if added is None else self._one
        self.call(
            "cublasLtMatmul", self._handle, plan.what, ctypes.byref(self._one),
            _pointer(w), plan.w, _pointer(x), plan.x, ctypes.byref(factor),
            _pointer(before), plan.out, _pointer(out), plan.out, algorithm,
            _pointer(self._workspace), ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(stream),
        )  # fmt: skip
        return out


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _library_of(device: torch.device) -> _Library | None:
    try:
        return _Library(device)
    except (OSError, RuntimeError):
        return None


def proposals(x: Tensor, w: Tensor) -> list[Algorithm]:
    """The library's algorithms for x w^T, the likely best first; none where it cannot be asked."""
    library, product = _library_of(x.device), Product.of(x, w)
    if library is None or product is None:
        return []
    found = library.proposals(product)
    return [Algorithm(data.hex(), library.version) for data in found]


def run(x: Tensor, w: Tensor, algorithm: Algorithm, added: Tensor | None = None) -> Tensor | None:
    """x w^T + `added`, or None where this algorithm does not serve: with another version of the
    library, on another kind of GPU, for operands that are not aligned.
    """
    library, product = _library_of(x.device), Product.of(x, w)
    if library is None or product is None or library.version != algorithm.version:
        return None
    if added is not None and not added.is_contiguous():
        return None
    if not library.is_valid(product, algorithm.bytes):
        return None
    return library.run(product, algorithm.bytes, x, w, added)
