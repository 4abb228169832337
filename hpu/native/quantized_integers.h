// Matmuls with quantized weights in integers, for CPUs without BF16 instructions: a multiply-add of
// 16-bit pairs takes half the time of its float32 form, and weights need no conversion. Part of
// decode.cpp.
//
// x is rounded to 16 bits in runs of inputs that share a power-of-two scale. Values within 2^-7 of the
// largest magnitude of a run keep their bfloat16 value; the error of smaller values is at most 2^-15 of
// that magnitude. INT16_ROWS weights have 12 bits and a sign, and x then has 13 bits: the bounds are
// 2^-5 and 2^-13. The same holds for weights in groups if they are unpacked for many rows: they then
// share a power-of-two scale per output, and 64 inputs instead of a group are summed in integers.

#pragma once

#include "quantized_layout.h"

namespace {

// Rows of x in 16 bits, (rows, inputs); the scale of each run, and the sum of its scaled elements,
// (rows, runs) each.
struct IntegerRows {
  const int16_t* x;
  const float *scales, *sums;
  int64_t inputs, runs;

  IntegerRows from(int64_t row) const {
    return {x + row * inputs, scales + row * runs, sums + row * runs, inputs, runs};
  }
};

// Maximum rows for which unpacking the weights in advance is not faster. INT16_ROWS weights are not
// packed.
constexpr int64_t most_packed(int64_t kind) { return kind == INT16_ROWS ? 6 : 8; }
// Kind of the weights after unpacking.
constexpr int64_t unpacked_kind(int64_t kind) { return has_row_scales(kind) ? kind : INT16_ROWS; }
// Magnitudes of x are below 2 to this power.
constexpr int bits_of_x(int64_t kind) { return kind == INT16_ROWS ? 13 : 15; }
// Maximum blocks whose sums of products fit in 32 bits: 64 products of 12 and 13 bits, or 128 of 8 and
// 15 bits.
constexpr int64_t most_run(int64_t kind) { return kind == INT16_ROWS ? 2 : 4; }

// Blocks that are summed in integers, for groups of `blocks` blocks.
template <int KIND>
inline int64_t run_of(int64_t blocks) {
  int64_t run = most_run(KIND);
  while (blocks % run) run /= 2;
  return run;
}

inline float power_of_two(int biased) {
  const uint32_t bits = uint32_t(biased) << 23;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

// Rounds a run of x. FP4 weights are stored as twice their values, so the scale is halved.
template <int KIND>
inline void round_run(const bf16* x, int64_t size, int16_t* to, float* scale, float* sum) {
  const int exponent = largest_bits(x, size) >> 7;
  if (exponent == 255) {
    std::memset(to, 0, size * sizeof(int16_t));
    *scale = *sum = NAN;
    return;
  }
  const int biased = std::max(exponent, 16);  // so that the scale is a normal float
  const int power = bits_of_x(KIND) - 1;
  const Lanes by = set1(power_of_two(254 + power - biased));
  for (int64_t i = 0; i < size; i += 16) store_int16(to + i, mul(load(x + i), by));
  *scale = power_of_two(biased - power - (KIND == MXFP4 ? 1 : 0));
  if constexpr (has_minima(KIND)) {
    Words total = no_words();
    const Words ones = repeat_word(0x00010001);
    for (int64_t i = 0; i < size; i += 32) total = dot(total, load_words(to + i), ones);
    *sum = reduce_add(to_lanes(total)) * *scale;
  }
}

// Sums of squares of an output's weights and of their rounding errors.
struct Loss {
  double all, lost;
};

// Rounds an output's weights to INT16_ROWS. Pairs of inputs are as far apart as in a panel.
inline Loss round_output(const bf16* weight, int64_t inputs, int16_t* to, float* scale) {
  constexpr int BITS = 12;
  const int exponent = largest_bits(weight, inputs) >> 7;
  // Infinity and NaN have no integer: report an infinite loss.
  if (exponent == 255) return {0, INFINITY};
  const int biased = std::max(exponent, 16);
  const Lanes by = set1(power_of_two(253 + BITS - biased));
  *scale = power_of_two(biased - BITS + 1);
  const Lanes back = set1(*scale);
  alignas(64) int16_t rounded[PANEL];
  Lanes all = zero(), lost = zero();
  for (int64_t i = 0; i < inputs; i += PANEL) {
    const Lanes exact = load(weight + i), scaled = nearest(mul(exact, by));
    store_int16(rounded, scaled);
    for (int n = 0; n < PANEL; n += 2)
      std::memcpy(to + (i + n) * PANEL, rounded + n, 2 * sizeof(int16_t));
    const Lanes change = sub(exact, mul(scaled, back));
    all = fmadd(exact, exact, all), lost = fmadd(change, change, lost);
  }
  return {reduce_add(all), reduce_add(lost)};
}

// The t-th of four pairs of the inputs 8q to 8q + 7 of a block.
template <int KIND>
inline Words pair_of(const uint8_t* block, int q, int t) {
  if constexpr (KIND == INT16_ROWS) return load_words(block + q * 256 + t * 64);
  else if constexpr (KIND == MXFP4) return fp4_pair(load_words(block + q * 64), t);
  else if constexpr (has_4_bits(KIND)) return int4_pair(load_words(block + q * 64), t);
  else return int8_pair(block + q * 128 + t * 32);
}

inline Words pair_of(const int16_t* x) {
  int32_t both;
  std::memcpy(&both, x, 4);
  return repeat_word(both);
}

// A range of runs of some panels.
struct Part {
  const uint8_t* const* panels;
  int64_t blocks, run;  // per group, per run
  int64_t first, last;  // runs
};

// Offsets of the tables and values of run `i` in a panel.
struct RunPlace {
  int64_t tables, values;
};
template <int KIND>
inline RunPlace place_of(const Part& part, int64_t i) {
  if constexpr (has_row_scales(KIND)) return {0, i * part.run * block_bytes(KIND)};
  const int64_t each = part.blocks / part.run, at = i / each * group_bytes<KIND>(part.blocks);
  return {at, at + table_bytes(KIND) + i % each * part.run * block_bytes(KIND)};
}

// Adds the integer sums of run `i` to `sums`, scaled.
template <int KIND, int ROWS, int PANELS>
inline void add_run(const IntegerRows& rows, const Part& part, int64_t i, Words (*inner)[ROWS],
                    float* sums, int64_t apart) {
  const int64_t tables = place_of<KIND>(part, i).tables;
#pragma GCC unroll 4
  for (int p = 0; p < PANELS; ++p) {
    Lanes scales = set1(1), least = zero();
    if constexpr (!has_row_scales(KIND)) scales = scales_of<KIND>(part.panels[p] + tables);
    if constexpr (has_minima(KIND)) least = minima_of<KIND>(part.panels[p] + tables);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      float* to = sums + r * apart + p * PANEL;
      const Lanes by = set1(rows.scales[r * rows.runs + i]), sum = to_lanes(inner[p][r]);
      Lanes total = load(to);
      if constexpr (has_row_scales(KIND)) total = fmadd(sum, by, total);
      else total = fmadd(mul(sum, by), scales, total);
      if constexpr (has_minima(KIND))
        total = fmadd(least, set1(rows.sums[r * rows.runs + i]), total);
      store(to, total);
    }
  }
}

// Adds the products of ROWS rows and PANELS panels to `sums`, with row stride `apart`.
template <int KIND, int ROWS, int PANELS>
void packed_dots(const IntegerRows& rows, const Part& part, float* sums, int64_t apart) {
  // A single row waits for memory: prefetches that end in the L2 cache allow more reads in flight.
  constexpr auto HINT = ROWS == 1 ? _MM_HINT_T1 : _MM_HINT_T0;
  for (int64_t i = part.first; i < part.last; ++i) {
    const uint8_t* from[PANELS];
    for (int p = 0; p < PANELS; ++p) from[p] = part.panels[p] + place_of<KIND>(part, i).values;
    Words inner[PANELS][ROWS];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) inner[p][r] = no_words();
    const int16_t* x = rows.x + i * part.run * BLOCK;
    for (int64_t b = 0; b < part.run; ++b, x += BLOCK) {
      for (int p = 0; KIND != INT16_ROWS && p < PANELS; ++p)
        for (int64_t byte = 0; byte < block_bytes(KIND); byte += 64)
          _mm_prefetch((const char*)from[p] + AHEAD + byte, HINT);
      for (int q = 0; q < 4; ++q)
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t)
#pragma GCC unroll 4
          for (int p = 0; p < PANELS; ++p) {
            if constexpr (KIND == INT16_ROWS)
              _mm_prefetch((const char*)from[p] + AHEAD + q * 256 + t * 64, HINT);
            const Words weights = pair_of<KIND>(from[p], q, t);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r)
              inner[p][r] = dot(inner[p][r], weights, pair_of(x + r * rows.inputs + q * 8 + t * 2));
          }
      for (int p = 0; p < PANELS; ++p) from[p] += block_bytes(KIND);
    }
    add_run<KIND, ROWS, PANELS>(rows, part, i, inner, sums, apart);
  }
}

// Runs of a panel with unpacked weights `numbers`, in the layout of BFLOAT16, and the bytes to prefetch
// for each run, if any.
struct UnpackedPart {
  const int16_t* numbers;
  int64_t first, last, inputs;  // range of runs; inputs per run
  const uint8_t* next;
  int64_t bytes;
};

// `packed_dots` for unpacked weights, without the scales of the outputs.
template <int ROWS>
void unpacked_dots(const IntegerRows& rows, const UnpackedPart& part, float* sums, int64_t apart) {
  const int16_t* weights = part.numbers;
  for (int64_t i = part.first; i < part.last; ++i, weights += part.inputs * PANEL) {
    if (part.next) {
      const char* next = (const char*)part.next + (i - part.first) * part.bytes;
      for (int64_t byte = 0; byte < part.bytes; byte += 64) _mm_prefetch(next + byte, _MM_HINT_T1);
    }
    Words inner[ROWS];
    dot_pairs(rows.x + i * part.inputs, rows.inputs, weights, part.inputs / 2, inner);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      float* to = sums + r * apart;
      store(to, fmadd(to_lanes(inner[r]), set1(rows.scales[r * rows.runs + i]), load(to)));
    }
  }
}

// Scales of the outputs of a panel with groups, such that the largest value of any group has 12 bits.
template <int KIND>
Lanes unit_of(const uint8_t* panel, int64_t groups, int64_t blocks) {
  constexpr float LEAST = KIND == INT4_GROUPS || KIND == INT4_STORED ? 0 : KIND == MXFP4 ? -6 : -128;
  constexpr float MOST = KIND == INT4_GROUPS || KIND == INT4_STORED ? 15 : KIND == MXFP4 ? 6 : 127;
  Lanes most = set1(0x1p-100f);
  for (int64_t g = 0; g < groups; ++g, panel += group_bytes<KIND>(blocks)) {
    const Lanes scales = scales_of<KIND>(panel);
    Lanes minima = zero();
    if constexpr (has_minima(KIND)) minima = minima_of<KIND>(panel);
    const Lanes low = fmadd(scales, set1(LEAST), minima), high = fmadd(scales, set1(MOST), minima);
    most = max(most, max(magnitude(low), magnitude(high)));
  }
  return mul(power_below(most), set1(0x1p-11f));
}

// Unpacks blocks `first` to `last` of a panel with groups, as multiples of `unit`.
template <int KIND>
void unpack(const uint8_t* panel, int64_t blocks, int64_t first, int64_t last, Lanes unit,
            int16_t* out) {
  // Values are shifted to the highest bits: the product with the scale keeps the high 16 of 31 bits.
  constexpr int MOVED = has_4_bits(KIND) ? 11 : 7;
  const Lanes per_unit = div(set1(1), unit);
  const Lanes fine = mul(per_unit, set1(float(1 << (15 - MOVED)) / (KIND == MXFP4 ? 2 : 1)));
  for (int64_t b = first; b < last; ++b) {
    const uint8_t* group = panel + b / blocks * group_bytes<KIND>(blocks);
    const uint8_t* block = group + table_bytes(KIND) + b % blocks * block_bytes(KIND);
    const Words scales = to_pairs(mul(scales_of<KIND>(group), fine));
    Words minima = no_words();
    if constexpr (has_minima(KIND)) minima = to_pairs(mul(minima_of<KIND>(group), per_unit));
    for (int q = 0; q < 4; ++q)
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t, out += 2 * PANEL)
        store(out, scaled_pair<MOVED>(pair_of<KIND>(block, q, t), scales, minima));
  }
}

// Unpacks blocks `first` to `last` of an INT8_ROWS panel.
void unpack_bytes(const uint8_t* panel, int64_t first, int64_t last, int16_t* out) {
  const uint8_t* block = panel + first * block_bytes(INT8_ROWS);
  for (int64_t b = first; b < last; ++b, block += block_bytes(INT8_ROWS))
    for (int q = 0; q < 4; ++q)
      for (int t = 0; t < 4; ++t, out += 2 * PANEL) store(out, pair_of<INT8_ROWS>(block, q, t));
}

// `packed_dots` for `wide` panels: 1, 2 or 4.
template <int KIND, int ROWS>
void packed_tile(const IntegerRows& rows, Part part, int wide, float* sums) {
  constexpr int MOST = ROWS * 4 <= MOST_SUMS ? 4 : ROWS * 2 <= MOST_SUMS ? 2 : 1;
  const int64_t apart = wide * PANEL;
  for (int q = 0; q < wide; q += std::min(wide, MOST), part.panels += std::min(wide, MOST)) {
    float* to = sums + q * PANEL;
    if (wide >= MOST) packed_dots<KIND, ROWS, MOST>(rows, part, to, apart);
    else if (wide == 2) packed_dots<KIND, ROWS, 2>(rows, part, to, apart);
    else packed_dots<KIND, ROWS, 1>(rows, part, to, apart);
  }
}

template <int KIND>
auto packed_tile_of(int64_t count) {
  switch (count) {
    case 1: return packed_tile<KIND, 1>;
    case 2: return packed_tile<KIND, 2>;
    case 3: return packed_tile<KIND, 3>;
    case 4: return packed_tile<KIND, 4>;
    case 5: return packed_tile<KIND, 5>;
    default: return packed_tile<KIND, 6>;
  }
}

// With two or more tiles, each tile has at least three rows.
inline auto unpacked_dots_of(int64_t count) {
  switch (count) {
    case 3: return unpacked_dots<3>;
    case 4: return unpacked_dots<4>;
    case 5: return unpacked_dots<5>;
    default: return unpacked_dots<6>;
  }
}

// For few rows: each tile of rows unpacks the weights.
template <int KIND>
void multiply_packed(const IntegerRows& rows, int64_t num_rows, const Part& part, int wide,
                     float* sums) {
  const int64_t tiles = (num_rows + 5) / 6;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = num_rows * t / tiles, count = num_rows * (t + 1) / tiles - begin;
    packed_tile_of<KIND>(count)(rows.from(begin), part, wide, sums + begin * wide * PANEL);
  }
}

// For more rows: a part of a panel is unpacked once (INT16_ROWS needs no unpacking) and multiplied by
// all rows from the L1 cache. `run`: blocks of inputs in a run; `all`: the panels and their groups.
template <int KIND>
void multiply_unpacked(const IntegerRows& rows, int64_t num_rows, const Part& all, int64_t run, int wide,
                       float* sums) {
  thread_local Scratch kept;
  const int64_t most = std::max<int64_t>(1, 2 * MOST_PAIRS / (run * BLOCK));
  const int64_t tiles = (num_rows + 5) / 6, apart = wide * PANEL, blocks = rows.runs * run;
  const int64_t bytes = panel_bytes<KIND>(rows.inputs, all.blocks) / rows.runs;
  int16_t* numbers = kept.room<int16_t>(KIND == INT16_ROWS ? 0 : most * run * BLOCK * PANEL);
  Lanes units[4];
  if constexpr (!has_row_scales(KIND))
    for (int q = 0; q < wide; ++q)
      units[q] = unit_of<KIND>(all.panels[q], blocks / all.blocks, all.blocks);
  for (int64_t first = 0; first < rows.runs; first += most) {
    const int64_t last = std::min(rows.runs, first + most);
    for (int q = 0; q < wide; ++q) {
      const uint8_t* panel = all.panels[q];
      const bool is_last = q + 1 == wide;
      const uint8_t* next = is_last ? *all.panels + last * bytes : all.panels[q + 1] + first * bytes;
      UnpackedPart part{numbers, first, last, run * BLOCK, next, bytes};
      if constexpr (KIND == INT16_ROWS) part.numbers = (const int16_t*)(panel + first * bytes);
      else if constexpr (KIND == INT8_ROWS) unpack_bytes(panel, first * run, last * run, numbers);
      else unpack<KIND>(panel, all.blocks, first * run, last * run, units[q], numbers);
      for (int64_t t = 0; t < tiles; ++t, part.next = nullptr) {
        const int64_t begin = num_rows * t / tiles, count = num_rows * (t + 1) / tiles - begin;
        unpacked_dots_of(count)(rows.from(begin), part, sums + begin * apart + q * PANEL, apart);
      }
    }
  }
  if constexpr (!has_row_scales(KIND))
    for (int64_t r = 0; r < num_rows; ++r)
      for (int q = 0; q < wide; ++q) {
        float* at = sums + r * apart + q * PANEL;
        store(at, mul(load(at), units[q]));
      }
}

// Multiplies at most 6 * MOST_TILES rows, which are rows `first_row` onwards of the matmul. UNPACKED:
// kind of weights for which x is rounded.
template <int KIND, int UNPACKED>
void multiply_integers(const Product& by, const bf16* x, int64_t num_rows, int64_t first_row,
                       const End& end, Range range) {
  const int64_t blocks = has_row_scales(KIND) ? by.inputs / BLOCK : blocks_of<KIND>(by);
  const int64_t run = run_of<UNPACKED>(KIND == UNPACKED ? blocks : by.inputs / BLOCK);
  const int64_t size = run * BLOCK, runs = by.inputs / size;
  thread_local Scratch numbers, tables;
  int16_t* rounded = numbers.room<int16_t>(num_rows * by.inputs);
  float *scales = tables.room<float>(2 * num_rows * runs), *totals = scales + num_rows * runs;
  for (int64_t i = 0; i < num_rows * runs; ++i)
    round_run<UNPACKED>(x + i * size, size, rounded + i * size, scales + i, totals + i);
  const IntegerRows rows{rounded, scales, totals, by.inputs, runs};
  const int64_t panel = panel_bytes<KIND>(by.inputs, blocks);
  alignas(64) float sums[MOST_TILES * 6 * 4 * PANEL];
  for (int64_t p = range.first; p < range.last;) {
    const auto [wide, step] = width_of(range.last - p, end, 4);
    const int near = wide > 1 ? wide / 2 : 1;
    const int64_t far = end.gated ? by.outputs / PANEL / 2 : near, apart = wide * PANEL;
    const uint8_t* panels[4];
    for (int q = 0; q < wide; ++q)
      panels[q] = (const uint8_t*)by.weight + (p + q % near + q / near * far) * panel;
    const Part all{panels, blocks, run, 0, runs};
    std::fill_n(sums, num_rows * apart, 0.0f);
    if (num_rows > most_packed(KIND)) multiply_unpacked<KIND>(rows, num_rows, all, run, wide, sums);
    else multiply_packed<KIND>(rows, num_rows, all, wide, sums);
    for (int64_t r = 0; r < num_rows; ++r)
      finish(by, end, sums + r * apart, PANEL, first_row + r, p, wide);
    p += step;
  }
}

template <int KIND>
void multiply_in_integers(const Product& by, const bf16* x, int64_t rows, const End& end,
                          Range range) {
  if (range.first == range.last) return;
  const int64_t most = 6 * MOST_TILES;
  for (int64_t begin = 0; begin < rows; begin += most) {
    const int64_t count = std::min(rows - begin, most);
    const auto kernel = count > most_packed(KIND) ? multiply_integers<KIND, unpacked_kind(KIND)>
                                                  : multiply_integers<KIND, KIND>;
    kernel(by, x + begin * by.inputs, count, begin, end, range);
  }
}

}  // namespace
