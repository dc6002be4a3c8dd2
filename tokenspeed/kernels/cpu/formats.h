// Blocks to float32, exactly: see block_formats.py, which has the same formats.
//
// A format first turns the scales of many blocks into floats, `kScales` a block, from where they are
// broadcast by loads; then each block's numbers. Every product is exact in float32 (f16 factors have
// 11 bits, all others together 13), so that a fused multiply-add rounds once, as a multiplication
// and an addition do.
#pragma once

#include "vector.h"

#if defined(__AVX512F__)
static inline Vec splat(float a) { return _mm512_set1_ps(a); }
static inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
static inline __m128i sixteen(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }

// 16 bytes of two 4-bit numbers q: d q + m of the low ones, then of the high ones. The 16 values
// that there can be are looked up, by the lowest four bits of an index.
static inline void nibbles(const uint8_t* p, float d, float m, float* low, float* high) {
  const Vec numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  Vec values = fma(splat(d), numbers, splat(m));
  __m512i q = _mm512_cvtepu8_epi32(sixteen(p));
  store(low, _mm512_permutexvar_ps(q, values));
  store(high, _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), values));
}

// 16 signed bytes q: d q.
static inline void signed_bytes(const uint8_t* p, float d, float* out) {
  store(out, splat(d) * _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen(p))));
}
#else
static inline Vec splat(float a) { return _mm256_set1_ps(a); }
static inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
static inline __m128i eight(const uint8_t* p) { return _mm_loadl_epi64((const __m128i*)p); }

static inline void nibbles(const uint8_t* p, float d, float m, float* low, float* high) {
  for (int i = 0; i < 16; i += kWidth) {
    __m256i q = _mm256_cvtepu8_epi32(eight(p + i));
    __m256i lowest = _mm256_and_si256(q, _mm256_set1_epi32(15));
    store(low + i, fma(splat(d), _mm256_cvtepi32_ps(lowest), splat(m)));
    store(high + i, fma(splat(d), _mm256_cvtepi32_ps(_mm256_srli_epi32(q, 4)), splat(m)));
  }
}

static inline void signed_bytes(const uint8_t* p, float d, float* out) {
  for (int i = 0; i < 16; i += kWidth)
    store(out + i, splat(d) * _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(p + i))));
}
#endif

// Two f16 numbers, from 8 readable bytes.
static inline void two_halves(const uint8_t* p, float* out) {
  _mm_storel_pi((__m64*)out, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)));
}

struct Q4_0 {  // f16 d, 16 bytes of nibbles: d (q - 8)
  static constexpr int kElements = 32, kBytes = 18, kScales = 2;
  static void scales(const uint8_t* p, float* s) {
    two_halves(p, s);
    s[1] = -8 * s[0];
  }
  static void expand(const uint8_t* p, const float* s, float* out) {
    nibbles(p + 2, s[0], s[1], out, out + 16);
  }
};

struct Q4_1 {  // f16 d, f16 m, 16 bytes of nibbles: d q + m
  static constexpr int kElements = 32, kBytes = 20, kScales = 2;
  static void scales(const uint8_t* p, float* s) { two_halves(p, s); }
  static void expand(const uint8_t* p, const float* s, float* out) {
    nibbles(p + 4, s[0], s[1], out, out + 16);
  }
};

struct Q8_0 {  // f16 d, 32 signed bytes: d q
  static constexpr int kElements = 32, kBytes = 34, kScales = 2;  // the second is no scale
  static void scales(const uint8_t* p, float* s) { two_halves(p, s); }
  static void expand(const uint8_t* p, const float* s, float* out) {
    signed_bytes(p + 2, s[0], out);
    signed_bytes(p + 18, s[0], out + 16);
  }
};
