// Matrix products of the CPU back end: x W^T for weights in bfloat16 or fewer bits, with dot products
// (AVX512-BF16) or tiles (AMX). Knows no models. Part of decode.cpp.
//
// Weights lie in panels of 16 outputs, two inputs side by side, as dot products and tiles read them.

#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
constexpr int PANEL = 16;
constexpr int TILE_INPUTS = 32;
constexpr int64_t CHUNK = 1 << 20;  // bytes of weights that stay in the second cache

inline __m512 load(const bf16* from) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}

inline void store(bf16* to, __m512 value) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value));
}

// ROWS rows times PANELS panels of 16 outputs.
template <int ROWS, int PANELS>
inline void tile(const bf16* x, int64_t stride, const bf16* weight, int64_t pairs, __m512* sums) {
  __m512 acc[ROWS][PANELS];
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) acc[r][p] = _mm512_setzero_ps();
  const int64_t panel = pairs * 2 * PANEL;
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh w[PANELS];
    for (int p = 0; p < PANELS; ++p)
      w[p] = (__m512bh)_mm512_loadu_si512(weight + p * panel + k * 2 * PANEL);
    for (int r = 0; r < ROWS; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * stride + 2 * k, 4);
      __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int p = 0; p < PANELS; ++p) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], w[p], both);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) sums[r * PANELS + p] = acc[r][p];
}

template <int PANELS>
void tile_rows(int rows, const bf16* x, int64_t stride, const bf16* w, int64_t pairs, __m512* s) {
  switch (rows) {
    case 1: return tile<1, PANELS>(x, stride, w, pairs, s);
    case 2: return tile<2, PANELS>(x, stride, w, pairs, s);
    case 3: return tile<3, PANELS>(x, stride, w, pairs, s);
    case 4: return tile<4, PANELS>(x, stride, w, pairs, s);
    case 5: return tile<5, PANELS>(x, stride, w, pairs, s);
    default: return tile<6, PANELS>(x, stride, w, pairs, s);
  }
}

// How a weight lies in memory. Of the narrow kinds hpu/native/quantized.py makes the panels; a group
// is 32 inputs, its numbers are float16.
enum Kind : int64_t {
  WIDE,          // bfloat16
  INT8_ROWS,     // value * scale of the output
  INT8_GROUPS,   // value * scale of the group
  INT4_GROUPS,   // value * scale of the group + least of the group
};

struct Product {
  const bf16* weight;
  const bf16* bias;
  int64_t outputs, inputs, kind;
  const float* scales;  // of the outputs, for INT8_ROWS
};

// Where the sums of `width` panels of a row block go: rounded to `out`, or added to `total`.
inline void finish(const Product& by, const float* sums, int64_t row_stride, int64_t panel_stride,
                   int64_t row, int64_t rows, int64_t panel, int width, bf16* out, bf16* total,
                   float alpha) {
  if (width == 2 && !by.bias && !total && !by.scales) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = sums + r * row_stride;
      const __m512bh both =
          _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + panel_stride), _mm512_loadu_ps(from));
      _mm512_storeu_si512(out + (row + r) * by.outputs + panel * PANEL, (__m512i)both);
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int q = 0; q < width; ++q) {
      __m512 sum = _mm512_loadu_ps(sums + r * row_stride + q * panel_stride);
      const int64_t at = (panel + q) * PANEL;
      if (by.scales) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(by.scales + at));
      if (by.bias) sum = _mm512_add_ps(sum, load(by.bias + at));
      bf16* place = (total ? total : out) + (row + r) * by.outputs + at;
      if (total) sum = _mm512_fmadd_ps(_mm512_set1_ps(alpha), sum, load(place));
      store(place, sum);
    }
}

#ifdef __AMX_BF16__
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Sums in tiles 0 to 3, rows of x in 4 and 5, weights in 6 and 7.
void configure(int first, int second) {
  TileConfig config;
  const int rows[8] = {first, first, second, second, first, second, 16, 16};
  for (int t = 0; t < 8; ++t) config.bytes[t] = 64, config.rows[t] = rows[t];
  _tile_loadconfig(&config);
}

// Up to 32 rows times `wide` panels: 4 panels for up to 16 rows, else 2 or 1.
void multiply_block(const Product& by, const bf16* x, int64_t row, int64_t count, int64_t p,
                    int wide, bf16* out, bf16* total, float alpha) {
  const int64_t steps = by.inputs / TILE_INPUTS, panel = by.inputs * PANEL;
  const int64_t stride = by.inputs * sizeof(bf16);
  const bf16 *a = x + row * by.inputs, *a1 = a + 16 * by.inputs, *w = by.weight + p * panel;
  alignas(64) float sums[32 * 32];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (wide == 4) {
    for (int64_t k = 0; k < steps; ++k) {
      const bf16* at = w + k * 512;
      _tile_loadd(4, a + k * 32, stride);
      _tile_loadd(6, at, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, at + panel, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, at + 2 * panel, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, at + 3 * panel, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
    return finish(by, sums, 16, 256, row, count, p, 4, out, total, alpha);
  }
  for (int64_t k = 0; k < steps; ++k) {
    const bf16* at = w + k * 512;
    _tile_loadd(4, a + k * 32, stride);
    _tile_loadd(6, at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (wide == 2) {
      _tile_loadd(7, at + panel, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (count > 16) {
      _tile_loadd(5, a1 + k * 32, stride);
      _tile_dpbf16ps(2, 5, 6);
      if (wide == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (count > 16) {
    _tile_stored(2, sums + 512, 128);
    _tile_stored(3, sums + 528, 128);
  }
  finish(by, sums, 32, 16, row, count, p, wide, out, total, alpha);
}

void multiply_tiles(const Product& by, const bf16* x, int64_t rows, bf16* out, bf16* total,
                    float alpha, int64_t first, int64_t last) {
  // So many panels stay in the second cache while the rows pass by.
  const int64_t most = std::max<int64_t>(4, CHUNK / (by.inputs * PANEL * sizeof(bf16)) / 4 * 4);
  int shape = 0;
  for (int64_t begin = first; begin < last; begin += most) {
    const int64_t end = std::min(last, begin + most);
    for (int64_t row = 0; row < rows; row += 32) {
      const int count = std::min<int64_t>(rows - row, 32);
      const int r0 = std::min(count, 16), r1 = count > 16 ? count - 16 : r0;
      if (shape != r0 * 32 + r1) configure(r0, r1), shape = r0 * 32 + r1;
      for (int64_t p = begin; p < end;) {
        const int wide = count <= 16 && end - p >= 4 ? 4 : end - p >= 2 ? 2 : 1;
        multiply_block(by, x, row, count, p, wide, out, total, alpha);
        p += wide;
      }
    }
  }
  _tile_release();
}
#endif

bool has_tiles = false;

// Panels `first` to `last` of out = x W^T + bias, (rows, outputs); with `total`, total += alpha * that.
void multiply_wide(const Product& by, const bf16* x, int64_t rows, bf16* out, bf16* total,
                   float alpha, int64_t first, int64_t last) {
  const int64_t pairs = by.inputs / 2;
#ifdef __AMX_BF16__
  if (has_tiles && by.inputs % TILE_INPUTS == 0)
    return multiply_tiles(by, x, rows, out, total, alpha, first, last);
#endif
  const int64_t tiles = (rows + 5) / 6;
  for (int64_t p = first; p < last;) {
    const int width = last - p >= 4 ? 4 : last - p >= 2 ? 2 : 1;
    const bf16* w = by.weight + p * pairs * 2 * PANEL;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin;
      alignas(64) float sums[24 * 16];
      const bf16* from = x + begin * by.inputs;
      if (width == 4) tile_rows<4>(count, from, by.inputs, w, pairs, (__m512*)sums);
      else if (width == 2) tile_rows<2>(count, from, by.inputs, w, pairs, (__m512*)sums);
      else tile_rows<1>(count, from, by.inputs, w, pairs, (__m512*)sums);
      finish(by, sums, width * 16, 16, begin, count, p, width, out, total, alpha);
    }
    p += width;
  }
}

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

// As `tile`, from narrow weights, for few rows; `of_x` (rows, groups) holds the sums of x.
template <int KIND, int ROWS, int PANELS>
void narrow_tile(const bf16* x, int64_t stride, const uint8_t* weight, int64_t groups,
                 const float* of_x, float* sums) {
  const __m512i table = whole_numbers();
  const int64_t panel = groups * group_bytes(KIND);
  __m512 acc[ROWS][PANELS];
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) acc[r][p] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* group = weight + g * group_bytes(KIND);
    __m512 inner[ROWS][PANELS];
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PANELS; ++p)
        inner[r][p] = KIND == INT8_ROWS ? acc[r][p] : _mm512_setzero_ps();
    for (int q = 0; q < 4; ++q) {
      __m512bh w[PANELS][4];
      for (int p = 0; p < PANELS; ++p) four_pairs<KIND>(group + p * panel, q, table, w[p]);
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
        const __m512 scale = halves(group + p * panel);
        for (int r = 0; r < ROWS; ++r)
          acc[r][p] = _mm512_fmadd_ps(inner[r][p], scale, acc[r][p]);
      }
      if constexpr (KIND == INT4_GROUPS) {
        const __m512 least = halves(group + p * panel + 32);
        for (int r = 0; r < ROWS; ++r)
          acc[r][p] = _mm512_fmadd_ps(least, _mm512_set1_ps(of_x[r * groups + g]), acc[r][p]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) _mm512_storeu_ps(sums + (r * PANELS + p) * 16, acc[r][p]);
}

template <int KIND, int PANELS>
void narrow_rows(int64_t rows, const bf16* x, int64_t stride, const uint8_t* w, int64_t groups,
                 const float* of_x, float* sums) {
  switch (rows) {
    case 1: return narrow_tile<KIND, 1, PANELS>(x, stride, w, groups, of_x, sums);
    case 2: return narrow_tile<KIND, 2, PANELS>(x, stride, w, groups, of_x, sums);
    case 3: return narrow_tile<KIND, 3, PANELS>(x, stride, w, groups, of_x, sums);
    default: return narrow_tile<KIND, 4, PANELS>(x, stride, w, groups, of_x, sums);
  }
}

constexpr int64_t NARROW_ROWS = 4;  // rows up to which narrow weights are multiplied as they are

template <int KIND>
void multiply_narrow(const Product& by, const bf16* x, int64_t rows, bf16* out, bf16* total,
                     float alpha, int64_t first, int64_t last) {
  const int64_t groups = by.inputs / GROUP, panel = groups * group_bytes(KIND);
  thread_local std::vector<float> of_x;
  if constexpr (KIND == INT4_GROUPS) {
    of_x.resize(rows * groups);
    for (int64_t i = 0; i < rows * groups; ++i)
      of_x[i] = _mm512_reduce_add_ps(
          _mm512_add_ps(load(x + i * GROUP), load(x + i * GROUP + GROUP / 2)));
  }
  for (int64_t p = first; p < last;) {
    const int width = last - p >= 4 ? 4 : last - p >= 2 ? 2 : 1;
    const uint8_t* w = (const uint8_t*)by.weight + p * panel;
    alignas(64) float sums[NARROW_ROWS * 4 * 16];
    if (width == 4) narrow_rows<KIND, 4>(rows, x, by.inputs, w, groups, of_x.data(), sums);
    else if (width == 2) narrow_rows<KIND, 2>(rows, x, by.inputs, w, groups, of_x.data(), sums);
    else narrow_rows<KIND, 1>(rows, x, by.inputs, w, groups, of_x.data(), sums);
    finish(by, sums, width * 16, 16, 0, rows, p, width, out, total, alpha);
    p += width;
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
void multiply_quantized(const Product& by, const bf16* x, int64_t rows, bf16* out, bf16* total,
                        float alpha, int64_t first, int64_t last) {
  if (rows <= NARROW_ROWS)
    return multiply_narrow<KIND>(by, x, rows, out, total, alpha, first, last);
  const int64_t panel = by.inputs * PANEL;
  const int64_t most = std::max<int64_t>(4, CHUNK / 2 / (panel * sizeof(bf16)) / 4 * 4);
  thread_local std::vector<bf16> kept;
  for (int64_t begin = first; begin < last; begin += most) {
    const int64_t end = std::min(last, begin + most);
    if (int64_t(kept.size()) < most * panel) kept.resize(most * panel);
    widen<KIND>(by, begin, end, kept.data());
    Product wide = by;
    wide.weight = kept.data() - begin * panel;
    multiply_wide(wide, x, rows, out, total, alpha, begin, end);
  }
}

// This thread's share.
void multiply(const Product& by, const bf16* x, int64_t rows, bf16* out, bf16* total, float alpha) {
  const int64_t panels = by.outputs / PANEL;
  const int64_t threads = omp_get_num_threads(), mine = omp_get_thread_num();
  const int64_t first = panels * mine / threads, last = panels * (mine + 1) / threads;
  switch (by.kind) {
    case INT8_ROWS:
      return multiply_quantized<INT8_ROWS>(by, x, rows, out, total, alpha, first, last);
    case INT8_GROUPS:
      return multiply_quantized<INT8_GROUPS>(by, x, rows, out, total, alpha, first, last);
    case INT4_GROUPS:
      return multiply_quantized<INT4_GROUPS>(by, x, rows, out, total, alpha, first, last);
    default:
      return multiply_wide(by, x, rows, out, total, alpha, first, last);
  }
}

}  // namespace
