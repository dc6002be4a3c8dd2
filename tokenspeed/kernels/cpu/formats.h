// Rows of blocks to float32, exactly: see block_formats.py, whose numbers the formats have.
//
// Every product here is exact in float32 (a factor has at most 11 bits, the others together 13), so
// that a fused multiply-add rounds once, as a multiplication and an addition do.
#pragma once

#include <cstring>

#include "vector.h"

static inline float half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return _cvtsh_ss(bits);
}

#if defined(__AVX512F__)
static inline Vec splat(float a) { return _mm512_set1_ps(a); }
static inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
static inline Vec iota() {
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
static inline __m512i bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}

// 16 bytes with two 4-bit numbers q each: d q + m of the low ones, then of the high ones. A table
// of the 16 values is looked up, by the lowest four bits of an index.
static inline void nibbles(const uint8_t* p, float d, float m, float* low, float* high) {
  Vec table = fma(splat(d), iota(), splat(m));
  __m512i q = bytes(p);
  store(low, _mm512_permutexvar_ps(q, table));
  store(high, _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), table));
}

// 16 signed bytes: d q.
static inline void signed_bytes(const uint8_t* p, float d, float* out) {
  __m512i q = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
  store(out, splat(d) * _mm512_cvtepi32_ps(q));
}
#else
static inline Vec splat(float a) { return _mm256_set1_ps(a); }
static inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
static inline Vec floats(__m256i q) { return _mm256_cvtepi32_ps(q); }
static inline __m128i eight(const uint8_t* p) { return _mm_loadl_epi64((const __m128i*)p); }

static inline void nibbles(const uint8_t* p, float d, float m, float* low, float* high) {
  for (int i = 0; i < 16; i += kWidth) {
    __m256i q = _mm256_cvtepu8_epi32(eight(p + i));
    __m256i lowest = _mm256_and_si256(q, _mm256_set1_epi32(15));
    store(low + i, fma(splat(d), floats(lowest), splat(m)));
    store(high + i, fma(splat(d), floats(_mm256_srli_epi32(q, 4)), splat(m)));
  }
}

static inline void signed_bytes(const uint8_t* p, float d, float* out) {
  for (int i = 0; i < 16; i += kWidth)
    store(out + i, splat(d) * floats(_mm256_cvtepi8_epi32(eight(p + i))));
}
#endif

struct Q4_0 {  // f16 d, 16 bytes of nibbles: d (q - 8)
  static constexpr int kElements = 32, kBytes = 18;
  static void expand(const uint8_t* p, float* out) {
    float d = half_at(p);
    nibbles(p + 2, d, -8 * d, out, out + 16);
  }
};

struct Q4_1 {  // f16 d, f16 m, 16 bytes of nibbles: d q + m
  static constexpr int kElements = 32, kBytes = 20;
  static void expand(const uint8_t* p, float* out) {
    nibbles(p + 4, half_at(p), half_at(p + 2), out, out + 16);
  }
};

struct Q8_0 {  // f16 d, 32 signed bytes: d q
  static constexpr int kElements = 32, kBytes = 34;
  static void expand(const uint8_t* p, float* out) {
    float d = half_at(p);
    signed_bytes(p + 2, d, out);
    signed_bytes(p + 18, d, out + 16);
  }
};
