// Products with weights of fewer bits: for few rows as they are, for more made bfloat16 a part at a
// time. Knows no models. Part of decode.cpp.

#pragma once

#include "products.h"

namespace {

// The whole numbers of INT4_GROUPS in bfloat16, twice: a lookup takes five bits of which four count.
inline __m512i whole_numbers() {
  alignas(64) bf16 table[32];
  for (int i = 0; i < 32; ++i) {
    const float value = float(i % 16);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    table[i] = bits >> 16;
  }
  return _mm512_load_si512(table);
}

inline __m512 halves(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

inline __m512 bytes(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

// Bytes of a group of one panel: its numbers, then its values.
constexpr int64_t GROUP = 32;
constexpr int64_t group_bytes(int64_t kind) {
  return kind == INT4_GROUPS ? 64 + PANEL * GROUP / 2
                             : (kind == INT8_GROUPS ? 32 : 0) + PANEL * GROUP;
}

// Pairs 4q to 4q + 3 of a group as whole numbers: exact in bfloat16.
template <int KIND>
inline void four_pairs(const uint8_t* group, int q, __m512i table, __m512bh* pairs) {
  if constexpr (KIND == INT4_GROUPS) {
    const __m512i words = _mm512_loadu_si512(group + 64 + q * 64);
    pairs[0] = (__m512bh)_mm512_permutexvar_epi16(words, table);
    pairs[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
    pairs[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
    pairs[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
  } else {
    const uint8_t* from = group + (KIND == INT8_GROUPS ? 32 : 0) + q * 128;
    for (int t = 0; t < 4; ++t)
      pairs[t] = _mm512_cvtne2ps_pbh(bytes(from + t * 32 + 16), bytes(from + t * 32));
  }
}

// As `dots`, from narrow weights, for few rows; `of_x` (rows, groups) holds the sums of x.
template <int KIND, int ROWS, int PANELS>
void narrow_dots(const bf16* x, int64_t stride, const uint8_t* weight, int64_t far, int64_t groups,
                 const float* of_x, float* sums) {
  constexpr int NEAR = PANELS > 1 ? PANELS / 2 : 1;
  const __m512i table = whole_numbers();
  const int64_t panel = groups * group_bytes(KIND);
  __m512 acc[ROWS][PANELS];
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) acc[r][p] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* from[PANELS];
    for (int p = 0; p < PANELS; ++p)
      from[p] = weight + p % NEAR * panel + p / NEAR * far + g * group_bytes(KIND);
    __m512 inner[ROWS][PANELS];
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PANELS; ++p)
        inner[r][p] = KIND == INT8_ROWS ? acc[r][p] : _mm512_setzero_ps();
    for (int q = 0; q < 4; ++q) {
      __m512bh w[PANELS][4];
      for (int p = 0; p < PANELS; ++p) four_pairs<KIND>(from[p], q, table, w[p]);
      for (int t = 0; t < 4; ++t)
        for (int r = 0; r < ROWS; ++r) {
          int32_t pair;
          std::memcpy(&pair, x + r * stride + g * GROUP + q * 8 + t * 2, 4);
          const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
          for (int p = 0; p < PANELS; ++p)
            inner[r][p] = _mm512_dpbf16_ps(inner[r][p], w[p][t], both);
        }
    }
    for (int p = 0; p < PANELS; ++p) {
      if constexpr (KIND == INT8_ROWS) {
        for (int r = 0; r < ROWS; ++r) acc[r][p] = inner[r][p];
      } else {
        const __m512 scale = halves(from[p]);
        for (int r = 0; r < ROWS; ++r)
          acc[r][p] = _mm512_fmadd_ps(inner[r][p], scale, acc[r][p]);
      }
      if constexpr (KIND == INT4_GROUPS) {
        const __m512 least = halves(from[p] + 32);
        for (int r = 0; r < ROWS; ++r)
          acc[r][p] = _mm512_fmadd_ps(least, _mm512_set1_ps(of_x[r * groups + g]), acc[r][p]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) _mm512_storeu_ps(sums + (r * PANELS + p) * 16, acc[r][p]);
}

template <int KIND, int PANELS>
void narrow_dots_of(int64_t rows, const bf16* x, int64_t stride, const uint8_t* w, int64_t far,
                    int64_t groups, const float* of_x, float* sums) {
  switch (rows) {
    case 1: return narrow_dots<KIND, 1, PANELS>(x, stride, w, far, groups, of_x, sums);
    case 2: return narrow_dots<KIND, 2, PANELS>(x, stride, w, far, groups, of_x, sums);
    case 3: return narrow_dots<KIND, 3, PANELS>(x, stride, w, far, groups, of_x, sums);
    default: return narrow_dots<KIND, 4, PANELS>(x, stride, w, far, groups, of_x, sums);
  }
}

constexpr int64_t NARROW_ROWS = 4;  // rows up to which narrow weights are multiplied as they are

template <int KIND>
void multiply_narrow(const Product& by, const bf16* x, int64_t rows, const End& end, Range range) {
  const int64_t groups = by.inputs / GROUP, panel = groups * group_bytes(KIND);
  thread_local Scratch kept;
  float* of_x = nullptr;
  if constexpr (KIND == INT4_GROUPS) {
    of_x = kept.room<float>(rows * groups);
    for (int64_t i = 0; i < rows * groups; ++i)
      of_x[i] = _mm512_reduce_add_ps(
          _mm512_add_ps(load(x + i * GROUP), load(x + i * GROUP + GROUP / 2)));
  }
  for (int64_t p = range.first; p < range.last;) {
    const auto [wide, step] = width_of(range.last - p, end, 4);
    const int64_t far = (end.gated ? by.outputs / PANEL / 2 : wide / 2) * panel;
    const uint8_t* w = (const uint8_t*)by.weight + p * panel;
    alignas(64) float sums[NARROW_ROWS * 4 * 16];
    const auto kernel = wide == 4   ? narrow_dots_of<KIND, 4>
                        : wide == 2 ? narrow_dots_of<KIND, 2>
                                    : narrow_dots_of<KIND, 1>;
    kernel(rows, x, by.inputs, w, far, groups, of_x, sums);
    for (int64_t r = 0; r < rows; ++r) finish(by, end, sums + r * wide * 16, 16, r, p, wide);
    p += step;
  }
}

// Panels of narrow weights in bfloat16: of INT8_ROWS the values, which `finish` scales.
template <int KIND>
void widen(const Product& by, int64_t first, int64_t last, bf16* out) {
  const __m512i table = whole_numbers();
  const int64_t groups = by.inputs / GROUP;
  // Each output's number stands beside itself, as its two inputs do.
  const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int64_t i = first * groups; i < last * groups; ++i) {
    const uint8_t* group = (const uint8_t*)by.weight + i * group_bytes(KIND);
    __m512 scale = _mm512_setzero_ps(), least = scale;
    if constexpr (KIND != INT8_ROWS) scale = halves(group);
    if constexpr (KIND == INT4_GROUPS) least = halves(group + 32);
    const __m512 s0 = _mm512_permutexvar_ps(low, scale), s1 = _mm512_permutexvar_ps(high, scale);
    const __m512 l0 = _mm512_permutexvar_ps(low, least), l1 = _mm512_permutexvar_ps(high, least);
    for (int q = 0; q < 4; ++q) {
      __m512bh pairs[4];
      four_pairs<KIND>(group, q, table, pairs);
      for (int t = 0; t < 4; ++t, out += 2 * PANEL) {
        __m512i values = (__m512i)pairs[t];
        if constexpr (KIND != INT8_ROWS) {
          const __m512 a = _mm512_castsi512_ps(_mm512_slli_epi32(
              _mm512_cvtepu16_epi32(_mm512_castsi512_si256(values)), 16));
          const __m512 b = _mm512_castsi512_ps(_mm512_slli_epi32(
              _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(values, 1)), 16));
          // The products are exact: a value of 8 bits times one of 11.
          values = (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(b, s1, l1),
                                                _mm512_fmadd_ps(a, s0, l0));
        }
        _mm512_storeu_si512(out, values);
      }
    }
  }
}

template <int KIND>
void multiply_quantized(const Product& by, const bf16* x, int64_t rows, const End& end,
                        Range range) {
  if (rows <= NARROW_ROWS) return multiply_narrow<KIND>(by, x, rows, end, range);
  const int64_t panel = by.inputs * PANEL, half = by.outputs / PANEL / 2;
  const int64_t times = end.gated ? 2 : 1;
  const int64_t most = std::max<int64_t>(4, CHUNK / 2 / (panel * sizeof(bf16) * times) / 4 * 4);
  thread_local Scratch kept;
  bf16* wide = kept.room<bf16>(most * panel * times);
  for (int64_t begin = range.first; begin < range.last; begin += most) {
    const int64_t stop = std::min(range.last, begin + most);
    widen<KIND>(by, begin, stop, wide);
    if (end.gated) widen<KIND>(by, half + begin, half + stop, wide + (stop - begin) * panel);
    multiply_wide(by, {wide, (stop - begin) * panel}, x, rows, end, {begin, stop});
  }
}

// This thread's share of x (rows, inputs) times `by`.
void multiply(const Product& by, const bf16* x, int64_t rows, const End& end) {
  const int64_t panels = by.outputs / PANEL / (end.gated ? 2 : 1);
  const int64_t threads = omp_get_num_threads(), mine = omp_get_thread_num();
  const Range range{panels * mine / threads, panels * (mine + 1) / threads};
  switch (by.kind) {
    case INT8_ROWS: return multiply_quantized<INT8_ROWS>(by, x, rows, end, range);
    case INT8_GROUPS: return multiply_quantized<INT8_GROUPS>(by, x, rows, end, range);
    case INT4_GROUPS: return multiply_quantized<INT4_GROUPS>(by, x, rows, end, range);
    default: return multiply_wide(by, panels_of(by, range), x, rows, end, range);
  }
}

}  // namespace
