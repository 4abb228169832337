// Sixteen numbers at a time: bfloat16 in memory, float32 in registers. Part of decode.cpp.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

using bf16 = uint16_t;

namespace {

// Memory that is reused between calls, aligned to a cache line: otherwise each row of a tile would
// span two lines.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(start_); }

  // Memory for `count` uninitialised numbers.
  template <typename T>
  T* room(int64_t count) {
    const int64_t bytes = (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    if (bytes > bytes_) {
      std::free(start_);
      start_ = std::aligned_alloc(64, bytes);
      if (!start_) std::abort();
      bytes_ = bytes;
    }
    return static_cast<T*>(start_);
  }

 private:
  void* start_ = nullptr;
  int64_t bytes_ = 0;
};

inline __m512 load(const bf16* from) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}

inline void store(bf16* to, __m512 value) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value));
}

inline __m512 exponential(__m512 x) {
  // e^x as 2^(x / ln 2): a polynomial of the fraction, within about 2 ulp of float32; the order of the
  // operands of max keeps NaN.
  const __m512 t = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-87.0f), x), _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT);
  const __m512 f = _mm512_sub_ps(t, whole);
  __m512 p = _mm512_set1_ps(1.535336188e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.339887440e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.618437357e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550332548e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402264791e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931472028e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

inline __m512 rounded(__m512 value) {
  const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(value);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// silu(x) * up
inline __m512 gate(__m512 x, __m512 up) {
  const __m512 grown = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_mul_ps(_mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1), grown)), up);
}

constexpr float TO_POWERS = 1.44269504f;  // log2(e): turns exponents of e into exponents of 2

// 2^x: a polynomial of the fraction with a relative error of about 3e-6; bfloat16 then rounds to 2e-3.
inline __m512 power(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_set1_ps(1.353416605e-2f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.201146419e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.414427548e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.930038349e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.000002593f));
  return _mm512_scalef_ps(p, x);
}

// Reduces each of 16 vectors to one number: the sum or the maximum.
template <typename Join>
inline __m512 joined(const __m512* of, Join join) {
  __m512 by_four[4];
  for (int i = 0; i < 4; ++i) {
    const __m512* v = of + 4 * i;
    const __m512 a = join(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512 b = join(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    by_four[i] = join(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)),
                               _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
  __m512 by_eight[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 a = by_four[2 * i], b = by_four[2 * i + 1];
    by_eight[i] = join(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  return join(_mm512_shuffle_f32x4(by_eight[0], by_eight[1], 0x88),
                       _mm512_shuffle_f32x4(by_eight[0], by_eight[1], 0xdd));
}

}  // namespace
