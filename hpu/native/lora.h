// Low-rank products of LoRA adapters, which are added to the sums of a product before they are
// finished. Rows are grouped by adapter; rows without one cost nothing. Part of decode.cpp.

#pragma once

#include <omp.h>

#include "barrier.h"
#include "numbers.h"

extern "C" {

// Of one adapter, for one of the outputs that a product merges.
struct LowRankPart {
  const bf16* a;  // (rank, inputs)
  const bf16* b;  // (outputs, rank) in panels, as weights are
  int64_t rank;   // a multiple of 16; 0: none
};

// Of one product.
struct LowRank {
  const LowRankPart* parts;  // (slots, count)
  int64_t count;             // merged outputs, at most 3
  int64_t ends[3];           // number of the panel behind each
};

// The rows of a launch.
struct AdapterRows {
  const int64_t* slots;   // (rows); -1: none
  const int64_t* order;   // the rows with an adapter, those of the same one behind each other
  const int64_t* starts;  // (chunks + 1) into `order`: chunks of at most 4 rows of one adapter
  int64_t chunks, max_rank;
};

}  // extern "C"

namespace {

constexpr int LOW_OUTPUTS = 3;
constexpr int LOW_LANES = 16;
constexpr int LOW_BLOCK = MOST_SUMS >= 16 ? 4 : 2;  // rows, and ranks, at once

// The first products of all rows: x times `a`.
struct LowSums {
  const LowRank* by = nullptr;
  const AdapterRows* rows = nullptr;
  const Input* sums = nullptr;  // (rows, LOW_OUTPUTS, max_rank)

  const Input* of(int64_t row, int64_t output) const {
    return sums + (row * LOW_OUTPUTS + output) * rows->max_rank;
  }
};

template <int ROWS>
void low_lanes(const bf16* const* x, const bf16* a, int64_t inputs, float (*to)[LOW_LANES]) {
  for (int first = 0; first < LOW_LANES; first += LOW_BLOCK) {
    Lanes sums[ROWS][LOW_BLOCK];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int q = 0; q < LOW_BLOCK; ++q) sums[r][q] = zero();
    int64_t k = 0;
    for (; k + 32 <= inputs; k += 32) {
#pragma GCC unroll 2
      for (int turn = 0; turn < TURNS; ++turn) {
        Factor weights[LOW_BLOCK];
#pragma GCC unroll 4
        for (int q = 0; q < LOW_BLOCK; ++q) weights[q] = factor(a + (first + q) * inputs + k, turn);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          const Factor numbers = factor(x[r] + k, turn);
#pragma GCC unroll 4
          for (int q = 0; q < LOW_BLOCK; ++q) sums[r][q] = dot(sums[r][q], weights[q], numbers);
        }
      }
    }
    if (k < inputs) {  // 16 more
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int q = 0; q < LOW_BLOCK; ++q)
          sums[r][q] = fmadd(load(x[r] + k), load(a + (first + q) * inputs + k), sums[r][q]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int q = 0; q < LOW_BLOCK; ++q) to[r][first + q] = reduce_add(sums[r][q]);
  }
}

// Those of one chunk of rows and one output.
inline void low_chunk(const LowRank& by, const AdapterRows& rows, const bf16* x, int64_t inputs,
                      int64_t chunk, int64_t output, Input* out) {
  const int64_t end = rows.starts[chunk + 1];
  for (int64_t begin = rows.starts[chunk]; begin < end; begin += LOW_BLOCK) {
    const int64_t count = std::min<int64_t>(end - begin, LOW_BLOCK);
    const int64_t* own = rows.order + begin;
    const LowRankPart& part = by.parts[rows.slots[own[0]] * by.count + output];
    const bf16* from[LOW_BLOCK];
    for (int64_t r = 0; r < count; ++r) from[r] = x + own[r] * inputs;
    for (int64_t rank = 0; rank < part.rank; rank += LOW_LANES) {
      alignas(64) float sums[LOW_BLOCK][LOW_LANES];
      const bf16* a = part.a + rank * inputs;
      switch (count) {
        case 1: low_lanes<1>(from, a, inputs, sums); break;
        case 2: low_lanes<2>(from, a, inputs, sums); break;
        case 3: low_lanes<LOW_BLOCK == 4 ? 3 : 1>(from, a, inputs, sums); break;
        default: low_lanes<LOW_BLOCK>(from, a, inputs, sums);
      }
      for (int64_t r = 0; r < count; ++r)
        store(out + (own[r] * LOW_OUTPUTS + output) * rows.max_rank + rank, load(sums[r]));
    }
  }
}

// With at most so many rows times threads, each thread computes all sums for itself: they are few,
// and one more barrier for each product takes longer (measured: 5 of 11 ms of a decode of one row).
constexpr int64_t MOST_PRIVATE = 128;

// The first products of all rows, for this thread: in `shared`, with a barrier, or in memory of its
// own. Called by all threads of a parallel region.
inline const Input* low_sums(const LowRank& by, const AdapterRows& rows, int64_t num_rows,
                             const bf16* x, int64_t inputs, Input* shared) {
  const int64_t items = rows.chunks * by.count;
  if (num_rows * omp_get_num_threads() <= MOST_PRIVATE) {
    static thread_local Scratch kept;
    Input* own = kept.room<Input>(num_rows * LOW_OUTPUTS * rows.max_rank);
    for (int64_t i = 0; i < items; ++i)
      low_chunk(by, rows, x, inputs, i / by.count, i % by.count, own);
    return own;
  }
#pragma omp for nowait
  for (int64_t i = 0; i < items; ++i)
    low_chunk(by, rows, x, inputs, i / by.count, i % by.count, shared);
  wait_for_all();
  return shared;
}

// `sum` of one row and panel, with the second product of the row's adapter.
inline Lanes with_low_rank(const LowSums& low, int64_t row, int64_t panel, Lanes sum) {
  const int64_t slot = low.rows->slots[row];
  if (slot < 0) return sum;
  int64_t output = 0, first = 0;
  while (panel >= low.by->ends[output]) first = low.by->ends[output++];
  const LowRankPart& part = low.by->parts[slot * low.by->count + output];
  const bf16* b = part.b + (panel - first) * part.rank * LOW_LANES;
  const Input* t = low.of(row, output);
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
