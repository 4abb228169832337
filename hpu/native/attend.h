// Attention of one token over the cached blocks of its sequence, as they lie. Knows no layers beyond
// their caches. Part of decode.cpp.

#pragma once

#include "model.h"

namespace {

constexpr int HEADS_AT_ONCE = 4;

// A row's blocks in the list.
struct Span {
  int64_t begin = 0, end = 0;
};

// One row, and the key head that some of its query heads share.
struct Place {
  int64_t row, kv;
  Span span;
};

// What a row sees of a block: `count` slots from the first of `keys` and `values` on.
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

// Scores of part after part lie behind each other, each part's from a multiple of 16 on.
inline int64_t rounded_up(int64_t count) {
  return (count + 15) / 16 * 16;
}

// WORDS times 32 numbers of one query by those of up to 16 keys.
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

// Means of WORDS times 32 numbers of the values from `d` on, for HEADS heads: `powers` (heads, room)
// in bfloat16, and by head what they are multiplied by.
template <int HEADS, int WORDS>
void mean(const Model& m, const Layer& layer, const Step& s, const Place& at, int64_t d,
          const bf16* powers, int64_t room, const float* shares, bf16* out) {
  const int64_t stride = m.kv_heads * m.head_dim;
  __m512 sums[HEADS][2 * WORDS];
  for (int g = 0; g < HEADS; ++g)
    for (int w = 0; w < 2 * WORDS; ++w) sums[g][w] = _mm512_setzero_ps();
  int64_t n = 0;
  for (int64_t b = at.span.begin; b < at.span.end; ++b) {
    const Part part = part_of(m, layer, s, at, b);
    for (int64_t i = 0; i < part.count; i += 2) {
      // The last of an odd count stands beside itself, with a power of zero.
      const bf16* even = part.values + i * stride + d;
      const bf16* odd = i + 1 < part.count ? even + stride : even;
      for (int w = 0; w < WORDS; ++w) {
        const __m512i x = _mm512_loadu_si512(even + w * 32), y = _mm512_loadu_si512(odd + w * 32);
        const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(x, y);
        const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(x, y);
        for (int g = 0; g < HEADS; ++g) {
          int32_t pair;
          std::memcpy(&pair, powers + g * room + n + i, 4);
          const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
          sums[g][2 * w] = _mm512_dpbf16_ps(sums[g][2 * w], low, both);
          sums[g][2 * w + 1] = _mm512_dpbf16_ps(sums[g][2 * w + 1], high, both);
        }
      }
    }
    n += rounded_up(part.count);
  }
  // Of each eight numbers in memory the first four are in `low`, the others in `high`.
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
  for (int g = 0; g < HEADS; ++g)
    for (int w = 0; w < WORDS; ++w) {
      const __m512 low = sums[g][2 * w], high = sums[g][2 * w + 1], by = _mm512_set1_ps(shares[g]);
      bf16* to = out + g * m.head_dim + d + w * 32;
      store(to, _mm512_mul_ps(_mm512_permutex2var_ps(low, front, high), by));
      store(to + 16, _mm512_mul_ps(_mm512_permutex2var_ps(low, back, high), by));
    }
}

template <int HEADS>
void means(const Model& m, const Layer& layer, const Step& s, const Place& at, const bf16* powers,
           int64_t room, const float* shares, bf16* out) {
  int64_t d = 0;
  for (; d + 64 <= m.head_dim; d += 64)
    mean<HEADS, 2>(m, layer, s, at, d, powers, room, shares, out);
  if (d < m.head_dim) mean<HEADS, 1>(m, layer, s, at, d, powers, room, shares, out);
}

// One head's scores to powers of two in bfloat16; their sum.
float weigh(const float* scores, int64_t count, float scale, __m512 top, bf16* powers) {
  const __m512 by = _mm512_set1_ps(scale);
  const __m512 base = _mm512_set1_ps(_mm512_reduce_max_ps(top) * scale);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 found = power(_mm512_fmsub_ps(_mm512_load_ps(scores + i), by, base));
    sum = _mm512_add_ps(sum, found);
    store(powers + i, found);
  }
  return _mm512_reduce_add_ps(sum);
}

// Asks for what will be read soon: a block lies anywhere, and each slot of it holds other heads too.
inline void ask_for(const bf16* from, int64_t stride, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < size; d += 32)
      _mm_prefetch((const char*)(from + i * stride + d), _MM_HINT_T0);
}

// The query heads that share the place's key head, over the row's blocks.
void attend(const Model& m, const Layer& layer, const Step& s, const Place& at, const bf16* queries,
            bf16* out) {
  const int64_t size = m.head_dim, group = m.heads / m.kv_heads, stride = m.kv_heads * size;
  const int64_t room = (at.span.end - at.span.begin) * rounded_up(m.block_size);
  thread_local Scratch kept, narrow;
  float* scores = kept.room<float>(room * group);
  bf16* powers = narrow.room<bf16>(room * group);
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
    for (int64_t i = 0; i < part.count; i += 16, n += 16)
      for (int64_t g = 0; g < group; ++g) {
        const int64_t count = part.count - i;
        const __mmask16 seen = count >= 16 ? 0xffff : (1 << count) - 1;
        const __m512 found = _mm512_mask_mov_ps(
            _mm512_set1_ps(-INFINITY), seen,
            score(queries + g * size, part.keys + i * stride, stride, count, size));
        top[g] = _mm512_max_ps(top[g], found);
        _mm512_store_ps(scores + g * room + n, found);
      }
  }
  // A padded row holds no block: it gets zeros.
  if (n == 0) return void(std::memset(out, 0, group * size * sizeof(bf16)));
  float shares[MOST_GROUP];
  for (int64_t g = 0; g < group; ++g)
    shares[g] =
        1.0f / weigh(scores + g * room, n, m.scale * TO_POWERS, top[g], powers + g * room);
  for (int64_t g = 0; g < group; g += HEADS_AT_ONCE) {
    const int64_t heads = std::min<int64_t>(HEADS_AT_ONCE, group - g);
    const auto kernel = heads == 1   ? means<1>
                        : heads == 2 ? means<2>
                        : heads == 3 ? means<3>
                                     : means<4>;
    kernel(m, layer, s, at, powers + g * room, room, shares + g, out + g * size);
  }
}

}  // namespace
