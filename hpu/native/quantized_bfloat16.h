// Matmuls with quantized weights and BF16 instructions: few rows are multiplied by the quantized
// values; for more rows, panels are dequantized to bfloat16 first. Part of decode.cpp.

#pragma once

#include "quantized_layout.h"

namespace {

// Number of the i-th nibble of each word, and factor of the i-th of four pairs.
template <int KIND>
inline Lanes number(Words words, int place) {
  return KIND == MXFP4 ? fp4(words, place) : int4(words, place);
}
template <int KIND>
inline Factor number_factor(Words words, int pair, int turn) {
  return KIND == MXFP4 ? fp4_factor(words, pair, turn) : int4_factor(words, pair, turn);
}

// Pairs of the inputs 8q to 8q + 7 of a block, unscaled; bfloat16 represents them exactly.
template <int KIND>
inline void four_pairs(const uint8_t* block, int q, Lanes* first, Lanes* second) {
  if constexpr (has_4_bits(KIND)) {
    const Words words = load_words(block + q * 64);
    for (int t = 0; t < 4; ++t)
      first[t] = number<KIND>(words, t), second[t] = number<KIND>(words, 4 + t);
  } else {
    const uint8_t* from = block + q * 128;
    for (int t = 0; t < 4; ++t)
      first[t] = load_int8(from + t * 32), second[t] = load_int8(from + t * 32 + 16);
  }
}

// Rows of x for quantized weights: in the input type of the matmuls, and in float32 with stride
// `inputs`.
struct Rows32 {
  Rows of;
  const float* full;
  int64_t inputs;
};

// Adds the products of a block of each panel, from input `at` on. 4-bit values are multiplied in pairs
// by BF16 instructions; 8-bit values convert to float32 faster.
template <int KIND, int ROWS, int PANELS>
inline void sum_blocks(const uint8_t* const* blocks, const Rows32& rows, int64_t at,
                       Lanes (*sums)[ROWS]) {
  for (int q = 0; q < 4; ++q)
    if constexpr (has_4_bits(KIND)) {
      Words words[PANELS];
      for (int p = 0; p < PANELS; ++p) words[p] = load_words(blocks[p] + q * 64);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 2
          for (int turn = 0; turn < TURNS; ++turn) {
            const Factor weights = number_factor<KIND>(words[p], t, turn);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
              const Input* pair = rows.of.x + r * rows.of.stride + at + q * 8 + t * 2;
              sums[p][r] = dot(sums[p][r], weights, repeat(pair, turn));
            }
          }
    } else {
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) {
        const uint8_t* from = blocks[p] + q * 128;
#pragma GCC unroll 8
        for (int t = 0; t < 8; ++t) {
          const Lanes weights = load_int8(from + t * 16);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) {
            const float* x = rows.full + r * rows.inputs + at + q * 8 + t;
            sums[p][r] = fmadd(weights, set1(*x), sums[p][r]);
          }
        }
      }
    }
}

// `dots` for few rows and quantized weights in groups of `blocks` blocks; `of_x` (rows, groups) holds
// the sums of x.
template <int KIND, int ROWS, int PANELS>
void quantized_dots(const Rows32& rows, const uint8_t* weight, int64_t blocks, int64_t far,
                    const float* of_x, float* sums, int64_t apart) {
  constexpr int NEAR = PANELS > 1 ? PANELS / 2 : 1;
  const int64_t panel = panel_bytes<KIND>(rows.inputs, blocks);
  const int64_t groups = rows.inputs / (blocks * BLOCK), bytes = group_bytes<KIND>(blocks);
  if constexpr (PANELS > 1 && ROWS * PANELS > MOST_SUMS) {
    for (int q = 0; q < 2; ++q)
      quantized_dots<KIND, ROWS, NEAR>(rows, weight + q * far, blocks, panel, of_x,
                                       sums + q * NEAR * 16, apart);
    return;
  }
  Lanes acc[PANELS][ROWS];
  for (int p = 0; p < PANELS; ++p)
    for (int r = 0; r < ROWS; ++r) acc[p][r] = zero();
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t *tables[PANELS], *from[PANELS];
    for (int p = 0; p < PANELS; ++p) {
      tables[p] = weight + p % NEAR * panel + p / NEAR * far + g * bytes;
      from[p] = tables[p] + table_bytes(KIND);
    }
    Lanes inner[PANELS][ROWS];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) inner[p][r] = zero();
    for (int64_t b = 0; b < blocks; ++b) {
      constexpr int64_t ahead = has_4_bits(KIND) ? 2 * AHEAD : AHEAD;
      for (int p = 0; p < PANELS; ++p)
        for (int64_t byte = 0; byte < block_bytes(KIND); byte += 64)
          _mm_prefetch((const char*)from[p] + ahead + byte, _MM_HINT_T1);
      sum_blocks<KIND, ROWS, PANELS>(from, rows, (g * blocks + b) * BLOCK, inner);
      for (int p = 0; p < PANELS; ++p) from[p] += block_bytes(KIND);
      if constexpr (!is_stored(KIND)) break;
    }
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        Lanes& sum = acc[p][r];
        sum = KIND == INT8_ROWS ? add(sum, inner[p][r])
                                : fmadd(inner[p][r], scales_of<KIND>(tables[p]), sum);
        if constexpr (has_minima(KIND))
          sum = fmadd(minima_of<KIND>(tables[p]), set1(of_x[r * groups + g]), sum);
      }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) store(sums + r * apart + p * 16, acc[p][r]);
}

template <int KIND, int PANELS>
void quantized_dots_of(int64_t count, const Rows32& rows, const uint8_t* w, int64_t blocks,
                       int64_t far, const float* of_x, float* sums) {
  constexpr int64_t apart = PANELS * 16;
  switch (count) {
    case 1: return quantized_dots<KIND, 1, PANELS>(rows, w, blocks, far, of_x, sums, apart);
    case 2: return quantized_dots<KIND, 2, PANELS>(rows, w, blocks, far, of_x, sums, apart);
    case 3: return quantized_dots<KIND, 3, PANELS>(rows, w, blocks, far, of_x, sums, apart);
    case 4: return quantized_dots<KIND, 4, PANELS>(rows, w, blocks, far, of_x, sums, apart);
  }
  if constexpr (has_4_bits(KIND) && PANELS <= 2) switch (count) {
    case 5: return quantized_dots<KIND, 5, PANELS>(rows, w, blocks, far, of_x, sums, apart);
    case 6: return quantized_dots<KIND, 6, PANELS>(rows, w, blocks, far, of_x, sums, apart);
    case 7: return quantized_dots<KIND, 7, PANELS>(rows, w, blocks, far, of_x, sums, apart);
    default: return quantized_dots<KIND, 8, PANELS>(rows, w, blocks, far, of_x, sums, apart);
  }
}

// Maximum rows that are multiplied by the quantized values directly. Turning a pair of 4-bit values into
// a factor takes two instructions, into a scaled bfloat16 factor, which tiles need, nine.
constexpr int64_t FEW_ROWS = 4, FEW_ROWS_OF_4_BITS = 64;
constexpr int64_t MOST_AT_ONCE = 8;  // rows: the registers hold their sums for two panels

template <int KIND>
void multiply_few_rows(const Product& by, const bf16* x, int64_t rows, const End& end, Range range) {
  const int64_t blocks = blocks_of<KIND>(by), groups = by.inputs / (blocks * BLOCK);
  const int64_t panel = panel_bytes<KIND>(by.inputs, blocks);
  thread_local Scratch kept, summed;
  constexpr bool widens = !has_4_bits(KIND) || !std::is_same_v<Input, bf16>;
  float* full = widens ? kept.room<float>(rows * by.inputs) : nullptr;
  float* of_x = summed.room<float>(rows * groups);
  for (int64_t g = 0; g < rows * groups; ++g) {
    Lanes sum = zero();
    for (int64_t i = g * blocks; i < (g + 1) * blocks; ++i) {
      const Lanes low = load(x + i * BLOCK), high = load(x + i * BLOCK + BLOCK / 2);
      if constexpr (widens) store(full + i * BLOCK, low), store(full + i * BLOCK + BLOCK / 2, high);
      if constexpr (has_minima(KIND)) sum = add(sum, add(low, high));
    }
    if constexpr (has_minima(KIND)) of_x[g] = reduce_add(sum);
  }
  Rows of;
  if constexpr (std::is_same_v<Input, bf16>) of = {(const Input*)x, by.inputs};
  else of = {(const Input*)full, by.inputs};
  const int64_t parts = (rows + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
  for (int64_t p = range.first; p < range.last;) {
    const auto [wide, step] = width_of(range.last - p, end, rows > FEW_ROWS ? 2 : 4);
    const int64_t far = (end.gated ? by.outputs / PANEL / 2 : wide / 2) * panel;
    const uint8_t* w = (const uint8_t*)by.weight + p * panel;
    alignas(64) float sums[std::max(FEW_ROWS * 4, MOST_AT_ONCE * 2) * 16];
    const auto kernel = wide == 4   ? quantized_dots_of<KIND, 4>
                        : wide == 2 ? quantized_dots_of<KIND, 2>
                                    : quantized_dots_of<KIND, 1>;
    // The panels stay in the L1 cache while all rows are multiplied.
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = rows * part / parts, count = rows * (part + 1) / parts - first;
      const Rows some{of.x + first * of.stride, of.stride};
      const float* wide_x = widens ? full + first * by.inputs : nullptr;
      kernel(count, {some, wide_x, by.inputs}, w, blocks, far, of_x + first * groups, sums);
      for (int64_t r = 0; r < count; ++r)
        finish(by, end, sums + r * wide * 16, 16, first + r, p, wide);
    }
    p += step;
  }
}

constexpr int64_t AHEAD_OF_DEQUANTIZED = 2560;  // prefetch distance, in bytes

// Dequantizes panels to bfloat16. INT8_ROWS stays unscaled; `finish` scales its sums.
template <int KIND>
void dequantize(const Product& by, int64_t first, int64_t last, bf16* out) {
  const int64_t blocks = blocks_of<KIND>(by), groups = by.inputs / (blocks * BLOCK);
  for (int64_t i = first * groups; i < last * groups; ++i) {
    const uint8_t* group = (const uint8_t*)by.weight + i * group_bytes<KIND>(blocks);
    for (int64_t byte = 0; byte < group_bytes<KIND>(blocks); byte += 64)
      _mm_prefetch((const char*)group + AHEAD_OF_DEQUANTIZED + byte, _MM_HINT_T1);
    Lanes scales = set1(1), least = zero();
    if constexpr (KIND != INT8_ROWS) scales = scales_of<KIND>(group);
    if constexpr (has_minima(KIND)) least = minima_of<KIND>(group);
    const uint8_t* block = group + table_bytes(KIND);
    for (const uint8_t* end = block + blocks * block_bytes(KIND); block < end;
         block += block_bytes(KIND))
      for (int q = 0; q < 4; ++q) {
        Lanes a[4], b[4];
        four_pairs<KIND>(block, q, a, b);
        for (int t = 0; t < 4; ++t, out += 2 * PANEL) {
          if constexpr (KIND != INT8_ROWS) {
            // Rounded once here, and once to bfloat16.
            a[t] = fmadd(a[t], scales, least);
            b[t] = fmadd(b[t], scales, least);
          }
          if constexpr (KIND == INT8_ROWS) store_exact_pairs(out, a[t], b[t]);
          else store_pairs(out, a[t], b[t]);
        }
      }
  }
}

template <int KIND>
void multiply_in_bfloat16(const Product& by, const bf16* x, int64_t rows, const End& end,
                          Range range) {
  if (rows <= (has_4_bits(KIND) && !has_tiles ? FEW_ROWS_OF_4_BITS : FEW_ROWS))
    return multiply_few_rows<KIND>(by, x, rows, end, range);
  const int64_t panel = by.inputs * PANEL, half = by.outputs / PANEL / 2;
  const int64_t times = end.gated ? 2 : 1;
  const int64_t most = std::max<int64_t>(4, CHUNK / 2 / (panel * sizeof(bf16) * times) / 4 * 4);
  thread_local Scratch kept;
  bf16* wide = kept.room<bf16>(most * panel * times);
  for (int64_t begin = range.first; begin < range.last; begin += most) {
    const int64_t stop = std::min(range.last, begin + most);
    dequantize<KIND>(by, begin, stop, wide);
    if (end.gated) dequantize<KIND>(by, half + begin, half + stop, wide + (stop - begin) * panel);
    multiply_wide(by, {wide, (stop - begin) * panel}, x, rows, end, {begin, stop});
  }
}

}  // namespace
