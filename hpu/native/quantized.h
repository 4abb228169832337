// Products with quantized weights: few rows use the quantized values directly; for more rows, panels
// are dequantized to bfloat16 first. Part of decode.cpp.

#pragma once

#include "products.h"

namespace {

// The integers of INT4_GROUPS in bfloat16, twice: the lookup uses five bits, of which four matter.
inline __m512i whole_numbers() {
  alignas(64) static const bf16 numbers[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  return _mm512_load_si512(numbers);
}

inline __m512 halves(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

inline __m512 bytes(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

// Bytes of one group of a panel: its scales and minima, then its values.
constexpr int64_t GROUP = 32;
constexpr int64_t group_bytes(int64_t kind) {
  return kind == INT4_GROUPS ? 64 + PANEL * GROUP / 2
                             : (kind == INT8_GROUPS ? 32 : 0) + PANEL * GROUP;
}

// Pairs of the inputs 4q to 4q + 3 of a group: integers, which bfloat16 represents exactly.
template <int KIND>
inline void four_pairs(const uint8_t* group, int q, __m512* first, __m512* second) {
  if constexpr (KIND == INT4_GROUPS) {
    const __m512 numbers =
        _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i words = _mm512_loadu_si512(group + 64 + q * 64);
    for (int t = 0; t < 4; ++t) {
      first[t] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * t), numbers);
      second[t] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 16 + 4 * t), numbers);
    }
  } else {
    const uint8_t* from = group + (KIND == INT8_GROUPS ? 32 : 0) + q * 128;
    for (int t = 0; t < 4; ++t)
      first[t] = bytes(from + t * 32), second[t] = bytes(from + t * 32 + 16);
  }
}

// Rows of x for quantized weights, from one input on: bfloat16 and float32, with stride `inputs`.
struct Rows32 {
  const bf16* x;
  const float* full;
  int64_t inputs;
};

// Sums of one group of each panel, from input `at`. 4-bit values are looked up as bfloat16 pairs and
// multiplied as such; 8-bit values convert to float32 faster.
template <int KIND, int ROWS, int PANELS>
inline void sum_groups(const uint8_t* const* groups, const Rows32& rows, int64_t at,
                       __m512 (*sums)[ROWS]) {
  for (int p = 0; p < PANELS; ++p)
    for (int r = 0; r < ROWS; ++r) sums[p][r] = _mm512_setzero_ps();
  for (int q = 0; q < 4; ++q)
    if constexpr (KIND == INT4_GROUPS) {
      const __m512i numbers = whole_numbers();
      __m512i words[PANELS];
      for (int p = 0; p < PANELS; ++p) words[p] = _mm512_loadu_si512(groups[p] + 64 + q * 64);
      for (int t = 0; t < 4; ++t)
        for (int p = 0; p < PANELS; ++p) {
          const __m512i nibbles = _mm512_srli_epi16(words[p], 4 * t);
          const __m512bh weights = (__m512bh)_mm512_permutexvar_epi16(nibbles, numbers);
          for (int r = 0; r < ROWS; ++r) {
            int32_t pair;
            std::memcpy(&pair, rows.x + r * rows.inputs + at + q * 8 + t * 2, 4);
            sums[p][r] = _mm512_dpbf16_ps(sums[p][r], weights, (__m512bh)_mm512_set1_epi32(pair));
          }
        }
    } else {
      for (int p = 0; p < PANELS; ++p) {
        __m512 first[4], second[4];
        four_pairs<KIND>(groups[p], q, first, second);
        for (int t = 0; t < 4; ++t)
          for (int r = 0; r < ROWS; ++r) {
            const float* pair = rows.full + r * rows.inputs + at + q * 8 + t * 2;
            sums[p][r] = _mm512_fmadd_ps(first[t], _mm512_set1_ps(pair[0]), sums[p][r]);
            sums[p][r] = _mm512_fmadd_ps(second[t], _mm512_set1_ps(pair[1]), sums[p][r]);
          }
      }
    }
}

// Like `dots`, with quantized weights and few rows; `of_x` (rows, groups) holds the sums of x.
template <int KIND, int ROWS, int PANELS>
void quantized_dots(const Rows32& rows, const uint8_t* weight, int64_t far, const float* of_x,
                 float* sums) {
  constexpr int NEAR = PANELS > 1 ? PANELS / 2 : 1;
  const int64_t groups = rows.inputs / GROUP, panel = groups * group_bytes(KIND);
  __m512 acc[PANELS][ROWS];
  for (int p = 0; p < PANELS; ++p)
    for (int r = 0; r < ROWS; ++r) acc[p][r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* from[PANELS];
    for (int p = 0; p < PANELS; ++p)
      from[p] = weight + p % NEAR * panel + p / NEAR * far + g * group_bytes(KIND);
    // 4-bit products are compute-bound: prefetching gains nothing.
    if constexpr (KIND != INT4_GROUPS)
      for (int p = 0; p < PANELS; ++p)
        for (int64_t b = 0; b < group_bytes(KIND); b += 64)
          _mm_prefetch((const char*)from[p] + AHEAD + b, _MM_HINT_T0);
    __m512 inner[PANELS][ROWS];
    sum_groups<KIND, ROWS, PANELS>(from, rows, g * GROUP, inner);
    for (int p = 0; p < PANELS; ++p)
      for (int r = 0; r < ROWS; ++r) {
        __m512& sum = acc[p][r];
        sum = KIND == INT8_ROWS ? _mm512_add_ps(sum, inner[p][r])
                                : _mm512_fmadd_ps(inner[p][r], halves(from[p]), sum);
        if constexpr (KIND == INT4_GROUPS) {
          const __m512 of_group = _mm512_set1_ps(of_x[r * groups + g]);
          sum = _mm512_fmadd_ps(halves(from[p] + 32), of_group, sum);
        }
      }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) _mm512_storeu_ps(sums + (r * PANELS + p) * 16, acc[p][r]);
}

template <int KIND, int PANELS>
void quantized_dots_of(int64_t count, const Rows32& rows, const uint8_t* w, int64_t far,
                    const float* of_x, float* sums) {
  switch (count) {
    case 1: return quantized_dots<KIND, 1, PANELS>(rows, w, far, of_x, sums);
    case 2: return quantized_dots<KIND, 2, PANELS>(rows, w, far, of_x, sums);
    case 3: return quantized_dots<KIND, 3, PANELS>(rows, w, far, of_x, sums);
    default: return quantized_dots<KIND, 4, PANELS>(rows, w, far, of_x, sums);
  }
}

constexpr int64_t FEW_ROWS = 4;  // up to this many rows the quantized values are multiplied directly

template <int KIND>
void multiply_few_rows(const Product& by, const bf16* x, int64_t rows, const End& end, Range range) {
  const int64_t groups = by.inputs / GROUP, panel = groups * group_bytes(KIND);
  thread_local Scratch kept, summed;
  float *full = kept.room<float>(rows * by.inputs), *of_x = summed.room<float>(rows * groups);
  for (int64_t i = 0; i < rows * groups; ++i) {
    const __m512 low = load(x + i * GROUP), high = load(x + i * GROUP + GROUP / 2);
    _mm512_store_ps(full + i * GROUP, low);
    _mm512_store_ps(full + i * GROUP + GROUP / 2, high);
    if constexpr (KIND == INT4_GROUPS) of_x[i] = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
  }
  for (int64_t p = range.first; p < range.last;) {
    const auto [wide, step] = width_of(range.last - p, end, 4);
    const int64_t far = (end.gated ? by.outputs / PANEL / 2 : wide / 2) * panel;
    const uint8_t* w = (const uint8_t*)by.weight + p * panel;
    alignas(64) float sums[FEW_ROWS * 4 * 16];
    const auto kernel = wide == 4   ? quantized_dots_of<KIND, 4>
                        : wide == 2 ? quantized_dots_of<KIND, 2>
                                    : quantized_dots_of<KIND, 1>;
    kernel(rows, {x, full, by.inputs}, w, far, of_x, sums);
    for (int64_t r = 0; r < rows; ++r) finish(by, end, sums + r * wide * 16, 16, r, p, wide);
    p += step;
  }
}

// Dequantizes panels to bfloat16; INT8_ROWS keeps the unscaled values, which `finish` scales.
template <int KIND>
void widen(const Product& by, int64_t first, int64_t last, bf16* out) {
  const int64_t groups = by.inputs / GROUP;
  alignas(64) static const int16_t side_by_side[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(side_by_side);
  for (int64_t i = first * groups; i < last * groups; ++i) {
    const uint8_t* group = (const uint8_t*)by.weight + i * group_bytes(KIND);
    __m512 scale = _mm512_set1_ps(1), least = _mm512_setzero_ps();
    if constexpr (KIND != INT8_ROWS) scale = halves(group);
    if constexpr (KIND == INT4_GROUPS) least = halves(group + 32);
    for (int q = 0; q < 4; ++q) {
      __m512 a[4], b[4];
      four_pairs<KIND>(group, q, a, b);
      for (int t = 0; t < 4; ++t, out += 2 * PANEL) {
        if constexpr (KIND != INT8_ROWS) {
          // The product is exact: 8 significant bits times 11.
          a[t] = _mm512_fmadd_ps(a[t], scale, least);
          b[t] = _mm512_fmadd_ps(b[t], scale, least);
        }
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b[t], a[t]);
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(order, both));
      }
    }
  }
}

template <int KIND>
void multiply_quantized(const Product& by, const bf16* x, int64_t rows, const End& end,
                        Range range) {
  if (rows <= FEW_ROWS) return multiply_few_rows<KIND>(by, x, rows, end, range);
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

// This thread's share of the product of x (rows, inputs) and `by`.
void multiply(const Product& by, const bf16* x, int64_t rows, const End& end) {
  const Range range = share_of(by, end.gated);
  switch (by.kind) {
    case INT8_ROWS: return multiply_quantized<INT8_ROWS>(by, x, rows, end, range);
    case INT8_GROUPS: return multiply_quantized<INT8_GROUPS>(by, x, rows, end, range);
    case INT4_GROUPS: return multiply_quantized<INT4_GROUPS>(by, x, rows, end, range);
    default: return multiply_wide(by, panels_of(by, range), x, rows, end, range);
  }
}

}  // namespace
