// Products with quantized weights in integers, for CPUs without BF16 instructions: a multiply-add of
// pairs of 16 bits takes half the time of its float32 form, and needs no conversion of the weights.
// Part of decode.cpp.
//
// x is rounded to 16 bits in runs of inputs that share a power of two. Numbers within 2^-7 of the
// largest one of a run stay what they are in bfloat16; the error of others is at most 2^-15 of it.

#pragma once

#include "quantized_layout.h"

namespace {

// Rows of x in 16 bits, (rows, inputs), and of each run the scale and the sum of the scaled numbers,
// (rows, runs) each.
struct IntegerRows {
  const int16_t* x;
  const float *scales, *sums;
  int64_t inputs, runs;

  IntegerRows from(int64_t row) const {
    return {x + row * inputs, scales + row * runs, sums + row * runs, inputs, runs};
  }
};

constexpr int64_t MOST_PACKED = 12;  // rows up to which unpacking once gains nothing
constexpr int64_t MOST_RUN = 4;  // blocks; sums of 128 products of 8 and 16 bits fit into 32 bits

// Blocks of inputs that are summed in integers, of groups of `blocks`.
inline int64_t run_of(int64_t blocks) {
  int64_t run = MOST_RUN;
  while (blocks % run) run /= 2;
  return run;
}

// The bits of the largest magnitude; those of a NaN or of infinity, if there is any.
inline int largest_bits(const bf16* x, int64_t size) {
  __m256i most = _mm256_setzero_si256();
  for (int64_t i = 0; i < size; i += 16) {
    const __m256i bits = _mm256_loadu_si256((const __m256i*)(x + i));
    most = _mm256_max_epu16(most, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
  }
  const __m128i half =
      _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
  return 0xffff ^ _mm_extract_epi16(least, 0);
}

inline float power_of_two(int biased) {
  const uint32_t bits = uint32_t(biased) << 23;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

// Rounds a run of x. FP4 weights are twice their numbers.
template <int KIND>
inline void round_run(const bf16* x, int64_t size, int16_t* to, float* scale, float* sum) {
  const int exponent = largest_bits(x, size) >> 7;
  if (exponent == 255) {
    std::memset(to, 0, size * sizeof(int16_t));
    *scale = *sum = NAN;
    return;
  }
  const int biased = std::max(exponent, 16);  // so that the scale is a normal number
  const Lanes by = set1(power_of_two(268 - biased));
  for (int64_t i = 0; i < size; i += 16) store_int16(to + i, mul(load(x + i), by));
  *scale = power_of_two(biased - (KIND == MXFP4 ? 15 : 14));
  if constexpr (has_minima(KIND)) {
    Words total = no_words();
    const Words ones = repeat_word(0x00010001);
    for (int64_t i = 0; i < size; i += 32) total = dot(total, load_words(to + i), ones);
    *sum = reduce_add(to_lanes(total)) * *scale;
  }
}

// Pair t of four of the inputs 8q to 8q + 7 of a block.
template <int KIND>
inline Words pair_of(const uint8_t* block, int q, int t) {
  if constexpr (KIND == MXFP4) return fp4_pair(load_words(block + q * 64), t);
  else if constexpr (has_4_bits(KIND)) return int4_pair(load_words(block + q * 64), t);
  else return int8_pair(block + q * 128 + t * 32);
}

inline Words pair_of(const int16_t* x) {
  int32_t both;
  std::memcpy(&both, x, 4);
  return repeat_word(both);
}

// Runs of some panels. Where the weights are unpacked, `numbers` are those of the only panel.
struct Part {
  const uint8_t* const* panels;
  int64_t blocks, run;  // of a group, of a run
  int64_t first, last;  // runs
  const int16_t* numbers;
  const uint8_t* next;  // to prefetch, if any
};

// Where run `i` of a panel has its tables and its values.
struct RunPlace {
  int64_t tables, values;
};
template <int KIND>
inline RunPlace place_of(const Part& part, int64_t i) {
  const int64_t each = part.blocks / part.run, at = i / each * group_bytes<KIND>(part.blocks);
  return {at, at + table_bytes(KIND) + i % each * part.run * block_bytes(KIND)};
}

// Adds the sums of run `i`.
template <int KIND, int ROWS, int PANELS>
inline void add_run(const IntegerRows& rows, const Part& part, int64_t i, Words (*inner)[ROWS],
                    float* sums, int64_t apart) {
  const int64_t tables = place_of<KIND>(part, i).tables;
#pragma GCC unroll 4
  for (int p = 0; p < PANELS; ++p) {
    Lanes scales = set1(1), least = zero();
    if constexpr (KIND != INT8_ROWS) scales = scales_of<KIND>(part.panels[p] + tables);
    if constexpr (has_minima(KIND)) least = minima_of<KIND>(part.panels[p] + tables);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      float* to = sums + r * apart + p * PANEL;
      const Lanes by = set1(rows.scales[r * rows.runs + i]), sum = to_lanes(inner[p][r]);
      Lanes total = load(to);
      if constexpr (KIND == INT8_ROWS) total = fmadd(sum, by, total);
      else total = fmadd(mul(sum, by), scales, total);
      if constexpr (has_minima(KIND))
        total = fmadd(least, set1(rows.sums[r * rows.runs + i]), total);
      store(to, total);
    }
  }
}

// Adds the products of ROWS rows and PANELS panels to `sums`, whose rows are `apart` numbers apart.
template <int KIND, int ROWS, int PANELS>
void packed_dots(const IntegerRows& rows, const Part& part, float* sums, int64_t apart) {
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
      for (int p = 0; p < PANELS; ++p)
        for (int64_t byte = 0; byte < block_bytes(KIND); byte += 64)
          _mm_prefetch((const char*)from[p] + AHEAD + byte, _MM_HINT_T0);
      for (int q = 0; q < 4; ++q)
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t)
#pragma GCC unroll 4
          for (int p = 0; p < PANELS; ++p) {
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

// Like `packed_dots`, of one panel whose weights are unpacked.
template <int KIND, int ROWS>
void unpacked_dots(const IntegerRows& rows, const Part& part, float* sums, int64_t apart) {
  const int64_t pairs = part.run * BLOCK / 2;
  const int16_t* weights = part.numbers;
  for (int64_t i = part.first; i < part.last; ++i, weights += pairs * 2 * PANEL) {
    if (part.next) {
      const char* next = (const char*)part.next + (i - part.first) * group_bytes<KIND>(part.run);
      for (int64_t byte = 0; byte < group_bytes<KIND>(part.run); byte += 64)
        _mm_prefetch(next + byte, _MM_HINT_T1);
    }
    Words inner[1][ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) inner[0][r] = no_words();
    const int16_t* x = rows.x + i * pairs * 2;
    for (int64_t k = 0; k < pairs; ++k) {
      const Words pair = load_words(weights + k * 2 * PANEL);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r)
        inner[0][r] = dot(inner[0][r], pair, pair_of(x + r * rows.inputs + 2 * k));
    }
    add_run<KIND, ROWS, 1>(rows, part, i, inner, sums, apart);
  }
}

template <int KIND>
void unpack(const Part& part, int16_t* out) {
  for (int64_t i = part.first; i < part.last; ++i) {
    const uint8_t* block = *part.panels + place_of<KIND>(part, i).values;
    for (int64_t b = 0; b < part.run; ++b, block += block_bytes(KIND))
      for (int q = 0; q < 4; ++q)
        for (int t = 0; t < 4; ++t, out += 2 * PANEL) store(out, pair_of<KIND>(block, q, t));
  }
}

// Like `packed_dots`, of 1, 2 or 4 panels.
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

// Two tiles of rows and more have three rows or more.
template <int KIND>
auto unpacked_dots_of(int64_t count) {
  switch (count) {
    case 3: return unpacked_dots<KIND, 3>;
    case 4: return unpacked_dots<KIND, 4>;
    case 5: return unpacked_dots<KIND, 5>;
    default: return unpacked_dots<KIND, 6>;
  }
}

// A few tiles of rows unpack the weights by themselves.
template <int KIND>
void multiply_packed(const IntegerRows& rows, int64_t num_rows, const Part& part, int wide,
                     float* sums) {
  const int64_t tiles = (num_rows + 5) / 6;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = num_rows * t / tiles, count = num_rows * (t + 1) / tiles - begin;
    packed_tile_of<KIND>(count)(rows.from(begin), part, wide, sums + begin * wide * PANEL);
  }
}

// For more rows a part of a panel is unpacked in the L1 cache and multiplied by all of them.
template <int KIND>
void multiply_unpacked(const IntegerRows& rows, int64_t num_rows, Part part, int wide, int64_t most,
                       float* sums) {
  thread_local Scratch kept;
  int16_t* numbers = kept.room<int16_t>(most * part.run * BLOCK * PANEL);
  const int64_t tiles = (num_rows + 5) / 6, apart = wide * PANEL, end = part.last;
  part.numbers = numbers;
  for (; part.first < end; part.first = part.last) {
    part.last = std::min(end, part.first + most);
    for (int q = 0; q < wide; ++q) {
      Part one = part;
      one.panels += q;
      unpack<KIND>(one, numbers);
      const bool is_last = q + 1 == wide;
      one.next = is_last ? *part.panels + place_of<KIND>(part, part.last).values
                         : part.panels[q + 1] + place_of<KIND>(part, part.first).values;
      for (int64_t t = 0; t < tiles; ++t, one.next = nullptr) {
        const int64_t begin = num_rows * t / tiles, count = num_rows * (t + 1) / tiles - begin;
        unpacked_dots_of<KIND>(count)(rows.from(begin), one, sums + begin * apart + q * PANEL, apart);
      }
    }
  }
}

// At most 6 * MOST_TILES rows, from `first_row` on.
template <int KIND>
void multiply_integers(const Product& by, const IntegerRows& rows, int64_t num_rows, int64_t blocks,
                       int64_t run, int64_t first_row, const End& end, Range range) {
  const int64_t panel = panel_bytes<KIND>(by.inputs, blocks);
  const int64_t most = std::max<int64_t>(1, 2 * MOST_PAIRS / (run * BLOCK));
  alignas(64) float sums[MOST_TILES * 6 * 4 * PANEL];
  for (int64_t p = range.first; p < range.last;) {
    const auto [wide, step] = width_of(range.last - p, end, 4);
    const int near = wide > 1 ? wide / 2 : 1;
    const int64_t far = end.gated ? by.outputs / PANEL / 2 : near, apart = wide * PANEL;
    const uint8_t* panels[4];
    for (int q = 0; q < wide; ++q)
      panels[q] = (const uint8_t*)by.weight + (p + q % near + q / near * far) * panel;
    const Part all{panels, blocks, run, 0, rows.runs, nullptr, nullptr};
    std::fill_n(sums, num_rows * apart, 0.0f);
    if (num_rows > MOST_PACKED) multiply_unpacked<KIND>(rows, num_rows, all, wide, most, sums);
    else multiply_packed<KIND>(rows, num_rows, all, wide, sums);
    for (int64_t r = 0; r < num_rows; ++r)
      finish(by, end, sums + r * apart, PANEL, first_row + r, p, wide);
    p += step;
  }
}

template <int KIND>
void multiply_quantized(const Product& by, const bf16* x, int64_t rows, const End& end,
                        Range range) {
  if (range.first == range.last) return;
  const int64_t blocks = KIND == INT8_ROWS ? by.inputs / BLOCK : blocks_of<KIND>(by);
  const int64_t run = run_of(blocks), size = run * BLOCK, runs = by.inputs / size;
  const int64_t most = std::min(rows, 6 * MOST_TILES);
  thread_local Scratch numbers, tables;
  int16_t* rounded = numbers.room<int16_t>(most * by.inputs);
  float *scales = tables.room<float>(2 * most * runs), *sums = scales + most * runs;
  for (int64_t begin = 0; begin < rows; begin += most) {
    const int64_t count = std::min(rows - begin, most);
    for (int64_t i = 0; i < count * runs; ++i)
      round_run<KIND>(x + begin * by.inputs + i * size, size, rounded + i * size, scales + i,
                      sums + i);
    const IntegerRows some{rounded, scales, sums, by.inputs, runs};
    multiply_integers<KIND>(by, some, count, blocks, run, begin, end, range);
  }
}

}  // namespace
