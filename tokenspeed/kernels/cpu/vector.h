// A vector of float32 of this build's width, and what kernels do with it.
#pragma once

#include <cstdint>
#include <immintrin.h>

#if defined(__AVX512F__)
using Vec = __m512;
constexpr int kRegisters = 32;
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline __m256 halve(Vec a) {
  __m512d bits = _mm512_castps_pd(a);
  return _mm256_add_ps(_mm512_castps512_ps256(a),
                       _mm256_castpd_ps(_mm512_extractf64x4_pd(bits, 1)));
}
#else
using Vec = __m256;
constexpr int kRegisters = 16;
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline __m256 halve(Vec a) { return a; }
#endif

constexpr int kWidth = sizeof(Vec) / sizeof(float);
#define UNROLL _Pragma("GCC unroll 4")

// The sums of four vectors.
static inline __m128 sums(const Vec* a) {
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(halve(a[0]), halve(a[1])),
                            _mm256_hadd_ps(halve(a[2]), halve(a[3])));
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}
