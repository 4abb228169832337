// Matmuls of LoRA adapters, added to the sums of a matmul before the sums are finished. Rows are grouped
// by adapter; rows without an adapter are not multiplied. Part of decode.cpp.

#pragma once

#include <omp.h>

#include "barrier.h"
#include "numbers.h"

extern "C" {

// Matrices of an adapter for one of the outputs that a matmul merges.
struct LowRankPart {
  const bf16* a;  // (rank, 32) for each 32 inputs, and (rank, 16) for the last 16
  const bf16* b;  // (outputs, rank) in panels, like weights
  int64_t rank;   // a multiple of 8; 0: no matrices
};

// Matrices of all adapters for a matmul.
struct LowRank {
  const LowRankPart* parts;  // (slots, count)
  int64_t count;             // merged outputs, at most 3
  int64_t ends[3];           // index of the first panel after each output
};

// Rows of a launch, grouped by adapter.
struct AdapterRows {
  const int64_t* slots;   // (rows); -1: no adapter
  const int64_t* order;   // rows with an adapter; within each 32 rows, rows of an adapter are adjacent
  const int64_t* starts;  // (chunks + 1) into `order`: chunks of rows with the same adapter
  const int64_t* places;  // (rows): position of the row in `order`
  const int64_t* tiles;   // (2 for each 32 rows, + 1): first chunk of each tile, 16 rows of `order`
  int64_t chunks, max_rank;  // max_rank: a multiple of 16
};

}  // extern "C"

namespace {

constexpr int LOW_OUTPUTS = 3;
constexpr int LOW_LANES = 16;
constexpr int LOW_BLOCK = MOST_SUMS >= 16 ? 4 : 2;  // rows, and ranks, per kernel call

// x times `a` for the rows with an adapter.
struct LowSums {
  const LowRank* by = nullptr;
  const AdapterRows* rows = nullptr;
  const Input* sums = nullptr;  // (LOW_OUTPUTS, max_rank) for each row of rows->order

  const Input* of(int64_t place, int64_t output) const {
    return sums + (place * LOW_OUTPUTS + output) * rows->max_rank;
  }

  // Returns the output of a panel, and converts `panel` to its index in that output.
  int64_t output_of(int64_t& panel) const {
    int64_t output = 0, first = 0;
    while (panel >= by->ends[output]) first = by->ends[output++];
    panel -= first;
    return output;
  }
};

// x times `a` for LOW_BLOCK ranks from `first` on. `fetches`: prefetch all ranks, which the next calls
// read.
template <int ROWS>
void low_lanes(const bf16* const* x, const LowRankPart& part, int64_t first, int64_t inputs,
               bool fetches, float (*to)[LOW_LANES]) {
  constexpr int64_t NEXT = 2048;  // prefetch distance in elements
  Lanes sums[ROWS][LOW_BLOCK];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int q = 0; q < LOW_BLOCK; ++q) sums[r][q] = zero();
  const bf16* a = part.a + first * 32;
  int64_t k = 0;
  for (; k + 32 <= inputs; k += 32, a += part.rank * 32) {
    if (fetches)
      for (int64_t q = 0; q < part.rank; ++q)
        _mm_prefetch((const char*)(a + NEXT + q * 32), _MM_HINT_T0);
#pragma GCC unroll 2
    for (int turn = 0; turn < TURNS; ++turn) {
      Factor weights[LOW_BLOCK];
#pragma GCC unroll 4
      for (int q = 0; q < LOW_BLOCK; ++q) weights[q] = factor(a + q * 32, turn);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const Factor numbers = factor(x[r] + k, turn);
#pragma GCC unroll 4
        for (int q = 0; q < LOW_BLOCK; ++q) sums[r][q] = dot(sums[r][q], weights[q], numbers);
      }
    }
  }
  if (k < inputs) {  // the last 16 inputs
    a = part.a + k * part.rank + first * 16;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int q = 0; q < LOW_BLOCK; ++q)
        sums[r][q] = fmadd(load(x[r] + k), load(a + q * 16), sums[r][q]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int q = 0; q < LOW_BLOCK; ++q) to[r][first % LOW_LANES + q] = reduce_add(sums[r][q]);
}

// x times `a` for a chunk of rows and one output.
inline void low_chunk(const LowRank& by, const AdapterRows& rows, const bf16* x, int64_t inputs,
                      int64_t chunk, int64_t output, Input* out) {
  const int64_t end = rows.starts[chunk + 1];
  for (int64_t begin = rows.starts[chunk]; begin < end; begin += LOW_BLOCK) {
    const int64_t count = std::min<int64_t>(end - begin, LOW_BLOCK);
    const int64_t* own = rows.order + begin;
    const LowRankPart& part = by.parts[rows.slots[own[0]] * by.count + output];
    const bf16* from[LOW_BLOCK];
    for (int64_t r = 0; r < count; ++r) from[r] = x + own[r] * inputs;
    const auto kernel = count == 1   ? low_lanes<1>
                        : count == 2 ? low_lanes<2>
                        : count == 3 ? low_lanes<LOW_BLOCK == 4 ? 3 : 1>
                                     : low_lanes<LOW_BLOCK>;
    for (int64_t rank = 0; rank < part.rank; rank += LOW_LANES) {
      alignas(64) float sums[LOW_BLOCK][LOW_LANES] = {};
      const int64_t stop = std::min<int64_t>(part.rank, rank + LOW_LANES);
      for (int64_t first = rank; first < stop; first += LOW_BLOCK)
        kernel(from, part, first, inputs, begin == rows.starts[chunk] && first == 0, sums);
      for (int64_t r = 0; r < count; ++r)
        store(out + ((begin + r) * LOW_OUTPUTS + output) * rows.max_rank + rank, load(sums[r]));
    }
  }
}

// Multiplies rows with the same adapter by one panel of `b`; `t` and `to` are per row. Prefetches the
// matrix that is `ahead` elements further.
template <int ROWS>
inline void low_rows(const bf16* b, int64_t rank, int64_t ahead, const Input* const* t,
                     float* const* to) {
  Lanes sums[ROWS];
  for (int r = 0; r < ROWS; ++r) sums[r] = zero();
  for (int64_t k = 0; k < rank; k += 2) {
    _mm_prefetch((const char*)(b + k * LOW_LANES + ahead), _MM_HINT_T0);
#pragma GCC unroll 2
    for (int turn = 0; turn < TURNS; ++turn) {
      const Factor weights = factor(b + k * LOW_LANES, turn);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) sums[r] = dot(sums[r], weights, repeat(t[r] + k, turn));
    }
  }
  for (int r = 0; r < ROWS; ++r) store(to[r], sums[r]);
}

// Multiplies `count` rows from `first` on (`first` begins a tile of 32 rows) by the panels `of` of `b`.
// The results are the initial sums of a matmul with these panels. Rows are `apart` elements apart.
// `step`: distance in panels to the panels that follow.
inline void begin_low_sums(const LowSums& low, const int64_t* of, int wide, int step, int64_t first,
                           int64_t count, float* sums, int64_t apart) {
  const AdapterRows& rows = *low.rows;
  for (int64_t r = 0; r < count; ++r)
    if (rows.slots[first + r] < 0)
      for (int q = 0; q < wide; ++q) store(sums + r * apart + q * LOW_LANES, zero());
  const int64_t begin = first / 16, end = (first + count + 31) / 32 * 2;
  for (int64_t c = rows.tiles[begin]; c < rows.tiles[end]; ++c) {
    const int64_t last = rows.starts[c + 1];
    const LowRankPart* parts = low.by->parts + rows.slots[rows.order[rows.starts[c]]] * low.by->count;
    for (int q = 0; q < wide; ++q) {
      int64_t panel = of[q];
      const int64_t output = low.output_of(panel);
      const LowRankPart& part = parts[output];
      const bf16* b = part.b + panel * part.rank * LOW_LANES;
      for (int64_t at = rows.starts[c]; at < last; at += LOW_BLOCK) {
        const int64_t own = std::min<int64_t>(last - at, LOW_BLOCK);
        const Input* t[LOW_BLOCK];
        float* to[LOW_BLOCK];
        for (int64_t r = 0; r < own; ++r) {
          t[r] = low.of(at + r, output);
          to[r] = sums + (rows.order[at + r] - first) * apart + q * LOW_LANES;
        }
        const auto kernel = own == 1   ? low_rows<1>
                            : own == 2 ? low_rows<2>
                            : own == 3 ? low_rows<LOW_BLOCK == 4 ? 3 : 1>
                                       : low_rows<LOW_BLOCK>;
        kernel(b, part.rank, step * part.rank * LOW_LANES, t, to);
      }
    }
  }
}

// `sum` of a row and a panel, plus the LoRA delta of the row's adapter.
inline Lanes with_low_rank(const LowSums& low, int64_t row, int64_t panel, Lanes sum) {
  const int64_t slot = low.rows->slots[row];
  if (slot < 0) return sum;
  const int64_t output = low.output_of(panel);
  const LowRankPart& part = low.by->parts[slot * low.by->count + output];
  const bf16* b = part.b + panel * part.rank * LOW_LANES;
  const Input* t = low.of(low.rows->places[row], output);
  Lanes other = zero();
  for (int64_t k = 0; k < part.rank; k += 4) {
#pragma GCC unroll 2
    for (int turn = 0; turn < TURNS; ++turn) {
      sum = dot(sum, factor(b + k * LOW_LANES, turn), repeat(t + k, turn));
      other = dot(other, factor(b + (k + 2) * LOW_LANES, turn), repeat(t + k + 2, turn));
    }
  }
  return add(sum, other);
}

}  // namespace
