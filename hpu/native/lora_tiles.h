// x times the `a` matrices of adapters, with AMX tiles if available. Part of decode.cpp.

#pragma once

#include "products.h"

namespace {

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
// x times `a` for 16 ranks from `first` on and 16 rows in `columns`: (8 pairs of ranks, 16, 2). Four
// independent sums hide the latency of the tile instructions.
void low_ranks(const LowRankPart& part, int64_t first, const bf16* columns, int64_t steps, bf16* out) {
  constexpr int64_t NEXT = 4;  // prefetch distance in steps
  const int64_t apart = part.rank * TILE_INPUTS;
  const bf16* a = part.a + first * TILE_INPUTS;
  const auto at = [&](int64_t k) { return ask_for_tile(a + (k + NEXT) * apart), a + k * apart; };
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int64_t k = 0;
  for (; k + 4 <= steps; k += 4) {
    _tile_loadd(4, at(k), 64);
    _tile_loadd(6, columns + k * 512, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_zero(4);
    _tile_zero(6);
    _tile_loadd(5, at(k + 1), 64);
    _tile_loadd(7, columns + k * 512 + 512, 64);
    _tile_dpbf16ps(1, 5, 7);
    _tile_zero(5);
    _tile_zero(7);
    _tile_loadd(4, at(k + 2), 64);
    _tile_loadd(6, columns + k * 512 + 1024, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_zero(4);
    _tile_zero(6);
    _tile_loadd(5, at(k + 3), 64);
    _tile_loadd(7, columns + k * 512 + 1536, 64);
    _tile_dpbf16ps(3, 5, 7);
    _tile_zero(5);
    _tile_zero(7);
  }
  for (; k < steps; ++k) {
    _tile_loadd(4, at(k), 64);
    _tile_loadd(6, columns + k * 512, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_zero(4);
    _tile_zero(6);
  }
  alignas(64) float sums[4][256];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  const auto sum = [&](int i) {
    return add(add(load(sums[0] + i), load(sums[1] + i)),
               add(load(sums[2] + i), load(sums[3] + i)));
  };
  for (int i = 0; i < 256; i += 32) store_pairs(out + i, sum(i), sum(i + 16));
}

// x times `a` for the (chunk, output) pairs `first` to `last` - 1.
void low_tiles(const LowRank& by, const AdapterRows& rows, const bf16* x, int64_t inputs,
               int64_t first, int64_t last, bf16* out) {
  thread_local Scratch kept;
  bf16* columns = kept.room<bf16>(inputs * LOW_LANES);
  configure(16, 16);
  int64_t tile = 0, packed = -1;
  for (int64_t i = first; i < last; ++i) {
    const int64_t chunk = i / by.count, output = i % by.count;
    while (rows.tiles[tile + 1] <= chunk) ++tile;
    if (tile != packed) {
      const int64_t begin = rows.starts[rows.tiles[tile]];
      const int64_t count = rows.starts[rows.tiles[tile + 1]] - begin;
      const bf16* from[LOW_LANES];
      for (int64_t r = 0; r < LOW_LANES; ++r)
        from[r] = x + rows.order[begin + (r < count ? r : 0)] * inputs;
      store_transposed(columns, from, inputs);
      // The tile-load intrinsic does not tell the compiler which memory it reads.
      asm volatile("" ::"r"(columns) : "memory");
      packed = tile;
    }
    const int64_t slot = rows.slots[rows.order[rows.starts[chunk]]];
    const LowRankPart& part = by.parts[slot * by.count + output];
    const int64_t begin = rows.starts[chunk], column = begin - rows.starts[rows.tiles[tile]];
    for (int64_t rank = 0; rank < part.rank; rank += LOW_LANES) {
      alignas(64) bf16 sums[LOW_LANES * LOW_LANES];
      low_ranks(part, rank, columns, inputs / TILE_INPUTS, sums);
      for (int64_t r = begin; r < rows.starts[chunk + 1]; ++r)
        for (int64_t k = 0; k < LOW_LANES; k += 2)
          std::memcpy(out + (r * LOW_OUTPUTS + output) * rows.max_rank + rank + k,
                      sums + k * LOW_LANES + (column + r - begin) * 2, 2 * sizeof(bf16));
    }
  }
  _tile_release();
}
#endif

// Writes x times `a` for all rows with an adapter to `out`. Called by all threads of a parallel region.
inline LowSums low_sums(const LowRank& by, const AdapterRows& rows, const bf16* x, int64_t inputs,
                        Input* out) {
  const int64_t items = rows.chunks * by.count;
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  if (has_tiles && inputs % TILE_INPUTS == 0) {
    const int64_t mine = omp_get_thread_num(), threads = omp_get_num_threads();
    low_tiles(by, rows, x, inputs, items * mine / threads, items * (mine + 1) / threads, out);
    wait_for_all();
    return {&by, &rows, out};
  }
#endif
#pragma omp for nowait
  for (int64_t i = 0; i < items; ++i)
    low_chunk(by, rows, x, inputs, i / by.count, i % by.count, out);
  wait_for_all();
  return {&by, &rows, out};
}

}  // namespace
