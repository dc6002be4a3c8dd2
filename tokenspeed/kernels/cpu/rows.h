// Four rows of a float32 matrix times some tokens: the sums of a linear layer.
#pragma once

#include "vector.h"

constexpr int kRows = 4;
constexpr int kTokens = kRegisters == 32 ? 4 : 3;  // 16 or 12 registers hold sums

// out[t][r] = x[t] . w[r] + bias[r] for T tokens. Fetches the four rows behind these, if asked (a
// prefetch past the end does nothing). x has rows of K floats, out of N.
template <int T>
static inline void block(const float* x, const float* w, const float* bias, float* out, int64_t N,
                         int64_t K, bool fetches) {
  Vec acc[T][kRows];
  UNROLL for (int t = 0; t < T; t++) UNROLL for (int r = 0; r < kRows; r++) acc[t][r] = Vec{};
  for (int64_t k = 0; k < K; k += kWidth) {
    Vec row[kRows];
    UNROLL for (int r = 0; r < kRows; r++) {
      row[r] = load(w + r * K + k);
      if (fetches) _mm_prefetch((const char*)(w + (kRows + r) * K + k), _MM_HINT_T0);
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
                        float* out, int64_t N, int64_t K, bool fetches) {
  if (tokens == T) block<T>(x, w, bias, out, N, K, fetches);
  else if constexpr (T > 1) rest<T - 1>(tokens, x, w, bias, out, N, K, fetches);
}

// The same for any number of tokens. An element is summed in one order, whatever that number.
static inline void four_rows(const float* x, const float* w, const float* bias, float* out,
                             int64_t T, int64_t N, int64_t K, bool fetches) {
  int64_t t = 0;
  for (; t + kTokens <= T; t += kTokens)
    block<kTokens>(x + t * K, w, bias, out + t * N, N, K, fetches && t == 0);
  rest<kTokens - 1>(T - t, x + t * K, w, bias, out + t * N, N, K, fetches && t == 0);
}
