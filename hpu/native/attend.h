// Paged attention of one new token per sequence over its cached blocks. Part of decode.cpp.

#pragma once

#include "model.h"

namespace {

constexpr int HEADS_AT_ONCE = 4;

// The blocks of one request in the block list.
struct Span {
  int64_t begin = 0, end = 0;
};

// One request and one key head, which a group of query heads shares.
struct Place {
  int64_t row, kv;
  Span span;
};

// The visible part of a block: `count` slots from the first of `keys` and `values`.
struct Part {
  const bf16 *keys, *values;
  int64_t count;
};

inline Part part_of(const Model& m, const Layer& layer, const Step& s, const Place& at,
                    int64_t block) {
  int64_t first = 0;
  if (layer.window) {
    const int64_t begin = s.positions[at.row] - layer.window + 1 - s.starts[block];
    first = std::clamp<int64_t>(begin, 0, s.usage[block]);
  }
  const int64_t slot = s.block_list[block] * m.block_size + first;
  const int64_t from = (slot * m.kv_heads + at.kv) * m.head_dim;
  return {layer.keys + from, layer.values + from, s.usage[block] - first};
}

// Scores of the parts are contiguous; each part starts at a multiple of 16.
inline int64_t rounded_up(int64_t count) {
  return (count + 15) / 16 * 16;
}

// Dot products of WORDS * 32 numbers of one query with up to 16 keys.
template <int WORDS>
inline __m512 score(const bf16* query, const bf16* keys, int64_t stride, int64_t count) {
  __m512bh q[WORDS];
  for (int d = 0; d < WORDS; ++d) q[d] = (__m512bh)_mm512_loadu_si512(query + d * 32);
  __m512 found[16];
  for (int i = 0; i < 16; ++i) {
    found[i] = _mm512_setzero_ps();
    if (i < count)
      for (int d = 0; d < WORDS; ++d) {
        const __m512bh key = (__m512bh)_mm512_loadu_si512(keys + i * stride + d * 32);
        found[i] = _mm512_dpbf16_ps(found[i], key, q[d]);
      }
  }
  return joined(found, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
}

inline __m512 score(const bf16* query, const bf16* keys, int64_t stride, int64_t count,
                    int64_t size) {
  __m512 sum = _mm512_setzero_ps();
  int64_t d = 0;
  for (; d + 64 <= size; d += 64)
    sum = _mm512_add_ps(sum, score<2>(query + d, keys + d, stride, count));
  return d == size ? sum : _mm512_add_ps(sum, score<1>(query + d, keys + d, stride, count));
}

#ifdef __AMX_BF16__
// Queries packed as the weight of a product: `heads` outputs in one panel, zero-padded.
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

// The tile configuration of a thread that scores keys: tiles of 16 rows; released afterwards.
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

// Weighted sums of WORDS * 32 numbers of the values from `d`, for HEADS heads: `powers` (heads, room)
// and one factor per head.
template <int HEADS, int WORDS>
void mean(const Model& m, const Layer& layer, const Step& s, const Place& at, int64_t d,
          const float* powers, int64_t room, const float* shares, bf16* out) {
  const int64_t stride = m.kv_heads * m.head_dim;
  __m512 evens[HEADS][WORDS], odds[HEADS][WORDS];
  for (int g = 0; g < HEADS; ++g)
    for (int w = 0; w < WORDS; ++w) evens[g][w] = odds[g][w] = _mm512_setzero_ps();
  int64_t n = 0;
  for (int64_t b = at.span.begin; b < at.span.end; ++b) {
    const Part part = part_of(m, layer, s, at, b);
    for (int64_t i = 0; i < part.count; ++i)
      for (int w = 0; w < WORDS; ++w) {
        // Each 32-bit word holds two numbers: the first in the lower half, the second in the upper.
        const __m512i pairs = _mm512_loadu_si512(part.values + i * stride + d + w * 32);
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        const __m512 odd = _mm512_castsi512_ps(
            _mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000))));
        for (int g = 0; g < HEADS; ++g) {
          const __m512 by = _mm512_set1_ps(powers[g * room + n + i]);
          evens[g][w] = _mm512_fmadd_ps(even, by, evens[g][w]);
          odds[g][w] = _mm512_fmadd_ps(odd, by, odds[g][w]);
        }
      }
    n += rounded_up(part.count);
  }
  for (int g = 0; g < HEADS; ++g)
    for (int w = 0; w < WORDS; ++w) {
      const __m512 by = _mm512_set1_ps(shares[g]);
      const __m512i even = _mm512_cvtepu16_epi32(
          (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(evens[g][w], by)));
      const __m512i odd = _mm512_cvtepu16_epi32(
          (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(odds[g][w], by)));
      _mm512_storeu_si512(out + g * m.head_dim + d + w * 32,
                          _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
}

template <int HEADS>
void means(const Model& m, const Layer& layer, const Step& s, const Place& at, const float* powers,
           int64_t room, const float* shares, bf16* out) {
  int64_t d = 0;
  for (; d + 64 <= m.head_dim; d += 64)
    mean<HEADS, 2>(m, layer, s, at, d, powers, room, shares, out);
  if (d < m.head_dim) mean<HEADS, 1>(m, layer, s, at, d, powers, room, shares, out);
}

// Replaces the scores of one head with powers of two; returns their sum.
float weigh(float* scores, int64_t count, float scale, __m512 top) {
  const __m512 by = _mm512_set1_ps(scale);
  const __m512 base = _mm512_set1_ps(_mm512_reduce_max_ps(top) * scale);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 found = power(_mm512_fmsub_ps(_mm512_load_ps(scores + i), by, base));
    sum = _mm512_add_ps(sum, found);
    _mm512_store_ps(scores + i, found);
  }
  return _mm512_reduce_add_ps(sum);
}

// Prefetches: blocks are scattered, and each slot holds the other heads too.
inline void ask_for(const bf16* from, int64_t stride, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < size; d += 32)
      _mm_prefetch((const char*)(from + i * stride + d), _MM_HINT_T0);
}

// All query heads of one key head, over the request's blocks.
void attend(const Model& m, const Layer& layer, const Step& s, const Place& at, const bf16* queries,
            bf16* out) {
  const int64_t size = m.head_dim, group = m.heads / m.kv_heads, stride = m.kv_heads * size;
  const int64_t room = (at.span.end - at.span.begin) * rounded_up(m.block_size);
  thread_local Scratch kept;
  float* scores = kept.room<float>(room * group);
  alignas(64) bf16 panel[MOST_HEAD * PANEL];
#ifdef __AMX_BF16__
  if (has_tiles) lay_out(queries, group, size, panel);
  // The tile-load intrinsic does not tell the compiler which memory it reads.
  asm volatile("" ::"r"(panel) : "memory");
#endif
  __m512 top[MOST_GROUP];
  for (int64_t g = 0; g < group; ++g) top[g] = _mm512_set1_ps(-INFINITY);
  int64_t n = 0;
  for (int64_t b = at.span.begin; b < at.span.end; ++b) {
    const Part part = part_of(m, layer, s, at, b);
    ask_for(part.values, stride, part.count, size);
    if (b + 1 < at.span.end) {
      const Part next = part_of(m, layer, s, at, b + 1);
      ask_for(next.keys, stride, next.count, size);
    }
    for (int64_t i = 0; i < part.count; i += 16, n += 16) {
      const int64_t count = part.count - i;
      const bf16* keys = part.keys + i * stride;
      const __mmask16 seen = count >= 16 ? 0xffff : (1 << count) - 1;
#ifdef __AMX_BF16__
      const bool tiled = has_tiles && count >= 16;
      if (tiled) score_tile(panel, group, keys, stride, size, scores + n, room);
#else
      const bool tiled = false;
#endif
      for (int64_t g = 0; g < group; ++g) {
        float* to = scores + g * room + n;
        if (!tiled) _mm512_store_ps(to, score(queries + g * size, keys, stride, count, size));
        const __m512 found =
            _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, _mm512_load_ps(to));
        top[g] = _mm512_max_ps(top[g], found);
        _mm512_store_ps(to, found);
      }
    }
  }
  // A padded request has no block: its output is zero.
  if (n == 0) return void(std::memset(out, 0, group * size * sizeof(bf16)));
  float shares[MOST_GROUP];
  for (int64_t g = 0; g < group; ++g)
    shares[g] = 1.0f / weigh(scores + g * room, n, m.scale * TO_POWERS, top[g]);
  for (int64_t g = 0; g < group; g += HEADS_AT_ONCE) {
    const int64_t heads = std::min<int64_t>(HEADS_AT_ONCE, group - g);
    const auto kernel = heads == 1   ? means<1>
                        : heads == 2 ? means<2>
                        : heads == 3 ? means<3>
                                     : means<4>;
    kernel(m, layer, s, at, scores + g * room, room, shares + g, out + g * size);
  }
}

}  // namespace
