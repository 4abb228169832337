// Matmuls of the CPU back end: x W^T for bfloat16 weights, with dot products of vector registers
// or with AMX tiles. Part of decode.cpp.
//
// Weights are stored in panels of 16 outputs with pairs of inputs adjacent, as dot products and tiles
// read them. Panels are prefetched in software: the hardware prefetcher starts too late and stops at
// page boundaries.

#pragma once

#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "barrier.h"
#include "lora.h"
#include "numbers.h"

// Layout of a weight. hpu/native/panels.py packs the kinds of quantized weights, `pack_integers`
// INT16_ROWS. A group of *_GROUPS has 32 inputs, with a float16 scale and, for INT4_GROUPS, a float16
// minimum; a group of *_STORED (quantized checkpoints) has `group` inputs, with float32 scale and
// minimum; a group of MXFP4 (OCP Microscaling Formats 1.0) has 32 inputs, with a byte for the exponent.
enum Kind : int64_t {
  BFLOAT16,
  INT8_ROWS,     // value * scale of the output
  INT8_GROUPS,   // value * scale of the group
  INT4_GROUPS,   // value * scale of the group + minimum of the group
  INT8_STORED,   // value * scale of the group + minimum of the group
  INT4_STORED,
  MXFP4,         // 4-bit float * power of two of the group
  INT16_ROWS,    // value * scale of the output, in the layout of BFLOAT16
};

struct Product {
  const bf16* weight;
  const bf16* bias;
  int64_t outputs, inputs, kind;
  const float* scales;  // per output, for INT8_ROWS and INT16_ROWS
  int64_t group;         // inputs per group, a multiple of 32, for *_STORED
  const int32_t* order;  // (inputs): entry of x for each input, -1 for zero; null: same order
  int64_t width;         // entries of a row of x
};

// Clamped SwiGLU: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up between
// -`limit` and `limit`. `limit` 0: silu(gate) * up.
struct Clamped {
  float alpha, limit;
};

namespace {

constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
constexpr int PANEL = 16;
constexpr int TILE_INPUTS = 32;
constexpr int64_t CHUNK = 1 << 20;  // bytes of weights that fit into the L2 cache
constexpr int64_t AHEAD = 1024;     // prefetch distance within a panel, in bytes
constexpr int64_t FAR_AHEAD = 2560, NEAR_AHEAD = 512;  // the same, into the L2 and L1 caches
constexpr int MOST_WAITING = 6;

// Running maximum of a row in each lane of a panel, and the panel of the maximum (the first panel wins a
// tie). NaN stays NaN.
struct alignas(64) Best {
  float values[PANEL];
  int32_t panels[PANEL];

  void begin() {
    store(values, set1(-INFINITY));
    std::memset(panels, 0, sizeof(panels));
  }

  void offer(Lanes value, int64_t panel) {
    const Mask wins = either(is_greater(value, load(values)), is_nan(value));
    store_where(wins, values, value);
    store_where(wins, panels, int32_t(panel));
  }
};

inline Lanes gate(Lanes x, Lanes up, Clamped by) {
  const Lanes limit = set1(by.limit);
  x = min(x, limit), up = max(min(up, limit), sub(zero(), limit));
  const Lanes grown = exponential(mul(x, set1(-by.alpha)));
  return mul(div(x, add(set1(1), grown)), add(up, set1(1)));
}

// Destination of the sums of a row: exactly one of `out`, `total`, `best`, `exact` and `mixed` is set.
struct End {
  bf16* out = nullptr;    // (rows, outputs), rounded to bfloat16
  float* total = nullptr;  // (rows, outputs): alpha * sums are added
  float alpha = 0;
  bool gated = false;     // out is (rows, outputs / 2): silu(first half) * second half, or `swiglu`
  Best* best = nullptr;   // (rows): the maximum of the unrounded sums
  float* exact = nullptr;  // (rows, outputs), unrounded
  float* mixed = nullptr;  // (tokens, outputs): shares[row] * sums are added at tokens[row]
  const int64_t* tokens = nullptr;
  const float* shares = nullptr;
  Clamped swiglu = {};
  const LowSums* low = nullptr;  // LoRA results of adapters to add
};

// Panels `first` to `last` of a thread; for a gated matmul, panels of the first half, each with its
// partner in the second half.
struct Range {
  int64_t first, last;
};

// Panels of a matmul that this thread computes.
inline Range share_of(const Product& by, bool gated) {
  const int64_t panels = by.outputs / PANEL / (gated ? 2 : 1);
  const int64_t threads = omp_get_num_threads(), mine = omp_get_thread_num();
  return {panels * mine / threads, panels * (mine + 1) / threads};
}

// Address of the first panel of a range, and the distance from each panel to its partner.
struct Panels {
  const bf16* first;
  int64_t partner;
};

inline Panels panels_of(const Product& by, Range range) {
  return {by.weight + range.first * by.inputs * PANEL, by.outputs / 2 * by.inputs};
}

// Prefetches the start of this thread's share, which is multiplied after the next barrier.
inline void expect(const Product& by, bool gated) {
  if (by.kind != BFLOAT16 && by.kind != INT16_ROWS) return;
  const int64_t panel = by.inputs * PANEL;
  const Panels from = panels_of(by, share_of(by, gated));
  const int64_t far = gated ? from.partner : 2 * panel;
  for (const bf16* at : {from.first, from.first + panel, from.first + far, from.first + far + panel})
    for (int64_t byte = 0; byte < 2 * AHEAD; byte += 64)
      _mm_prefetch((const char*)at + byte, _MM_HINT_T1);
}

// Number of panels to multiply at once, at most `most`, and the number of panels to advance.
struct Width {
  int wide, step;
};

inline Width width_of(int64_t left, const End& end, int most) {
  const int64_t have = end.gated ? 2 * left : left;
  const int wide = have >= most ? most : have >= 2 ? 2 : 1;
  return {wide, end.gated ? wide / 2 : wide};
}

// The q-th of the panels that are multiplied at once from `panel` on. The first `near` panels are
// consecutive, further panels are at the same place in the second half (gated products).
inline int64_t panel_at(const Product& by, int64_t panel, int q, int near) {
  return q < near ? panel + q : by.outputs / PANEL / 2 + panel + q - near;
}

// LoRA sums that initialize the sums of a matmul, if any. Sums with scales begin with zero, because they
// are scaled before the LoRA sums are added.
inline const LowSums* low_to_begin_with(const Product& by, const End& end) {
  return by.scales ? nullptr : end.low;
}

inline Lanes sum_of(const Product& by, const float* from, int64_t at) {
  Lanes sum = load(from);
  if (by.scales) sum = mul(sum, load(by.scales + at));
  return by.bias ? add(sum, load(by.bias + at)) : sum;
}

// `finish` of a clamped SwiGLU; not inlined, so that `finish` compiles to the same code as without it.
[[gnu::noinline]] void finish_clamped(const Product& by, const End& end, const float* sums,
                                      int64_t apart, int64_t row, int64_t panel, int wide) {
  const int64_t half = by.outputs / 2;
  for (int q = 0; q < wide / 2; ++q) {
    const int64_t from = panel * PANEL + q * PANEL;
    const Lanes x = rounded(sum_of(by, sums + q * apart, from));
    const Lanes up = rounded(sum_of(by, sums + (q + wide / 2) * apart, half + from));
    store(end.out + row * half + from, gate(x, up, end.swiglu));
  }
}

inline void finish(const Product& by, const End& end, const float* sums, int64_t apart, int64_t row,
                   int64_t panel, int wide);

// `finish` with the LoRA deltas of adapters; not inlined, so that `finish` compiles to the same code as
// without it.
[[gnu::noinline]] void finish_adapted(const Product& by, const End& end, const float* sums,
                                      int64_t apart, int64_t row, int64_t panel, int wide) {
  alignas(64) float own[4 * PANEL];
  const int near = end.gated ? wide / 2 : wide;
  for (int q = 0; q < wide; ++q) {
    const int64_t at = panel_at(by, panel, q, near);
    const Lanes sum = sum_of(by, sums + q * apart, at * PANEL);
    store(own + q * PANEL, with_low_rank(*end.low, row, at, sum));
  }
  Product bare = by;
  bare.scales = nullptr, bare.bias = nullptr;
  End rest = end;
  rest.low = nullptr;
  finish(bare, rest, own, PANEL, row, panel, wide);
}

// Writes the sums of a row and `wide` panels from `panel` on, `apart` elements apart, to `end`.
inline void finish(const Product& by, const End& end, const float* sums, int64_t apart, int64_t row,
                   int64_t panel, int wide) {
  const int64_t at = panel * PANEL;
  if (end.low) return finish_adapted(by, end, sums, apart, row, panel, wide);
  if (end.best) {
    for (int q = 0; q < wide; ++q) {
      const Lanes sum = sum_of(by, sums + q * apart, at + q * PANEL);
      end.best[row].offer(sum, panel + q);
    }
    return;
  }
  if (end.exact) {
    for (int q = 0; q < wide; ++q) {
      const int64_t from = at + q * PANEL;
      store(end.exact + row * by.outputs + from, sum_of(by, sums + q * apart, from));
    }
    return;
  }
  if (end.mixed) {
    const Lanes share = set1(end.shares[row]);
    float* to = end.mixed + end.tokens[row] * by.outputs + at;
    for (int q = 0; q < wide; ++q, to += PANEL) {
      const Lanes sum = sum_of(by, sums + q * apart, at + q * PANEL);
      store(to, fmadd(share, sum, load(to)));
    }
    return;
  }
  if (end.gated && end.swiglu.limit) return finish_clamped(by, end, sums, apart, row, panel, wide);
  if (end.gated) {
    const int64_t half = by.outputs / 2;
    for (int q = 0; q < wide / 2; ++q) {
      const int64_t from = at + q * PANEL;
      const Lanes x = rounded(sum_of(by, sums + q * apart, from));
      const Lanes up = rounded(sum_of(by, sums + (q + wide / 2) * apart, half + from));
      store(end.out + row * half + from, gate(x, up));
    }
    return;
  }
  if (wide == 2 && !by.bias && !by.scales && !end.total) {
    return store(end.out + row * by.outputs + at, load(sums), load(sums + apart));
  }
  for (int q = 0; q < wide; ++q) {
    const int64_t from = at + q * PANEL;
    const Lanes sum = sum_of(by, sums + q * apart, from);
    const int64_t place = row * by.outputs + from;
    if (end.total)
      store(end.total + place, fmadd(set1(end.alpha), sum, load(end.total + place)));
    else
      store(end.out + place, sum);
  }
}

// Panels of a block of inputs. The second half of the panels is `far` elements after the first.
struct Weights {
  const bf16* from;
  int64_t panel, far;
  const bf16* next;  // the panels that are read next

  const bf16* of(int q, int near) const { return from + q % near * panel + q / near * far; }
};

// Panels to prefetch into the L2 cache during a matmul: a cache line of each panel per pair of inputs.
struct Ahead {
  const bf16* from;
  int64_t panel;
  int count;
};

// Multiplies ROWS rows by PANELS panels of 16 outputs; adds to or stores into `sums` with row stride
// `apart`. ONCE: no other rows use the weights, which come from memory. Prefetches that end in the L2
// cache allow more reads in flight. For more than MOST_WAITING rows the arithmetic takes as long as the
// reads, so weights are also prefetched from the L2 into the L1 cache.
template <int ROWS, int PANELS, bool ONCE>
inline void dots(const Rows& rows, const Weights& by, int64_t pairs, float* sums, int64_t apart,
                 bool adds, const Ahead& ahead) {
  constexpr int NEAR = PANELS > 1 ? PANELS / 2 : 1;
  if constexpr (PANELS > 1 && ROWS * PANELS > MOST_SUMS) {
    for (int q = 0; q < PANELS; q += NEAR) {
      const bf16* next = q ? by.next : by.of(NEAR, NEAR);
      const Weights half{by.of(q, NEAR), by.panel, by.panel, next};
      dots<ROWS, NEAR, ONCE>(rows, half, pairs, sums + q * 16, apart, adds, q ? Ahead{} : ahead);
    }
    return;
  }
  Lanes acc[ROWS][PANELS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p)
      acc[r][p] = adds ? load(sums + r * apart + p * 16) : zero();
  // Prefetch within the panels, and near their ends the first lines of the next panels.
  constexpr bool NEARBY = ONCE && ROWS > MOST_WAITING;
  constexpr int64_t DISTANCE = NEARBY ? FAR_AHEAD : AHEAD;
  const bf16* soon[PANELS];
  for (int p = 0; p < PANELS; ++p) soon[p] = by.of(p, NEAR) + DISTANCE / int64_t(sizeof(bf16));
  const int64_t last = pairs - DISTANCE / 64;
  for (int64_t k = 0; k < pairs; ++k) {
    if (k == last)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) soon[p] += by.next - by.from - pairs * 2 * PANEL;
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p) {
      _mm_prefetch((const char*)(soon[p] + k * 2 * PANEL), ONCE ? _MM_HINT_T1 : _MM_HINT_T0);
      if constexpr (NEARBY)
        _mm_prefetch((const char*)(by.of(p, NEAR) + k * 2 * PANEL) + NEAR_AHEAD, _MM_HINT_T0);
    }
    for (int q = 0; q < ahead.count; ++q)
      _mm_prefetch((const char*)(ahead.from + q * ahead.panel + k * 2 * PANEL), _MM_HINT_T1);
#pragma GCC unroll 2
    for (int turn = 0; turn < TURNS; ++turn) {
      Factor w[PANELS];
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) w[p] = factor(by.of(p, NEAR) + k * 2 * PANEL, turn);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r) {
        const Factor x = repeat(rows.x + r * rows.stride + 2 * k, turn);
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) acc[r][p] = dot(acc[r][p], w[p], x);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p) store(sums + r * apart + p * 16, acc[r][p]);
}

// Maximum rows in a single tile: the registers hold their sums for a panel, so weights are read once.
constexpr int MOST_ROWS = MOST_SUMS >= 24 ? 12 : 6;

template <int PANELS, bool ONCE>
void dots_of(int64_t count, const Rows& rows, const Weights& by, int64_t pairs, float* sums,
             int64_t apart, bool adds, const Ahead& ahead) {
  switch (count) {
    case 1: return dots<1, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
    case 2: return dots<2, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
    case 3: return dots<3, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
    case 4: return dots<4, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
    case 5: return dots<5, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
    case 6: return dots<6, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
  }
  if constexpr (MOST_ROWS > 6) switch (count) {
    case 7: return dots<7, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
    case 8: return dots<8, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
    case 9: return dots<9, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
    case 10: return dots<10, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
    case 11: return dots<11, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
    default: return dots<12, PANELS, ONCE>(rows, by, pairs, sums, apart, adds, ahead);
  }
}

template <bool ONCE>
auto kernel_of(int panels) {
  return panels == 4 ? dots_of<4, ONCE> : panels == 2 ? dots_of<2, ONCE> : dots_of<1, ONCE>;
}

constexpr int64_t MOST_PAIRS = 288;  // pairs of inputs in a block, whose panels stay in the L2 cache
constexpr int64_t MOST_TILES = 16;   // with more tiles of rows, blocks are not faster

// Prefetches the next weights while the rows are multiplied by four panels: with few rows, reading takes
// as long as multiplying.
void multiply_dots(const Product& by, const Panels& from, const Rows& rows, int64_t num_rows,
                   int64_t first_row, const End& given, Range range) {
  const LowSums* low = low_to_begin_with(by, given);
  End end = given;
  if (low) end.low = nullptr;
  const int64_t tiles = num_rows <= MOST_ROWS ? 1 : (num_rows + 5) / 6;
  const int64_t panel = by.inputs * PANEL, pairs = by.inputs / 2;
  const bool has_blocks = tiles > 1 && tiles <= MOST_TILES;
  const int64_t blocks = has_blocks ? (pairs + MOST_PAIRS - 1) / MOST_PAIRS : 1;
  // Dequantized panels are in the cache already.
  const bool once = tiles == 1 && by.kind == BFLOAT16;
  // A single tile prefetches within its panels.
  const int fetched = tiles >= 4 ? 1 : tiles > 1 ? 2 : 0;
  alignas(64) float sums[MOST_TILES * 24 * 16];
  for (int64_t p = range.first; p < range.last;) {
    const auto [wide, step] = width_of(range.last - p, end, 4);
    const int64_t far = end.gated ? from.partner : wide / 2 * panel, apart = wide * PANEL;
    const auto kernel = once ? kernel_of<true>(wide) : kernel_of<false>(wide);
    const bf16* w = from.first + (p - range.first) * panel;
    if (low) {
      int64_t of[4];
      for (int q = 0; q < wide; ++q) of[q] = panel_at(by, p, q, step);
      begin_low_sums(*low, of, wide, step, first_row, num_rows, sums, apart);
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t k = pairs * b / blocks, stop = pairs * (b + 1) / blocks;
      const bf16* after = b + 1 < blocks ? w + stop * 2 * PANEL : w + step * panel;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t begin = num_rows * t / tiles, count = num_rows * (t + 1) / tiles - begin;
        const int64_t q = t * fetched;
        const bf16* at = w + k * 2 * PANEL;
        const Weights block{at, panel, far, t + 1 < tiles ? at : after};
        const Ahead ahead{Weights{after, panel, far}.of(q, 2), panel, q < 4 ? fetched : 0};
        float* to = sums + (has_blocks ? begin * apart : 0);
        const Rows tile{rows.x + begin * rows.stride + 2 * k, rows.stride};
        kernel(count, tile, block, stop - k, to, apart, low || b > 0, ahead);
        if (b + 1 == blocks)
          for (int64_t r = 0; r < count; ++r)
            finish(by, end, to + r * apart, PANEL, first_row + begin + r, p, wide);
      }
    }
    p += step;
  }
}

#ifdef __AMX_BF16__
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 hold sums, tiles 4 and 5 rows of x, tiles 6 and 7 weights. Tiles 4 to 7 are zeroed after
// their last use: beside another thread of the core that uses tiles, products then take half the time
// (benchmarks/tiles.py). It seems that both threads share few physical tile registers, and that a zeroed
// tile takes none.
void configure(int first, int second) {
  TileConfig config;
  const int rows[8] = {first, first, second, second, first, second, 16, 16};
  for (int t = 0; t < 8; ++t) config.bytes[t] = 64, config.rows[t] = rows[t];
  // GCC assumes that the intrinsic reads eight bytes, and may drop stores to the other bytes.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Prefetches a cache line into the L2 cache.
inline void ask_for_line(const void* at) { _mm_prefetch((const char*)at, _MM_HINT_T1); }

// Ways to finish the sums of a row of two panels: `finish` itself, and special cases without its
// branches. `ask_for_row` prefetches what `row` reads and writes.
struct AnyEnd {
  static void ask_for_row(const Product&, const End&, int64_t, int64_t) {}
  static void row(const Product& by, const End& end, const float* sums, int64_t row, int64_t panel) {
    finish(by, end, sums, PANEL, row, panel, 2);
  }
};

struct StoredEnd {
  static void ask_for_row(const Product& by, const End& end, int64_t row, int64_t panel) {
    ask_for_line(end.out + row * by.outputs + panel * PANEL);
  }
  static void row(const Product& by, const End& end, const float* sums, int64_t row, int64_t panel) {
    store(end.out + row * by.outputs + panel * PANEL, load(sums), load(sums + PANEL));
  }
};

struct AddedEnd {
  static void ask_for_row(const Product& by, const End& end, int64_t row, int64_t panel) {
    const float* at = end.total + row * by.outputs + panel * PANEL;
    for (int q = 0; q < 2 * PANEL; q += PANEL) ask_for_line(at + q);
  }
  static void row(const Product& by, const End& end, const float* sums, int64_t row, int64_t panel) {
    float* to = end.total + row * by.outputs + panel * PANEL;
    const Lanes alpha = set1(end.alpha);
    for (int q = 0; q < 2 * PANEL; q += PANEL)
      store(to + q, fmadd(alpha, load(sums + q), load(to + q)));
  }
};

struct GatedEnd {
  static void ask_for_row(const Product& by, const End& end, int64_t row, int64_t panel) {
    ask_for_line(end.out + row * (by.outputs / 2) + panel * PANEL);
  }
  static void row(const Product& by, const End& end, const float* sums, int64_t row, int64_t panel) {
    store(end.out + row * (by.outputs / 2) + panel * PANEL,
          gate(rounded(load(sums)), rounded(load(sums + PANEL))));
  }
};

// A block of up to 32 rows and `wide` panels.
struct Block {
  int64_t row = 0, panel = 0;
  int wide = 0, count = 0;
};

// Sums of a block. They are finished between the tile operations of the next block, whose latency hides
// this work.
template <typename Finish>
struct Unfinished {
  const Product* by;
  const End* end;
  Block block, coming;  // the block to finish, and the block whose sums follow
  int done = 0, asked = 0, turn = 0;
  const bf16* soon = nullptr;  // `lines` cache lines to prefetch, `pace` per step
  int64_t lines = 0, pace = 0;
  alignas(64) float sums[2][32 * 32];

  // Starts a block. `fetches`: its rows of the output are not in the cache.
  void expect(const Block& next, bool fetches) {
    coming = next;
    asked = fetches && next.wide == 2 ? 0 : next.count;
  }

  // Prefetches `count` elements during the next `steps` steps.
  void fetch(const bf16* from, int64_t count, int64_t steps) {
    soon = from, lines = count / TILE_INPUTS, pace = (lines + steps - 1) / steps;
  }

  void fetch_some() {
    for (const int64_t rest = std::max<int64_t>(lines - pace, 0); lines > rest; --lines) {
      ask_for_line(soon);
      soon += TILE_INPUTS;
    }
  }

  // Returns room for the sums of the started block.
  float* next() {
    block = coming, done = 0;
    return sums[turn ^= 1];
  }

  // Finishes up to `rows` rows, and prefetches as many rows of the output of the started block.
  void finish_some(int rows) {
    for (const int stop = std::min(asked + rows, coming.count); asked < stop; ++asked)
      Finish::ask_for_row(*by, *end, coming.row + asked, coming.panel);
    const auto [row, panel, wide, count] = block;
    const int stop = std::min(done + rows, count);
    const float* from = sums[turn];
    if (wide == 2) {
      for (; done < stop; ++done) Finish::row(*by, *end, from + done * 32, row + done, panel);
      return;
    }
    for (; done < stop; ++done)
      finish(*by, *end, from + done * (wide == 4 ? 16 : 32), wide == 4 ? 256 : 16, row + done, panel,
             wide);
  }
};

// Prefetches a panel's tile for the next step.
inline void ask_for_tile(const bf16* from) {
  for (int i = 0; i < 16; ++i)
    _mm_prefetch((const char*)(from + i * TILE_INPUTS), _MM_HINT_T0);
}

// Loads the sums of up to 16 rows and two panels, and with `both` of 16 more rows or 2 more panels.
inline void load_sums(const float* from, bool both) {
  _tile_loadd(0, from, 64);
  _tile_loadd(1, from + 256, 64);
  if (!both) return;
  _tile_loadd(2, from + 512, 64);
  _tile_loadd(3, from + 768, 64);
}

// Multiplies up to 16 rows by 4 panels. `next`: address of the panels that follow. `begin`: initial
// sums, or null.
template <typename Finish>
void tiles_by_four(const bf16* a, int64_t stride, const bf16* w, int64_t panel, int64_t far,
                   int64_t steps, const bf16* next, const float* begin, Unfinished<Finish>& before) {
  const int each = (32 + steps - 1) / steps;
  if (begin) {
    load_sums(begin, true);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < steps; ++k) {
    const bf16 *at = w + k * 512, *later = k + 1 < steps ? at + 512 : next;
    _tile_loadd(4, a + k * 32, stride);
    ask_for_tile(later);
    _tile_loadd(6, at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_zero(6);
    ask_for_tile(later + panel);
    _tile_loadd(7, at + panel, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_zero(7);
    ask_for_tile(later + far);
    _tile_loadd(6, at + far, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_zero(6);
    ask_for_tile(later + far + panel);
    _tile_loadd(7, at + far + panel, 64);
    _tile_dpbf16ps(3, 4, 7);
    _tile_zero(7);
    _tile_zero(4);
    before.finish_some(each);
  }
  before.finish_some(32);
  float* sums = before.next();
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

// Multiplies up to 32 rows by 2 panels, or 1, and finishes `each` rows. FETCHES: prefetch the weights of
// the next step. Otherwise the weights are in the L2 cache, and are read without replacing the rows in
// the L1 cache.
template <bool FETCHES, typename Finish>
inline void add_tiles(const bf16* a, int64_t stride, int count, const bf16* at, int64_t far, int wide,
                      const bf16* later, int each, Unfinished<Finish>& before) {
  _tile_loadd(4, a, stride);
  if constexpr (FETCHES) {
    ask_for_tile(later);
    _tile_loadd(6, at, 64);
  } else {
    _tile_stream_loadd(6, at, 64);
  }
  if (wide == 2) {
    if constexpr (FETCHES) {
      ask_for_tile(later + far);
      _tile_loadd(7, at + far, 64);
    } else {
      _tile_stream_loadd(7, at + far, 64);
    }
  }
  _tile_dpbf16ps(0, 4, 6);
  if (wide == 2) _tile_dpbf16ps(1, 4, 7);
  _tile_zero(4);
  before.finish_some((each + 1) / 2);
  if (count > 16) {
    _tile_loadd(5, a + 8 * stride, stride);
    _tile_dpbf16ps(2, 5, 6);
    if (wide == 2) _tile_dpbf16ps(3, 5, 7);
    _tile_zero(5);
  }
  _tile_zero(6);
  _tile_zero(7);
  before.fetch_some();
  before.finish_some(each / 2);
}

// Stores the sums: `apart` elements between rows, `right` elements to the second panel, `below` elements
// to the second 16 rows.
inline void store_tiles(float* to, int64_t right, int64_t below, int64_t apart, int count) {
  _tile_stored(0, to, apart * sizeof(float));
  _tile_stored(1, to + right, apart * sizeof(float));
  if (count <= 16) return;
  _tile_stored(2, to + below, apart * sizeof(float));
  _tile_stored(3, to + below + right, apart * sizeof(float));
}

// Multiplies a block of inputs. `partial` holds the sums of earlier blocks, or is null, and receives the
// new sums unless the block is the last.
template <bool FETCHES, typename Finish>
void tiles_by_two(const bf16* a, int64_t stride, int count, const bf16* w, int64_t far,
                  int64_t steps, int wide, const bf16* next, float* partial, bool begins, bool ends,
                  Unfinished<Finish>& before) {
  const int each = (32 + steps - 1) / steps;
  if (begins) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    load_sums(partial, count > 16);
  }
  for (int64_t k = 0; k < steps; ++k) {
    const bf16* at = w + k * 512;
    const bf16* later = k + 1 < steps ? at + 512 : next;
    add_tiles<FETCHES>(a + k * 32, stride, count, at, far, wide, later, each, before);
  }
  before.finish_some(32);
  if (ends) store_tiles(before.next(), 16, 512, 32, count);
  else store_tiles(partial, 256, 512, 16, count);
}

// A matmul of more than 32 rows and at most MOST_SMALL steps splits its inputs into blocks of at most
// MOST_STEPS, so that its rows stay in the L1 cache. More steps are not faster with blocks.
constexpr int64_t MOST_SMALL = 48, MOST_STEPS = 20;

// Configures the tiles for LoRA: tiles 0 and 1 hold sums of `rows` rows, tile 4 x times `a` with `ranks`
// ranks, and tiles 6 and 7 as many ranks of a panel of `b`.
void configure_low(int rows, int ranks) {
  TileConfig config;
  for (int t : {0, 1}) config.bytes[t] = 64, config.rows[t] = rows;
  config.bytes[4] = ranks * sizeof(bf16), config.rows[4] = rows;
  for (int t : {6, 7}) config.bytes[t] = 64, config.rows[t] = ranks / 2;
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Multiplies up to 32 rows of x times `a` from `row` on by the panels `begin` to `stop` of `b`. The
// results are the initial sums of tiles of at most `most` panels. Changes the tile configuration.
void low_begins(const LowSums& low, const Product& by, const End& end, int64_t row, int count,
                int64_t begin, int64_t stop, int most, float* sums) {
  constexpr int64_t AHEAD_BYTES = 2048;
  const AdapterRows& rows = *low.rows;
  const auto place = [&](int64_t r) { return (r - row) / 16 * 512 + (r - row) % 16 * 16; };
  // Calls use(first panel, number of panels at once, `near` of panel_at, sums of the panels).
  const auto for_each = [&](auto use) {
    float* to = sums;
    for (int64_t p = begin; p < stop; to += 1024) {
      const auto [wide, step] = width_of(stop - p, end, most);
      use(p, wide, step, to);
      p += step;
    }
  };
  for (int64_t r = row; r < row + count; ++r)
    if (rows.slots[r] < 0)
      for_each([&](int64_t, int wide, int, float* to) {
        for (int q = 0; q < wide; ++q) store(to + q * 256 + place(r), zero());
      });
  int configured = 0;
  alignas(64) float found[4][256];
  for (int64_t c = rows.tiles[row / 16]; c < rows.tiles[row / 16 + 2]; ++c) {
    const int64_t at = rows.starts[c], own = rows.starts[c + 1] - at;
    const LowRankPart* parts = low.by->parts + rows.slots[rows.order[at]] * low.by->count;
    int64_t places[16];
    for (int64_t r = 0; r < own; ++r) places[r] = place(rows.order[at + r]);
    for_each([&](int64_t first, int wide, int near, float* to) {
      for (int q = 0; q < wide; ++q) {
        int64_t panel = panel_at(by, first, q, near);
        const int64_t output = low.output_of(panel);
        const LowRankPart& part = parts[output];
        const int ranks = part.rank % 32 == 0 ? 32 : part.rank % 16 == 0 ? 16 : 8;
        if (configured != own * 64 + ranks) configure_low(own, ranks), configured = own * 64 + ranks;
        const bf16* b = part.b + panel * part.rank * PANEL;
        const Input* t = low.of(at, output);
        const int64_t stride = LOW_OUTPUTS * rows.max_rank * sizeof(Input);
        for (int64_t k = 0; k < part.rank; k += 2)
          _mm_prefetch((const char*)(b + k * PANEL) + AHEAD_BYTES, _MM_HINT_T0);
        if (q % 2 == 0) {
          _tile_zero(0);
          for (int64_t k = 0; k < part.rank; k += ranks) {
            _tile_loadd(4, t + k, stride);
            _tile_loadd(6, b + k * PANEL, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_zero(4);
            _tile_zero(6);
          }
          _tile_stored(0, found[q], 64);
        } else {
          _tile_zero(1);
          for (int64_t k = 0; k < part.rank; k += ranks) {
            _tile_loadd(4, t + k, stride);
            _tile_loadd(7, b + k * PANEL, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_zero(4);
            _tile_zero(7);
          }
          _tile_stored(1, found[q], 64);
        }
      }
      for (int q = 0; q < wide; ++q)
        for (int64_t r = 0; r < own; ++r) store(to + q * 256 + places[r], load(found[q] + r * 16));
    });
  }
  // The tile-load intrinsic does not tell the compiler which memory it reads.
  asm volatile("" ::"r"(sums) : "memory");
}

// `most` panels stay in the L2 cache while all rows are multiplied. `low`: x times `a` of adapters, or
// null.
template <typename Finish>
void multiply_tiles(const Product& by, const Panels& from, const bf16* x, int64_t rows,
                    const End& end, Range range, const LowSums* low) {
  const int64_t panel = by.inputs * PANEL, steps = by.inputs / TILE_INPUTS;
  const int64_t stride = by.inputs * sizeof(bf16);
  const int64_t bytes = panel * sizeof(bf16) * (end.gated ? 2 : 1);
  const int64_t most = std::max<int64_t>(4, CHUNK / bytes / 4 * 4);
  const bool small = steps <= MOST_SMALL;
  const int64_t blocks = small && rows > 32 ? (steps + MOST_STEPS - 1) / MOST_STEPS : 1;
  thread_local Scratch kept;
  float* partial =
      blocks > 1 || low ? kept.room<float>(most * (end.gated ? 2 : 1) * 32 * PANEL) : nullptr;
  Unfinished<Finish> before{&by, &end};
  int shape = 0;
  for (int64_t begin = range.first; begin < range.last; begin += most) {
    const int64_t stop = std::min(range.last, begin + most);
    for (int64_t row = 0; row < rows; row += 32) {
      const int count = std::min<int64_t>(rows - row, 32);
      const int r0 = std::min(count, 16), r1 = count > 16 ? count - 16 : r0;
      const int most_wide = count <= 16 && blocks == 1 ? 4 : 2;
      const int64_t rest = std::clamp<int64_t>(rows - row - count, 0, 32);
      const int64_t pairs = end.gated ? stop - begin : (stop - begin + 1) / 2;
      before.fetch(x + (row + count) * by.inputs, rest * by.inputs, pairs * steps);
      if (low) low_begins(*low, by, end, row, count, begin, stop, most_wide, partial), shape = 0;
      if (shape != r0 * 32 + r1) configure(r0, r1), shape = r0 * 32 + r1;
      const auto by_two = row == 0 || !small ? tiles_by_two<true, Finish> : tiles_by_two<false, Finish>;
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t k = steps * b / blocks, size = steps * (b + 1) / blocks - k;
        const bool begins = b == 0 && !low, ends = b + 1 == blocks;
        float* sums = partial;
        for (int64_t p = begin; p < stop;) {
          const auto [wide, step] = width_of(stop - p, end, most_wide);
          const int64_t far = end.gated ? from.partner : wide / 2 * panel;
          const bf16* a = x + row * by.inputs + k * TILE_INPUTS;
          const bf16* w = from.first + (p - range.first) * panel + k * 512;
          const bf16* next = w + step * panel;
          const float* low_sums = low ? sums : nullptr;
          if (ends) before.expect({row, p, wide, count}, rows > 32);
          if (wide == 4) tiles_by_four(a, stride, w, panel, far, size, next, low_sums, before);
          else by_two(a, stride, count, w, far, size, wide, next, sums, begins, ends, before);
          p += step, sums += 1024;
        }
      }
    }
  }
  before.finish_some(32);
  _tile_release();
}

void multiply_tiles(const Product& by, const Panels& from, const bf16* x, int64_t rows,
                    const End& end, Range range) {
  const LowSums* low = std::is_same_v<Input, bf16> ? low_to_begin_with(by, end) : nullptr;
  End own = end;
  if (low) own.low = nullptr;
  const bool bare = !by.bias && !by.scales && !own.low && !end.best && !end.exact && !end.mixed;
  const auto kernel = !bare || end.swiglu.limit ? multiply_tiles<AnyEnd>
                      : end.gated               ? multiply_tiles<GatedEnd>
                      : end.total               ? multiply_tiles<AddedEnd>
                                                : multiply_tiles<StoredEnd>;
  kernel(by, from, x, rows, own, range, low);
}
#endif

bool has_tiles = false;

void multiply_wide(const Product& by, const Panels& from, const bf16* x, int64_t rows,
                   const End& end, Range range) {
#ifdef __AMX_BF16__
  if (has_tiles && by.inputs % TILE_INPUTS == 0)
    return multiply_tiles(by, from, x, rows, end, range);
#endif
  thread_local Scratch kept;
  // Limit the rows, so that converted rows and LoRA sums stay in the cache while all panels are
  // multiplied.
  const bool all = std::is_same_v<Input, bf16> && !low_to_begin_with(by, end);
  const int64_t most = all ? rows : 6 * MOST_TILES;
  for (int64_t r = 0; r < rows; r += most) {
    const int64_t count = std::min(rows - r, most);
    const Rows some = rows_of(x + r * by.inputs, by.inputs, count, by.inputs, kept);
    multiply_dots(by, from, some, count, r, end, range);
  }
}

}  // namespace
