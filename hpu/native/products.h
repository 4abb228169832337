// Matrix products of the CPU back end: x W^T for weights in bfloat16, with dot products (AVX512-BF16)
// or tiles (AMX). Part of decode.cpp.
//
// Weights are stored in panels of 16 outputs with pairs of inputs adjacent, as dot products and tiles
// read them. Panels are prefetched in software: the hardware prefetcher starts too late and stops at
// page boundaries.

#pragma once

#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "numbers.h"

// Layout of a weight. hpu/native/panels.py packs the quantized kinds; a group is 32 inputs, its scale
// and minimum are float16.
enum Kind : int64_t {
  BFLOAT16,
  INT8_ROWS,     // value * scale of the output
  INT8_GROUPS,   // value * scale of the group
  INT4_GROUPS,   // value * scale of the group + minimum of the group
};

struct Product {
  const bf16* weight;
  const bf16* bias;
  int64_t outputs, inputs, kind;
  const float* scales;  // of the outputs, for INT8_ROWS
};

namespace {

constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
constexpr int PANEL = 16;
constexpr int TILE_INPUTS = 32;
constexpr int64_t CHUNK = 1 << 20;  // bytes of weights that fit into the L2 cache
constexpr int64_t AHEAD = 1024;     // prefetch distance within a panel, in bytes

// Running maximum of a row in each lane of a panel, and the panel it came from (the first of equal
// ones). NaN stays NaN.
struct alignas(64) Best {
  float values[PANEL];
  int32_t panels[PANEL];

  void begin() {
    _mm512_store_ps(values, _mm512_set1_ps(-INFINITY));
    _mm512_store_si512(panels, _mm512_setzero_si512());
  }

  void offer(__m512 value, int64_t panel) {
    const __mmask16 wins = _mm512_cmp_ps_mask(value, _mm512_load_ps(values), _CMP_GT_OQ) |
                           _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    _mm512_mask_store_ps(values, wins, value);
    _mm512_mask_store_epi32(panels, wins, _mm512_set1_epi32(int32_t(panel)));
  }
};

// Where the sums of a row go.
struct End {
  bf16* out = nullptr;    // (rows, outputs), rounded to bfloat16
  bf16* total = nullptr;  // (rows, outputs), or else: alpha * sums is added
  float alpha = 0;
  bool gated = false;     // out is (rows, outputs / 2): silu(first half) * second half
  Best* best = nullptr;   // (rows), or else: the maximum of what `exact` would hold
  float* exact = nullptr;  // (rows, outputs), or else: unrounded
  float* mixed = nullptr;  // (tokens, outputs), or else: the row's share of the sums is added to its
                           // token
  const int64_t* tokens = nullptr;
  const float* shares = nullptr;
};

// Panels of one thread: `first` to `last`; of a gated product those of the first half and their
// partners in the second half.
struct Range {
  int64_t first, last;
};

// This thread's share of a product's panels.
inline Range share_of(const Product& by, bool gated) {
  const int64_t panels = by.outputs / PANEL / (gated ? 2 : 1);
  const int64_t threads = omp_get_num_threads(), mine = omp_get_thread_num();
  return {panels * mine / threads, panels * (mine + 1) / threads};
}

// Address of the range's panels, and the distance of each to its partner.
struct Panels {
  const bf16* first;
  int64_t partner;
};

inline Panels panels_of(const Product& by, Range range) {
  return {by.weight + range.first * by.inputs * PANEL, by.outputs / 2 * by.inputs};
}

// Prefetches the start of this thread's share, which is multiplied after the next barrier.
inline void expect(const Product& by, bool gated) {
  if (by.kind != BFLOAT16) return;
  const int64_t panel = by.inputs * PANEL;
  const Panels from = panels_of(by, share_of(by, gated));
  const int64_t far = gated ? from.partner : 2 * panel;
  for (const bf16* at : {from.first, from.first + panel, from.first + far, from.first + far + panel})
    for (int64_t byte = 0; byte < 2 * AHEAD; byte += 64)
      _mm_prefetch((const char*)at + byte, _MM_HINT_T1);
}

// How many of the remaining panels to multiply at once, at most `most`, and the step.
struct Width {
  int wide, step;
};

inline Width width_of(int64_t left, const End& end, int most) {
  const int64_t have = end.gated ? 2 * left : left;
  const int wide = have >= most ? most : have >= 2 ? 2 : 1;
  return {wide, end.gated ? wide / 2 : wide};
}

inline __m512 sum_of(const Product& by, const float* from, int64_t at) {
  __m512 sum = _mm512_loadu_ps(from);
  if (by.scales) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(by.scales + at));
  return by.bias ? _mm512_add_ps(sum, load(by.bias + at)) : sum;
}

// The sums of one row and `wide` panels from `panel`, with stride `apart`.
inline void finish(const Product& by, const End& end, const float* sums, int64_t apart, int64_t row,
                   int64_t panel, int wide) {
  const int64_t at = panel * PANEL;
  if (end.best) {
    for (int q = 0; q < wide; ++q) {
      const __m512 sum = sum_of(by, sums + q * apart, at + q * PANEL);
      end.best[row].offer(sum, panel + q);
    }
    return;
  }
  if (end.exact) {
    for (int q = 0; q < wide; ++q) {
      const int64_t from = at + q * PANEL;
      _mm512_storeu_ps(end.exact + row * by.outputs + from, sum_of(by, sums + q * apart, from));
    }
    return;
  }
  if (end.mixed) {
    const __m512 share = _mm512_set1_ps(end.shares[row]);
    float* to = end.mixed + end.tokens[row] * by.outputs + at;
    for (int q = 0; q < wide; ++q, to += PANEL) {
      const __m512 sum = sum_of(by, sums + q * apart, at + q * PANEL);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(share, sum, _mm512_loadu_ps(to)));
    }
    return;
  }
  if (end.gated) {
    const int64_t half = by.outputs / 2;
    for (int q = 0; q < wide / 2; ++q) {
      const int64_t from = at + q * PANEL;
      const __m512 x = rounded(sum_of(by, sums + q * apart, from));
      const __m512 up = rounded(sum_of(by, sums + (q + wide / 2) * apart, half + from));
      store(end.out + row * half + from, gate(x, up));
    }
    return;
  }
  if (wide == 2 && !by.bias && !by.scales && !end.total) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(sums + apart), _mm512_loadu_ps(sums));
    _mm512_storeu_si512(end.out + row * by.outputs + at, (__m512i)both);
    return;
  }
  for (int q = 0; q < wide; ++q) {
    const int64_t from = at + q * PANEL;
    __m512 sum = sum_of(by, sums + q * apart, from);
    bf16* place = (end.total ? end.total : end.out) + row * by.outputs + from;
    if (end.total) sum = _mm512_fmadd_ps(_mm512_set1_ps(end.alpha), sum, load(place));
    store(place, sum);
  }
}

// Panels of a block of inputs. The second half of them is `far` numbers after the first.
struct Weights {
  const bf16* from;
  int64_t panel, far;

  const bf16* of(int q, int near) const { return from + q % near * panel + q / near * far; }
};

// Panels to prefetch into the L2 cache during a product: one line of each per pair of inputs.
struct Ahead {
  const bf16* from;
  int64_t panel;
  int count;
};

// ROWS rows times PANELS panels of 16 outputs, added to `sums` with row stride `apart` or stored there.
template <int ROWS, int PANELS>
inline void dots(const bf16* x, int64_t stride, const Weights& by, int64_t pairs, float* sums,
                 int64_t apart, bool adds, const Ahead& ahead) {
  constexpr int NEAR = PANELS > 1 ? PANELS / 2 : 1;
  __m512 acc[ROWS][PANELS];
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p)
      acc[r][p] = adds ? _mm512_loadu_ps(sums + r * apart + p * 16) : _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh w[PANELS];
    for (int p = 0; p < PANELS; ++p) {
      const bf16* at = by.of(p, NEAR) + k * 2 * PANEL;
      _mm_prefetch((const char*)at + AHEAD, _MM_HINT_T0);
      w[p] = (__m512bh)_mm512_loadu_si512(at);
    }
    for (int q = 0; q < ahead.count; ++q)
      _mm_prefetch((const char*)(ahead.from + q * ahead.panel + k * 2 * PANEL), _MM_HINT_T1);
    for (int r = 0; r < ROWS; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * stride + 2 * k, 4);
      __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int p = 0; p < PANELS; ++p) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], w[p], both);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) _mm512_storeu_ps(sums + r * apart + p * 16, acc[r][p]);
}

template <int PANELS>
void dots_of(int64_t rows, const bf16* x, int64_t stride, const Weights& by, int64_t pairs,
             float* sums, int64_t apart, bool adds, const Ahead& ahead) {
  switch (rows) {
    case 1: return dots<1, PANELS>(x, stride, by, pairs, sums, apart, adds, ahead);
    case 2: return dots<2, PANELS>(x, stride, by, pairs, sums, apart, adds, ahead);
    case 3: return dots<3, PANELS>(x, stride, by, pairs, sums, apart, adds, ahead);
    case 4: return dots<4, PANELS>(x, stride, by, pairs, sums, apart, adds, ahead);
    case 5: return dots<5, PANELS>(x, stride, by, pairs, sums, apart, adds, ahead);
    default: return dots<6, PANELS>(x, stride, by, pairs, sums, apart, adds, ahead);
  }
}

constexpr int64_t MOST_PAIRS = 288;  // of inputs in a block, whose panels stay in the L2 cache
constexpr int64_t MOST_TILES = 16;   // with more tiles of rows, blocks gain nothing

// While the rows are multiplied by four panels, the next weights are prefetched: with few rows,
// reading takes as long as multiplying.
void multiply_dots(const Product& by, const Panels& from, const bf16* x, int64_t rows,
                   const End& end, Range range) {
  const int64_t tiles = (rows + 5) / 6, panel = by.inputs * PANEL, pairs = by.inputs / 2;
  const bool has_blocks = tiles > 1 && tiles <= MOST_TILES;
  const int64_t blocks = has_blocks ? (pairs + MOST_PAIRS - 1) / MOST_PAIRS : 1;
  // One tile prefetches within its panels.
  const int fetched = tiles >= 4 ? 1 : tiles > 1 ? 2 : 0;
  alignas(64) float sums[MOST_TILES * 24 * 16];
  for (int64_t p = range.first; p < range.last;) {
    const auto [wide, step] = width_of(range.last - p, end, 4);
    const int64_t far = end.gated ? from.partner : wide / 2 * panel, apart = wide * PANEL;
    const auto kernel = wide == 4 ? dots_of<4> : wide == 2 ? dots_of<2> : dots_of<1>;
    const bf16* w = from.first + (p - range.first) * panel;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t k = pairs * b / blocks, stop = pairs * (b + 1) / blocks;
      const Weights block{w + k * 2 * PANEL, panel, far};
      const bf16* after = b + 1 < blocks ? w + stop * 2 * PANEL : w + step * panel;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin;
        const int64_t q = t * fetched;
        const Ahead ahead{Weights{after, panel, far}.of(q, 2), panel, q < 4 ? fetched : 0};
        float* to = sums + (has_blocks ? begin * apart : 0);
        kernel(count, x + begin * by.inputs + 2 * k, by.inputs, block, stop - k, to, apart, b > 0,
               ahead);
        if (b + 1 == blocks)
          for (int64_t r = 0; r < count; ++r)
            finish(by, end, to + r * apart, PANEL, begin + r, p, wide);
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

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights.
void configure(int first, int second) {
  TileConfig config;
  const int rows[8] = {first, first, second, second, first, second, 16, 16};
  for (int t = 0; t < 8; ++t) config.bytes[t] = 64, config.rows[t] = rows[t];
  // GCC believes that the intrinsic reads eight bytes, and may drop stores to the rest.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Unfinished sums of a block of rows. They are finished between the tile operations of the next block,
// whose latency hides the work.
struct Unfinished {
  const Product* by;
  const End* end;
  int64_t row = 0, panel = 0;
  int wide = 0, count = 0, done = 0, turn = 0;
  alignas(64) float sums[2][32 * 32];

  float* next() { return sums[turn ^= 1]; }

  void finish_some(int rows) {
    const int stop = std::min(done + rows, count), apart = wide == 4 ? 256 : 16;
    const float* from = sums[turn];
    for (; done < stop; ++done)
      finish(*by, *end, from + done * (wide == 4 ? 16 : 32), apart, row + done, panel, wide);
  }
};

// Prefetches the tile of a panel that the next step reads.
inline void ask_for_tile(const bf16* from) {
  for (int i = 0; i < 16; ++i)
    _mm_prefetch((const char*)(from + i * TILE_INPUTS), _MM_HINT_T0);
}

// Up to 16 rows times 4 panels. `next`: address of the panels after them.
void tiles_by_four(const bf16* a, int64_t stride, const bf16* w, int64_t panel, int64_t far,
                   int64_t steps, const bf16* next, Unfinished& before) {
  const int each = (32 + steps - 1) / steps;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; ++k) {
    const bf16 *at = w + k * 512, *later = k + 1 < steps ? at + 512 : next;
    _tile_loadd(4, a + k * 32, stride);
    ask_for_tile(later);
    _tile_loadd(6, at, 64);
    _tile_dpbf16ps(0, 4, 6);
    ask_for_tile(later + panel);
    _tile_loadd(7, at + panel, 64);
    _tile_dpbf16ps(1, 4, 7);
    ask_for_tile(later + far);
    _tile_loadd(6, at + far, 64);
    _tile_dpbf16ps(2, 4, 6);
    ask_for_tile(later + far + panel);
    _tile_loadd(7, at + far + panel, 64);
    _tile_dpbf16ps(3, 4, 7);
    before.finish_some(each);
  }
  before.finish_some(32);
  float* sums = before.next();
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

// Up to 32 rows times 2 panels, or 1. `next`: as above.
void tiles_by_two(const bf16* a, int64_t stride, int count, const bf16* w, int64_t far,
                  int64_t steps, int wide, const bf16* next, Unfinished& before) {
  const bf16* a1 = a + 8 * stride;
  const int each = (32 + steps - 1) / steps;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; ++k) {
    const bf16 *at = w + k * 512, *later = k + 1 < steps ? at + 512 : next;
    _tile_loadd(4, a + k * 32, stride);
    ask_for_tile(later);
    _tile_loadd(6, at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (wide == 2) {
      ask_for_tile(later + far);
      _tile_loadd(7, at + far, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (count > 16) {
      _tile_loadd(5, a1 + k * 32, stride);
      _tile_dpbf16ps(2, 5, 6);
      if (wide == 2) _tile_dpbf16ps(3, 5, 7);
    }
    before.finish_some(each);
  }
  before.finish_some(32);
  float* sums = before.next();
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (count > 16) {
    _tile_stored(2, sums + 512, 128);
    _tile_stored(3, sums + 528, 128);
  }
}

void multiply_tiles(const Product& by, const Panels& from, const bf16* x, int64_t rows,
                    const End& end, Range range) {
  const int64_t panel = by.inputs * PANEL, steps = by.inputs / TILE_INPUTS;
  const int64_t stride = by.inputs * sizeof(bf16);
  // This many panels stay in the L2 cache while all rows are multiplied.
  const int64_t bytes = panel * sizeof(bf16) * (end.gated ? 2 : 1);
  const int64_t most = std::max<int64_t>(4, CHUNK / bytes / 4 * 4);
  Unfinished before{&by, &end};
  int shape = 0;
  for (int64_t begin = range.first; begin < range.last; begin += most) {
    const int64_t stop = std::min(range.last, begin + most);
    for (int64_t row = 0; row < rows; row += 32) {
      const int count = std::min<int64_t>(rows - row, 32);
      const int r0 = std::min(count, 16), r1 = count > 16 ? count - 16 : r0;
      if (shape != r0 * 32 + r1) configure(r0, r1), shape = r0 * 32 + r1;
      for (int64_t p = begin; p < stop;) {
        const auto [wide, step] = width_of(stop - p, end, count <= 16 ? 4 : 2);
        const int64_t far = end.gated ? from.partner : wide / 2 * panel;
        const bf16 *a = x + row * by.inputs, *w = from.first + (p - range.first) * panel;
        const bf16* next = w + step * panel;
        if (wide == 4) tiles_by_four(a, stride, w, panel, far, steps, next, before);
        else tiles_by_two(a, stride, count, w, far, steps, wide, next, before);
        before.row = row, before.panel = p, before.wide = wide, before.count = count;
        before.done = 0;
        p += step;
      }
    }
  }
  before.finish_some(32);
  _tile_release();
}
#endif

bool has_tiles = false;

void multiply_wide(const Product& by, const Panels& from, const bf16* x, int64_t rows,
                   const End& end, Range range) {
#ifdef __AMX_BF16__
  if (has_tiles && by.inputs % TILE_INPUTS == 0)
    return multiply_tiles(by, from, x, rows, end, range);
#endif
  multiply_dots(by, from, x, rows, end, range);
}

}  // namespace
