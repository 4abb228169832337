// Matmuls with quantized weights in 8-bit integers, for CPUs with AVX512-VNNI: an instruction multiplies
// twice as many elements as with 16-bit pairs, and weights need no conversion. Part of decode.cpp.
//
// x is rounded to 8 bits in blocks of 32 inputs that share a scale. If rounding changes the inputs below
// the largest by more than 1/40 (root mean square), for example because an input is far larger than the
// others, the rounding error is rounded to 8 more bits and multiplied, too. The sum of each block is
// exact, and sums are added in the order of the inputs, so a row has the same results in every batch.

#pragma once

#include "quantized_layout.h"

namespace {

// Rows of x, block by block: `x` holds integers (parts, rows, 32), in the input order of the words of
// weights; a block has one or two parts. `scales` and `begins` (parts, rows): scale of each part, and
// initial value of its sum of products. `parts`: number of parts of each block. `sums` (groups, rows):
// sum of x of each group.
struct ByteRows {
  int8_t* x;
  float *scales, *sums;
  int32_t* begins;
  uint8_t* parts;
};

// Added to each weight, because weights are multiplied as unsigned bytes.
constexpr int added_to(int64_t kind) { return kind == MXFP4 ? 12 : has_4_bits(kind) ? 0 : 128; }

// The i-th of eight words of a block: four inputs of each output.
template <int KIND>
inline Words word_of(const uint8_t* block, int i) {
  if constexpr (!has_4_bits(KIND)) {
    return four_inputs(load_words(block + i * 64));
  } else {
    const Words values = four_nibbles(load_words(block + i / 2 * 64), i % 2);
    return KIND == MXFP4 ? fp4_bytes(values) : values;
  }
}

// Rows of a kernel: the registers hold their sums together with the sums of a block.
constexpr int64_t MOST_BYTE_ROWS = 6, MOST_OF_FOUR_PANELS = 3;
constexpr int64_t MOST_AHEAD = 1 << 16;  // maximum prefetch distance in bytes

// Returns the scale of a block of x, and in `by` the factor that makes its largest magnitude 127; NaN if
// an element is not finite. FP4 weights are stored as twice their values, so the scale is halved.
template <int KIND>
inline float scale_of(const bf16* x, float* by) {
  const int bits = largest_bits(x, BLOCK);
  const uint32_t wide = uint32_t(bits) << 16;
  float most;
  std::memcpy(&most, &wide, 4);
  if (bits >= 0x7f80) most = NAN;
  // Keeps the reciprocal finite.
  else most = std::max(most, 0x1p-120f);
  *by = 127 / most;
  return most * (KIND == MXFP4 ? 0.5f / 127 : 1.0f / 127);
}

// Dot products of ROWS rows and PANELS panels, in `groups` groups of `blocks` blocks, as `sums` (rows,
// panels, 16). `next`: prefetch distance in bytes; 0: no prefetch.
template <int KIND, int ROWS, int PANELS>
void byte_dots(const ByteRows& rows, const uint8_t* const* panels, int64_t groups, int64_t blocks,
               int64_t next, float* sums) {
  const uint8_t* from[PANELS];
  Lanes total[PANELS][ROWS];
#pragma GCC unroll 4
  for (int p = 0; p < PANELS; ++p) {
    from[p] = panels[p];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) total[p][r] = zero();
  }
  const int8_t* x = rows.x;
  const float *x_scales = rows.scales, *x_sums = rows.sums;
  const int32_t* begins = rows.begins;
  const uint8_t* parts = rows.parts;
  for (int64_t g = 0; g < groups; ++g, x_sums += ROWS) {
    const uint8_t* tables[PANELS];
    for (int p = 0; p < PANELS; ++p) tables[p] = from[p], from[p] += table_bytes(KIND);
    for (int64_t part = parts[0], b = 0; b < blocks;) {
      Words inner[PANELS][ROWS];
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        const Words begin = repeat_word(added_to(KIND) ? begins[r] : 0);
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) inner[p][r] = begin;
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        Words weights[PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) weights[p] = word_of<KIND>(from[p], i);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
          int32_t four;
          std::memcpy(&four, x + r * BLOCK + i * 4, 4);
          const Words inputs = repeat_word(four);
#pragma GCC unroll 4
          for (int p = 0; p < PANELS; ++p) inner[p][r] = dot_bytes(inner[p][r], weights[p], inputs);
        }
      }
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) {
        Lanes scales = set1(1);
        if constexpr (!has_row_scales(KIND)) scales = scales_of<KIND>(tables[p]);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
          const Lanes by = set1(x_scales[r]), sum = to_lanes(inner[p][r]);
          total[p][r] = fmadd(sum, has_row_scales(KIND) ? by : mul(scales, by), total[p][r]);
        }
      }
      x += ROWS * BLOCK, x_scales += ROWS, begins += ROWS;
      if (--part) continue;
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) {
        if (next)
          for (int64_t byte = 0; byte < block_bytes(KIND) + table_bytes(KIND); byte += 64)
            _mm_prefetch((const char*)from[p] + next + byte, _MM_HINT_T1);
        from[p] += block_bytes(KIND);
      }
      part = *++parts, ++b;
    }
    if constexpr (has_minima(KIND))
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) {
        const Lanes least = minima_of<KIND>(tables[p]);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) total[p][r] = fmadd(least, set1(x_sums[r]), total[p][r]);
      }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p) store(sums + (r * PANELS + p) * PANEL, total[p][r]);
}

template <int KIND, int PANELS>
auto byte_dots_of(int64_t rows) {
  if constexpr (PANELS <= 2) switch (rows) {
    case 4: return byte_dots<KIND, 4, PANELS>;
    case 5: return byte_dots<KIND, 5, PANELS>;
    case 6: return byte_dots<KIND, 6, PANELS>;
  }
  switch (rows) {
    case 1: return byte_dots<KIND, 1, PANELS>;
    case 2: return byte_dots<KIND, 2, PANELS>;
    default: return byte_dots<KIND, 3, PANELS>;
  }
}

// Rounds rows of x into `to`.
template <int KIND>
void round_rows(const bf16* x, int64_t inputs, int64_t blocks, int64_t rows, const ByteRows& to) {
  constexpr bool IN_NIBBLES = has_4_bits(KIND);
  int8_t* bytes = to.x;
  float *scales = to.scales, *sums = to.sums;
  int32_t* begins = to.begins;
  std::fill_n(sums, inputs / BLOCK / blocks * rows, 0.0f);
  for (int64_t b = 0; b < inputs / BLOCK; ++b, x += BLOCK) {
    float by[MOST_BYTE_ROWS], lost[MOST_BYTE_ROWS];
    int parts = 1;
    const auto add = [&](int64_t r, int32_t sum) {
      begins[r] = -added_to(KIND) * sum;
      sums[r] += sum * scales[r];
    };
    for (int64_t r = 0; r < rows; ++r) {
      scales[r] = scale_of<KIND>(x + r * inputs, by + r);
      const bf16* from = x + r * inputs;
      add(r, store_bytes<IN_NIBBLES>(bytes + r * BLOCK, load(from), load(from + 16), by[r], lost + r));
      if (lost[r] > 0) parts = 2;
    }
    bytes += rows * BLOCK, begins += rows;
    if (parts == 2) {
      scales += rows;
      for (int64_t r = 0; r < rows; ++r) {
        scales[r] = 0;
        int32_t sum = 0;
        if (lost[r] > 0) {
          scales[r] = scales[r - rows] / REST;
          const bf16* from = x + r * inputs;
          sum = store_rest<IN_NIBBLES>(bytes + r * BLOCK, load(from), load(from + 16), by[r]);
        } else {
          std::memset(bytes + r * BLOCK, 0, BLOCK);
        }
        add(r, sum);
      }
      bytes += rows * BLOCK, begins += rows;
    }
    scales += rows;
    to.parts[b] = parts;
    if ((b + 1) % blocks == 0) sums += rows;
  }
}

// Multiplies `num_rows` rows, which are rows `first_row` onwards of the matmul.
template <int KIND>
void multiply_bytes(const Product& by, const bf16* x, int64_t num_rows, int64_t first_row, const End& end,
                    Range range) {
  const int64_t blocks = blocks_of<KIND>(by), of_row = by.inputs / BLOCK, groups = of_row / blocks;
  const int64_t tiles = (num_rows + MOST_BYTE_ROWS - 1) / MOST_BYTE_ROWS;
  thread_local Scratch bytes, numbers, integers, counts;
  int8_t* rounded = bytes.room<int8_t>(2 * num_rows * by.inputs);
  float* scales = numbers.room<float>(num_rows * (2 * of_row + groups));
  float* totals = scales + 2 * num_rows * of_row;
  int32_t* begins = integers.room<int32_t>(2 * num_rows * of_row);
  // The kernels read an element beyond the last.
  uint8_t* parts = counts.room<uint8_t>(tiles * of_row + 1);
  const auto begin_of = [&](int64_t t) { return num_rows * t / tiles; };
  const auto rows_of = [&](int64_t t) -> ByteRows {
    const int64_t at = begin_of(t);
    return {rounded + 2 * at * by.inputs, scales + 2 * at * of_row, totals + at * groups,
            begins + 2 * at * of_row, parts + t * of_row};
  };
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = begin_of(t), count = begin_of(t + 1) - begin;
    round_rows<KIND>(x + begin * by.inputs, by.inputs, blocks, count, rows_of(t));
  }
  const int64_t panel = panel_bytes<KIND>(by.inputs, blocks);
  alignas(64) float sums[MOST_BYTE_ROWS * 2 * PANEL];
  for (int64_t p = range.first; p < range.last;) {
    const auto [wide, step] = width_of(range.last - p, end, num_rows > MOST_OF_FOUR_PANELS ? 2 : 4);
    const uint8_t* panels[4];
    for (int q = 0; q < wide; ++q)
      panels[q] = (const uint8_t*)by.weight + panel_at(by, p, q, step) * panel;
    const auto kernel_of = wide == 4   ? byte_dots_of<KIND, 4>
                           : wide == 2 ? byte_dots_of<KIND, 2>
                                       : byte_dots_of<KIND, 1>;
    // The panels stay in the L1 cache while all rows are multiplied.
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = begin_of(t), count = begin_of(t + 1) - begin;
      const int64_t next = t == 0 ? std::min(step * panel, MOST_AHEAD) : 0;
      kernel_of(count)(rows_of(t), panels, groups, blocks, next, sums);
      for (int64_t r = 0; r < count; ++r)
        finish(by, end, sums + r * wide * PANEL, PANEL, first_row + begin + r, p, wide);
    }
    p += step;
  }
}

template <int KIND>
void multiply_in_bytes(const Product& by, const bf16* x, int64_t rows, const End& end, Range range) {
  if (range.first == range.last) return;
  // The rows stay in the L2 cache while all panels are multiplied.
  const int64_t most = std::max<int64_t>(8, CHUNK / 4 / by.inputs / MOST_BYTE_ROWS) * MOST_BYTE_ROWS;
  for (int64_t begin = 0; begin < rows; begin += most)
    multiply_bytes<KIND>(by, x + begin * by.inputs, std::min(rows - begin, most), begin, end, range);
}

}  // namespace
