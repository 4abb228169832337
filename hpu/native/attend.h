// Paged attention of one new token per row over its cached blocks. Part of decode.cpp.

#pragma once

#include "cache.h"

namespace {

// Query heads per pass: the registers hold their sums of 32 elements.
constexpr int HEADS_AT_ONCE = std::min(4, MOST_SUMS / 2);

// The blocks of one request in the block list.
struct Span {
  int64_t begin = 0, end = 0;
};

// A request and a key head, which a group of query heads shares.
struct Place {
  int64_t row, kv;
  Span span;
};

// Up to 16 visible tokens of a block: addresses of the first of their `keys` and `values`, in the
// cache's format.
struct Tile {
  const uint8_t *keys, *values;
  int64_t count;
};

constexpr int64_t EARLY = 3;  // prefetch distance of keys and values, in tiles

// Prefetches in software, because the rows of a head are strided and blocks are scattered. Prefetches
// into the L2 cache, which allows more reads in flight.
inline void ask_for(const uint8_t* from, int64_t stride, int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < bytes; d += 64)
      _mm_prefetch((const char*)(from + i * stride + d), _MM_HINT_T1);
}

// Finds the tiles of the tokens that a request sees, for one key head, and prefetches the first keys.
template <typename Format>
void find_tiles(const Model& m, const Layer& layer, const Step& s, const Place& at,
                std::vector<Tile>& tiles) {
  tiles.clear();
  const int64_t bytes = Format::row_bytes(m.head_dim), stride = m.kv_heads * bytes;
  for (int64_t b = at.span.begin; b < at.span.end; ++b) {
    int64_t first = 0;
    if (layer.window) {
      const int64_t begin = s.positions[at.row] - layer.window + 1 - s.starts[b];
      first = std::clamp<int64_t>(begin, 0, s.usage[b]);
    }
    for (int64_t i = first; i < s.usage[b]; i += 16) {
      const int64_t from = (s.block_list[b] * m.block_size + i) * stride + at.kv * bytes;
      const int64_t count = std::min<int64_t>(16, s.usage[b] - i);
      if (int64_t(tiles.size()) < EARLY) ask_for(layer.keys + from, stride, count, bytes);
      tiles.push_back({layer.keys + from, layer.values + from, count});
    }
  }
}

// Dot products of WORDS * 32 elements of a query with up to 16 keys.
template <int WORDS, typename Number>
inline Lanes score(const Number* query, const Number* keys, int64_t stride, int64_t count) {
  Factor q[WORDS][TURNS];
  for (int d = 0; d < WORDS; ++d)
    for (int turn = 0; turn < TURNS; ++turn) q[d][turn] = factor(query + d * 32, turn);
  Lanes found[16];
  for (int i = 0; i < 16; ++i) {
    found[i] = zero();
    if (i < count)
      for (int d = 0; d < WORDS; ++d)
        for (int turn = 0; turn < TURNS; ++turn)
          found[i] = dot(found[i], factor(keys + i * stride + d * 32, turn), q[d][turn]);
  }
  return joined(found, [](auto a, auto b) { return add(a, b); });
}

template <typename Number>
inline Lanes score(const Number* query, const Number* keys, int64_t stride, int64_t count,
                   int64_t size) {
  Lanes sum = zero();
  int64_t d = 0;
  for (; d + 64 <= size; d += 64) sum = add(sum, score<2>(query + d, keys + d, stride, count));
  return d == size ? sum : add(sum, score<1>(query + d, keys + d, stride, count));
}

#ifdef __AMX_BF16__
// Queries packed as the weight of a matmul: `heads` outputs in one panel, zero-padded.
void lay_out(const bf16* queries, int64_t heads, int64_t size, bf16* panel) {
  std::memset(panel, 0, size * PANEL * sizeof(bf16));
  for (int64_t d = 0; d < size; d += 2)
    for (int64_t g = 0; g < heads; ++g)
      std::memcpy(panel + d * PANEL + 2 * g, queries + g * size + d, 2 * sizeof(bf16));
}

// Scores of 16 keys for all heads of the panel, with stride `room`.
inline void score_tile(const bf16* panel, int64_t heads, const bf16* keys, int64_t stride,
                       int64_t size, float* scores, int64_t room) {
  alignas(64) float sums[16 * 16];
  _tile_zero(0);
  for (int64_t d = 0; d < size; d += TILE_INPUTS) {
    _tile_loadd(4, keys + d, stride * sizeof(bf16));
    _tile_loadd(6, panel + d * PANEL, 64);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, sums, 64);
  const __m512i rows = _mm512_slli_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4);
  for (int64_t g = 0; g < heads; ++g)
    _mm512_store_ps(scores + g * room, _mm512_i32gather_ps(rows, sums + g, 4));
}
#endif

// Configures this thread's tiles for scoring keys: tiles of 16 rows. `end_scores` releases them.
inline void begin_scores() {
#ifdef __AMX_BF16__
  if (has_tiles) configure(16, 16);
#endif
}

inline void end_scores() {
#ifdef __AMX_BF16__
  if (has_tiles) _tile_release();
#endif
}

// Splits elements d to d + 31 of a token's value, and of the next token's value if any, into factors of
// `dot` (see numbers.h).
template <typename Format>
inline void split_values(const uint8_t* value, const uint8_t* next, int64_t d, Factor& low,
                         Factor& high) {
  if constexpr (Format::CONVERTS) {
    const Lanes one[2] = {Format::load(value, d), Format::load(value, d + 16)};
    Lanes two[2] = {zero(), zero()};
    if (TOKENS > 1 && next) two[0] = Format::load(next, d), two[1] = Format::load(next, d + 16);
    split(one, two, low, high);
  } else {
    alignas(64) static const bf16 nothing[32] = {};
    split((const bf16*)value + d, next ? (const bf16*)next + d : nothing, low, high);
  }
}

// Weighted sums of the values, WORDS * 32 elements from `d` on, for HEADS heads: `powers` (heads, room)
// and a factor per head.
template <typename Format, int HEADS, int WORDS>
void mean(const Model& m, const std::vector<Tile>& tiles, int64_t d, const Input* powers,
          int64_t room, const float* shares, bf16* out) {
  const int64_t bytes = Format::row_bytes(m.head_dim), stride = m.kv_heads * bytes;
  Lanes low[HEADS][WORDS], high[HEADS][WORDS];
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; ++g)
#pragma GCC unroll 2
    for (int w = 0; w < WORDS; ++w) low[g][w] = high[g][w] = zero();
  const int64_t count = tiles.size();
  for (int64_t t = 0; t < count; ++t, powers += 16) {
    const Tile& tile = tiles[t];
    if (const int64_t soon = t + EARLY; !Format::TOKEN_SCALES && d == 0 && soon < count)
      ask_for(tiles[soon].values, stride, tiles[soon].count, bytes);
    for (int64_t i = 0; i < tile.count; i += TOKENS) {
      const uint8_t* value = tile.values + i * stride;
      const uint8_t* next = i + 1 < tile.count ? value + stride : nullptr;
      Factor each[HEADS];
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; ++g) each[g] = repeat(powers + g * room + i, 0);
#pragma GCC unroll 2
      for (int w = 0; w < WORDS; ++w) {
        Factor a, b;
        split_values<Format>(value, next, d + w * 32, a, b);
#pragma GCC unroll 4
        for (int g = 0; g < HEADS; ++g) {
          low[g][w] = dot(low[g][w], a, each[g]);
          high[g][w] = dot(high[g][w], b, each[g]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; ++g)
#pragma GCC unroll 2
    for (int w = 0; w < WORDS; ++w) {
      const Lanes by = set1(shares[g]);
      bf16* to = out + g * m.head_dim + d + w * 32;
      if constexpr (Format::CONVERTS)
        store_halves(to, mul(low[g][w], by), mul(high[g][w], by));
      else
        store_split(to, mul(low[g][w], by), mul(high[g][w], by));
    }
}

template <typename Format, int HEADS>
void means(const Model& m, const std::vector<Tile>& tiles, const Input* powers, int64_t room,
           const float* shares, bf16* out) {
  int64_t d = 0;
  if constexpr (4 * HEADS <= MOST_SUMS)
    for (; d + 64 <= m.head_dim; d += 64)
      mean<Format, HEADS, 2>(m, tiles, d, powers, room, shares, out);
  for (; d < m.head_dim; d += 32) mean<Format, HEADS, 1>(m, tiles, d, powers, room, shares, out);
}

// Computes powers of two of a head's scores, times the `scales` of the values if the values have scales.
// Returns the sum of the powers without scales.
template <bool SCALES>
float exponentiate(const float* scores, int64_t count, float scale, Lanes top, const float* scales,
                   Input* powers) {
  const Lanes by = set1(scale), base = set1(reduce_max(top) * scale);
  Lanes sum = zero();
  for (int64_t i = 0; i < count; i += 16) {
    const Lanes found = power(fmsub(load(scores + i), by, base));
    sum = add(sum, found);
    store(powers + i, SCALES ? mul(found, load(scales + i)) : found);
  }
  return reduce_add(sum);
}

// Reads the scales of up to 16 rows of the cache, padded with zeros.
template <typename Format>
inline void token_scales(const uint8_t* rows, int64_t stride, int64_t count, int64_t size,
                         float* scales) {
  for (int64_t i = 0; i < 16; ++i)
    scales[i] = i < count ? Format::token_scale(rows + i * stride, size) : 0;
}

// Attention of all query heads of one key head over the tokens of `tiles`.
template <typename Format>
void attend(const Model& m, const Layer& layer, const std::vector<Tile>& tiles, const bf16* queries,
            bf16* out) {
  using Number = typename Format::Number;
  const int64_t size = m.head_dim, group = m.heads / m.kv_heads;
  const int64_t bytes = Format::row_bytes(size), stride = m.kv_heads * bytes;
  const int64_t count = tiles.size(), room = count * 16;
  // A padded request has no block: its output is zero.
  if (count == 0) return void(std::memset(out, 0, group * size * sizeof(bf16)));
  thread_local Scratch kept, narrow, scaling;
  float* scores = kept.room<float>(room * group);
  Input* powers = narrow.room<Input>(room * group);
  float* value_scales = Format::TOKEN_SCALES ? scaling.room<float>(room) : nullptr;
  // Keys of the current tile in the element type of the dot products, their scales, and the widened
  // queries.
  alignas(64) Number converted[Format::CONVERTS ? 16 * MOST_HEAD : 1];
  alignas(64) float key_scales[16];
  alignas(64) Number widened[WIDENS<Number> ? MOST_GROUP * MOST_HEAD : 1];
  const Number* asking = (const Number*)queries;
  if constexpr (WIDENS<Number>) widen(queries, group * size, widened), asking = widened;
#ifdef __AMX_BF16__
  alignas(64) bf16 panel[MOST_HEAD * PANEL];
  if (has_tiles) lay_out(queries, group, size, panel);
  // The tile-load intrinsic does not tell the compiler which memory it reads.
  asm volatile("" ::"r"(panel) : "memory");
#endif
  const auto find_value_scales = [&](int64_t t) {
    if constexpr (Format::TOKEN_SCALES)
      token_scales<Format>(tiles[t].values, stride, tiles[t].count, size, value_scales + t * 16);
  };
  Lanes top[MOST_GROUP];
  for (int64_t g = 0; g < group; ++g) top[g] = set1(-INFINITY);
  for (int64_t t = 0; t < count; ++t) {
    const Tile& tile = tiles[t];
    // Value scales are read before the values, so prefetch them now, not after the keys.
    if constexpr (Format::TOKEN_SCALES) ask_for(tile.values, stride, tile.count, bytes);
    if (const int64_t soon = t + EARLY; soon < count)
      ask_for(tiles[soon].keys, stride, tiles[soon].count, bytes);
    else if (!Format::TOKEN_SCALES && soon - count < count)
      ask_for(tiles[soon - count].values, stride, tiles[soon - count].count, bytes);
    const Mask seen = between(0, tile.count);
    const Number* keys = (const Number*)tile.keys;
    int64_t apart = m.kv_heads * size;
    if constexpr (Format::CONVERTS) {
      convert<Format>(tile.keys, stride, tile.count, size, converted);
      keys = converted, apart = size;
    }
    if constexpr (Format::TOKEN_SCALES) {
      token_scales<Format>(tile.keys, stride, tile.count, size, key_scales);
      // Late enough for the prefetch above to have finished.
      if (t >= EARLY) find_value_scales(t - EARLY);
    }
#ifdef __AMX_BF16__
    const bool tiled = has_tiles && tile.count == 16;
    if (tiled) score_tile(panel, group, keys, apart, size, scores + t * 16, room);
#else
    const bool tiled = false;
#endif
    for (int64_t g = 0; g < group; ++g) {
      float* to = scores + g * room + t * 16;
      if (!tiled) store(to, score(asking + g * size, keys, apart, tile.count, size));
      Lanes found = load(to);
      if constexpr (Format::TOKEN_SCALES) found = mul(found, load(key_scales));
      found = select(seen, found, set1(-INFINITY));
      top[g] = max(top[g], found);
      store(to, found);
    }
  }
  if constexpr (Format::TOKEN_SCALES)
    for (int64_t t = std::max<int64_t>(0, count - EARLY); t < count; ++t) find_value_scales(t);
  const float scale = m.scale * TO_POWERS * Format::layer_scale(layer.key_scale);
  const float value_scale = Format::layer_scale(layer.value_scale);
  float shares[MOST_GROUP];
  for (int64_t g = 0; g < group; ++g) {
    const int64_t from = g * room;
    const float sum = exponentiate<Format::TOKEN_SCALES>(scores + from, room, scale, top[g],
                                                         value_scales, powers + from);
    shares[g] = value_scale / sum;
  }
  for (int64_t g = 0; g < group; g += HEADS_AT_ONCE) {
    const int64_t heads = std::min<int64_t>(HEADS_AT_ONCE, group - g);
    const auto kernel = heads == 1   ? means<Format, 1>
                        : heads == 2 ? means<Format, 2>
                        : heads == 3 ? means<Format, 3>
                                     : means<Format, HEADS_AT_ONCE>;
    kernel(m, tiles, powers + g * room, room, shares + g, out + g * size);
  }
}

}  // namespace
