// Attention of vision towers: the patches of a part of an image attend to each other in both directions.
// Part of decode.cpp.

#pragma once

#include "prompt.h"

struct Patches {
  const bf16* qkv;         // (patches, 3, heads, size)
  const float *cos, *sin;  // (patches, size / 2): the first half of the angles; the second half is equal
  const int64_t* ends;     // (parts + 1): part i has the patches ends[i] to ends[i + 1] - 1
  int64_t parts, heads, size;
  float scale;
  bf16* out;  // (patches, heads, size)
};

namespace {

// Head sizes of existing models are multiples of 8; matmuls need multiples of 32. Padded with zeros.
inline int64_t padded(int64_t size) { return (size + 31) / 32 * 32; }

// A query (part 0) or key (1), rotated in float32.
inline void rotated(const Patches& of, int64_t patch, int64_t part, int64_t head, bf16* to) {
  const int64_t half = of.size / 2;
  const float *cos = of.cos + patch * half, *sin = of.sin + patch * half;
  alignas(64) float x[MOST_HEAD], turned[MOST_HEAD];
  widen(of.qkv + ((patch * 3 + part) * of.heads + head) * of.size, of.size, x);
  for (int64_t d = 0; d < half; ++d) turned[d] = x[d] * cos[d] - x[d + half] * sin[d];
  for (int64_t d = 0; d < half; ++d) turned[d + half] = x[d + half] * cos[d] + x[d] * sin[d];
  for (int64_t d = of.size; d < padded(of.size); ++d) turned[d] = 0;
  for (int64_t d = 0; d < of.size; d += 16) store(to + d, load(turned + d));
  for (int64_t d = (of.size + 15) / 16 * 16; d < padded(of.size); d += 16) store(to + d, zero());
}

// Packs the keys and values of a part for one head, padded with zeros.
void lay_out(const Patches& of, int64_t first, int64_t count, int64_t head, const Laid& laid) {
  const int64_t size = padded(of.size);
  alignas(64) bf16 room[2 * PACKED * MOST_HEAD];
  Sources<bf16> from;
  for (int64_t i = 0; i < PACKED; ++i)
    from.keys[i] = room + 2 * i * size, from.values[i] = from.keys[i] + size;
  for (int64_t begin = 0; begin < laid.span; begin += PACKED) {
    for (int64_t i = 0; i < PACKED; ++i) {
      bf16 *key = room + 2 * i * size, *value = key + size;
      if (begin + i >= count) {
        std::memset(key, 0, 2 * size * sizeof(bf16));
        continue;
      }
      const int64_t patch = first + begin + i;
      rotated(of, patch, 1, head, key);
      std::memcpy(value, of.qkv + ((patch * 3 + 2) * of.heads + head) * of.size,
                  of.size * sizeof(bf16));
      std::memset(value + of.size, 0, (size - of.size) * sizeof(bf16));
    }
    lay_out(size, from, begin, laid);
  }
}

// Attention of the patches `begin` to `end` of a part, for one head.
void attend_part(const Patches& of, int64_t part, int64_t head, int64_t begin, int64_t end,
                 const Laid& laid) {
  const int64_t first = of.ends[part], count = of.ends[part + 1] - first, size = padded(of.size);
  alignas(64) bf16 queries[QUERIES * MOST_HEAD];
  alignas(64) bf16 found[QUERIES * MOST_HEAD];
  thread_local Scratch kept;
  for (; begin < end; begin += QUERIES) {
    const int64_t rows = std::min<int64_t>(end - begin, QUERIES);
    for (int64_t r = 0; r < rows; ++r) rotated(of, first + begin + r, 0, head, queries + r * size);
    const Rows x = rows_of(queries, size, rows, size, kept);
    attend_keys(x, rows, size, laid, 0, count, {0, count, 0}, of.scale * TO_POWERS, found, size);
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(of.out + ((first + begin + r) * of.heads + head) * of.size, found + r * size,
                  of.size * sizeof(bf16));
  }
}

// Attention of all patches, on `threads` threads.
void attend_parts(const Patches& of, int64_t threads) {
  // Divide the queries of a part only if there are few parts: each share packs all keys of the part.
  const int64_t pairs = of.parts * of.heads, shares = (2 * threads + pairs - 1) / pairs;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t i = 0; i < pairs * shares; ++i) {
    const int64_t part = i / shares / of.heads, head = i / shares % of.heads, share = i % shares;
    const int64_t first = of.ends[part], count = of.ends[part + 1] - first;
    const int64_t blocks = (count + QUERIES - 1) / QUERIES;
    const int64_t begin = blocks * share / shares * QUERIES;
    const int64_t end = std::min(count, blocks * (share + 1) / shares * QUERIES);
    if (begin >= end) continue;
    thread_local Scratch own;
    const int64_t span = (count + PACKED - 1) / PACKED * PACKED;
    const Laid laid{span, own.room<bf16>(2 * span * padded(of.size))};
    lay_out(of, first, count, head, laid);
    attend_part(of, part, head, begin, end, laid);
  }
}

}  // namespace
