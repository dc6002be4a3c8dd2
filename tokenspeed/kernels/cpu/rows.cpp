// A linear layer for few tokens whose weight is plain float32: see linear_cpu.py.
#include "rows.h"

// x [T, K], w [N, K], bias [N] or null, out [T, N]; N divides by 4, K by 16.
extern "C" void tokenspeed_linear_rows(const float* x, const float* w, const float* bias,
                                       float* out, int64_t T, int64_t N, int64_t K,
                                       int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t n = 0; n < N; n += kRows)
    four_rows(x, w + n * K, bias ? bias + n : nullptr, out + n, T, N, K, true);
}
