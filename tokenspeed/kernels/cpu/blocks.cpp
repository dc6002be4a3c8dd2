// A linear layer whose weight lies in blocks: see blocks.py. Four rows at a time are expanded into
// a buffer that the first cache holds, and multiplied there; the memory is read once.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "formats.h"
#include "rows.h"

struct alignas(64) Line {
  float values[16];
};

// This thread's buffer.
static float* room(int64_t floats) {
  static thread_local std::vector<Line> lines;
  if ((int64_t)lines.size() * 16 < floats) lines.resize((floats + 15) / 16);
  return lines.data()->values;
}

template <class Format>
static inline void expand_row(const uint8_t* row, int64_t K, float* out) {
  constexpr int64_t kRun = 2048 / Format::kElements;  // blocks whose scales are at hand
  float scales[kRun * Format::kScales];
  for (int64_t left = K / Format::kElements; left > 0; left -= kRun) {
    const int64_t count = left < kRun ? left : kRun;
    for (int64_t i = 0; i < count; i++)
      Format::scales(row + i * Format::kBytes, scales + i * Format::kScales);
    for (int64_t i = 0; i < count; i++)
      Format::expand(row + i * Format::kBytes, scales + i * Format::kScales,
                     out + i * Format::kElements);
    row += count * Format::kBytes;
    out += count * Format::kElements;
  }
}

template <class Format>
static void expand(const uint8_t* w, float* out, int64_t N, int64_t K, int64_t threads) {
  const int64_t row_bytes = K / Format::kElements * Format::kBytes;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t n = 0; n < N; n++) expand_row<Format>(w + n * row_bytes, K, out + n * K);
}

// The last rows, fewer than four: the others are left as they are, and their sums dropped.
static void last_rows(const float* x, const float* rows, const float* bias, float* out, int64_t T,
                      int64_t N, int64_t K, int64_t count) {
  float some[kRows] = {}, sums[kRows];
  if (bias) std::memcpy(some, bias, count * sizeof(float));
  for (int64_t t = 0; t < T; t++) {
    four_rows(x + t * K, rows, bias ? some : nullptr, sums, 1, kRows, K, false);
    std::memcpy(out + t * N, sums, count * sizeof(float));
  }
}

template <class Format>
static void linear(const float* x, const uint8_t* w, const float* bias, float* out, int64_t T,
                   int64_t N, int64_t K, int64_t threads) {
  const int64_t row_bytes = K / Format::kElements * Format::kBytes;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t n = 0; n < N; n += kRows) {
    const int64_t count = N - n < kRows ? N - n : kRows;
    const uint8_t* here = w + n * row_bytes;
    float* rows = room(kRows * K);
    for (int64_t i = 0; i < kRows * row_bytes; i += 64)
      _mm_prefetch((const char*)(here + kRows * row_bytes + i), _MM_HINT_T0);
    for (int64_t r = 0; r < count; r++) expand_row<Format>(here + r * row_bytes, K, rows + r * K);
    const float* some = bias ? bias + n : nullptr;
    if (count == kRows) four_rows(x, rows, some, out + n, T, N, K, false);
    else last_rows(x, rows, some, out + n, T, N, K, count);
  }
}

#define BY_FORMAT(CALL)            \
  switch (format) {                \
    case 2: return CALL(Q4_0);     \
    case 3: return CALL(Q4_1);     \
    case 8: return CALL(Q8_0);     \
    default: std::abort();         \
  }

// x [T, K], w [N, bytes of K elements], bias [N] or null, out [T, N].
extern "C" void tokenspeed_blocks_linear(int64_t format, const float* x, const uint8_t* w,
                                         const float* bias, float* out, int64_t T, int64_t N,
                                         int64_t K, int64_t threads) {
#define CALL(F) linear<F>(x, w, bias, out, T, N, K, threads)
  BY_FORMAT(CALL)
#undef CALL
}

// w [N, bytes of K elements] -> out [N, K].
extern "C" void tokenspeed_blocks_expand(int64_t format, const uint8_t* w, float* out, int64_t N,
                                         int64_t K, int64_t threads) {
#define CALL(F) expand<F>(w, out, N, K, threads)
  BY_FORMAT(CALL)
#undef CALL
}
