"""`rows`: a linear layer for few tokens on x86, in C++ that is compiled once and kept.

torch's matrix products are made for many rows of x. With 2 to 64 they spend their time packing the
weight, and read it at a fraction of the memory's speed. This one reads a weight once, where it lies
in its plain layout: four of its rows times up to four tokens are summed in registers while the
next four rows are fetched. So no second copy of a weight is ever made.

An element is summed in one order, whatever the number of tokens: a token's result does not depend
on its neighbours, bit for bit. Against torch it differs by float rounding.

The object is built for an instruction set, not for a machine, and holds code only.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [T, K], w [N, K], bias [N] or None -> [T, N]."""

_ISA_FLAGS = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx512f", "-mavx2", "-mfma")}
"""By torch's CPU capability, which ATEN_CPU_CAPABILITY can lower."""

_ROWS, _WIDTH = 4, 16
"""What a weight's two sizes must divide by."""

_BUILD_S = 60

SOURCE = r"""
#include <cstdint>
#include <immintrin.h>

#if defined(__AVX512F__)
using Vec = __m512;
constexpr int kTokens = 4;  // of 32 registers 16 hold sums
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline __m256 halve(Vec a) {
  __m512d bits = _mm512_castps_pd(a);
  return _mm256_add_ps(_mm512_castps512_ps256(a),
                       _mm256_castpd_ps(_mm512_extractf64x4_pd(bits, 1)));
}
#else
using Vec = __m256;
constexpr int kTokens = 3;  // of 16 registers 12 hold sums
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline __m256 halve(Vec a) { return a; }
#endif

constexpr int kWidth = sizeof(Vec) / sizeof(float);
constexpr int kRows = 4;
#define UNROLL _Pragma("GCC unroll 4")

// The sums of four vectors.
static inline __m128 sums(const Vec* a) {
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(halve(a[0]), halve(a[1])),
                            _mm256_hadd_ps(halve(a[2]), halve(a[3])));
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

// out[t][r] = x[t] . w[r] + bias[r] for T tokens and four rows. The first block of tokens that
// meets these rows fetches the four behind them (a prefetch past the end does nothing).
template <int T>
static inline void block(const float* x, const float* w, const float* bias, float* out, int64_t N,
                         int64_t K, bool is_first) {
  Vec acc[T][kRows];
  UNROLL for (int t = 0; t < T; t++) UNROLL for (int r = 0; r < kRows; r++) acc[t][r] = Vec{};
  for (int64_t k = 0; k < K; k += kWidth) {
    Vec row[kRows];
    UNROLL for (int r = 0; r < kRows; r++) {
      row[r] = load(w + r * K + k);
      if (is_first) _mm_prefetch((const char*)(w + (kRows + r) * K + k), _MM_HINT_T0);
    }
    UNROLL for (int t = 0; t < T; t++) {
      Vec token = load(x + t * K + k);
      UNROLL for (int r = 0; r < kRows; r++) acc[t][r] = fma(row[r], token, acc[t][r]);
    }
  }
  UNROLL for (int t = 0; t < T; t++) {
    __m128 s = sums(acc[t]);
    _mm_storeu_ps(out + t * N, bias ? _mm_add_ps(s, _mm_loadu_ps(bias)) : s);
  }
}

// The last tokens, fewer than a block.
template <int T>
static inline void rest(int64_t tokens, const float* x, const float* w, const float* bias,
                        float* out, int64_t N, int64_t K, bool is_first) {
  if (tokens == T) block<T>(x, w, bias, out, N, K, is_first);
  else if constexpr (T > 1) rest<T - 1>(tokens, x, w, bias, out, N, K, is_first);
}

// x [T, K], w [N, K], bias [N] or null, out [T, N]; N divides by 4, K by 16.
extern "C" void tokenspeed_linear_rows(const float* x, const float* w, const float* bias,
                                       float* out, int64_t T, int64_t N, int64_t K,
                                       int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t n = 0; n < N; n += kRows) {
    const float* here = bias ? bias + n : nullptr;
    int64_t t = 0;
    for (; t + kTokens <= T; t += kTokens)
      block<kTokens>(x + t * K, w + n * K, here, out + t * N + n, N, K, t == 0);
    rest<kTokens - 1>(T - t, x + t * K, w + n * K, here, out + t * N + n, N, K, t == 0);
  }
}
"""


class BuildError(RuntimeError):
    """The kernel cannot be had here: one line, saying why."""


def build(target: Path) -> None:
    """Compile the kernel for this CPU's instruction set into the shared object `target`, which
    appears whole or not at all. Half a second. BuildError if there is no way to.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _ISA_FLAGS:
        raise BuildError(f"the small linear kernel is for AVX2 and AVX512, not for {capability}")
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++")
    if compiler is None:
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    flags = ("-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-fopenmp")
    command = [compiler, *flags, *_ISA_FLAGS[capability], "-o", str(partial), "-"]
    try:
        done = subprocess.run(
            command, input=SOURCE, capture_output=True, text=True, timeout=_BUILD_S
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise BuildError(f"{compiler} failed on the small linear kernel: {reason}")
        partial.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} failed on the small linear kernel: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path) -> Linear:
    """The kernel in a shared object made by `build`, for this machine's instruction set. The object
    is code: load it only from where nobody else may write. BuildError if it does not load.

    What the kernel does not serve (other dtypes, strides and sizes) goes to torch.
    """
    try:
        function = ctypes.CDLL(str(path)).tokenspeed_linear_rows
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} is no linear kernel: {error}") from error
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4

    float32, count_threads = torch.float32, torch.get_num_threads

    def rows(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        # Written out for speed: a small model calls this hundred times in 20 ms.
        (num_tokens, size), num_rows = x.shape, w.shape[0]
        served = num_rows % _ROWS == 0 and size % _WIDTH == 0
        for each in (x, w) if bias is None else (x, w, bias):
            served = served and each.dtype is float32 and each.is_contiguous()
        if not served:
            return F.linear(x, w, bias)
        out = x.new_empty((num_tokens, num_rows))
        start = None if bias is None else bias.data_ptr()
        pointers = x.data_ptr(), w.data_ptr(), start, out.data_ptr()
        function(*pointers, num_tokens, num_rows, size, count_threads())
        return out

    return rows


def serves(w: Tensor) -> bool:
    """Is the kernel made for this weight?"""
    num_rows, size = w.shape
    fits = num_rows % _ROWS == 0 and size % _WIDTH == 0
    return fits and w.dtype is torch.float32 and w.is_contiguous()
