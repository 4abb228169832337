// Attention of prompts: new tokens over the cached tokens of their sequence and over each other, in
// blocks of keys with an online softmax (FlashAttention, arXiv 2205.14135). Part of decode.cpp.
//
// Keys and values, including those of new tokens, are read from the cache and packed once as panels of
// a matmul, so that scores and weighted sums use the same kernels as weights.

#pragma once

#include "cache.h"

namespace {

constexpr int QUERIES = 32;  // rows of a block of scores
constexpr int KEYS = 128;    // columns of a block of scores
constexpr int PART = 256;    // tokens that one thread packs for all threads

// Packed cache of a key head of a prompt: `span` keys in panels of 16 keys, then their values in panels
// of 16 elements.
struct Laid {
  int64_t span;
  bf16* keys;

  bf16* values(int64_t size) const { return keys + span * size; }
};

inline int64_t tokens_of(const Prompts& of, int64_t prompt) {
  return of.context_lens[prompt] + of.query_lens[prompt];
}

constexpr int PACKED = 32;  // keys and values packed at a time

// Addresses of PACKED keys and values.
template <typename Number>
struct Sources {
  const Number *keys[PACKED], *values[PACKED];
};

// Finds and prefetches keys and values of a prompt's tokens from `begin` on; zeros after the last token.
template <typename Format>
void find(const Model& m, const Layer& layer, const Step& s, const Prompts& of, int64_t prompt,
          int64_t kv, int64_t begin, Sources<uint8_t>& found) {
  alignas(64) static const uint8_t nothing[MOST_HEAD * 2 + 64] = {};
  const int64_t bytes = Format::row_bytes(m.head_dim);
  const int64_t cached = of.context_lens[prompt], count = tokens_of(of, prompt);
  const int64_t *blocks = s.block_list + prompt * of.context, *slots = s.slots + prompt * of.length;
  int64_t block = begin / m.block_size, inside = begin % m.block_size;
  for (int64_t i = 0, j = begin; i < PACKED; ++i, ++j) {
    found.keys[i] = found.values[i] = nothing;
    if (j >= count) continue;
    const int64_t slot = j < cached ? blocks[block] * m.block_size + inside : slots[j - cached];
    const int64_t at = (slot * m.kv_heads + kv) * bytes;
    found.keys[i] = layer.keys + at, found.values[i] = layer.values + at;
    for (int64_t d = 0; d < bytes; d += 64) {
      _mm_prefetch((const char*)(found.keys[i] + d), _MM_HINT_T0);
      _mm_prefetch((const char*)(found.values[i] + d), _MM_HINT_T0);
    }
    if (++inside == m.block_size) inside = 0, ++block;
  }
}

void lay_out(int64_t size, const Sources<bf16>& from, int64_t begin, const Laid& laid) {
  for (int64_t p = 0; p < PACKED; p += PANEL)
    store_transposed(laid.keys + (begin + p) * size, from.keys + p, size);
  bf16* to = laid.values(size) + begin * PANEL;
  for (int64_t d = 0; d < size; d += PANEL, to += laid.span * PANEL)
    for (int64_t i = 0; i < PACKED; i += 2)
      store_pairs(to + i * PANEL, from.values[i] + d, from.values[i + 1] + d);
}

// The keys and values in bfloat16: in place, or converted into `room`.
template <typename Format>
Sources<bf16> as_bfloat16(const Model& m, const Layer& layer, const Sources<uint8_t>& from,
                          bf16* room) {
  Sources<bf16> found;
  for (int64_t i = 0; i < PACKED; ++i) {
    if constexpr (Format::CONVERTS) {
      bf16 *key = room + 2 * i * MOST_HEAD, *value = key + MOST_HEAD;
      dequantize<Format>(from.keys[i], m.head_dim, layer.key_scale, key);
      dequantize<Format>(from.values[i], m.head_dim, layer.value_scale, value);
      found.keys[i] = key, found.values[i] = value;
    } else {
      found.keys[i] = (const bf16*)from.keys[i], found.values[i] = (const bf16*)from.values[i];
    }
  }
  return found;
}

// Packs the tokens `begin` to `end` of a prompt, for one key head.
template <typename Format>
void lay_out(const Model& m, const Layer& layer, const Step& s, const Prompts& of, int64_t prompt,
             int64_t kv, int64_t begin, int64_t end, const Laid& laid) {
  alignas(64) bf16 room[Format::CONVERTS ? 2 * PACKED * MOST_HEAD : 1];
  Sources<uint8_t> both[2];
  if (begin < end) find<Format>(m, layer, s, of, prompt, kv, begin, both[0]);
  for (int64_t turn = 0; begin < end; begin += PACKED, turn ^= 1) {
    if (begin + PACKED < end)
      find<Format>(m, layer, s, of, prompt, kv, begin + PACKED, both[turn ^ 1]);
    lay_out(m.head_dim, as_bfloat16<Format>(m, layer, both[turn], room), begin, laid);
  }
}

// Matmul of up to 32 rows with the panels of `columns` outputs (a multiple of 32), stored to or added to
// `out` with row stride `apart`. `panel`: distance between panels in elements.
void product(const Rows& x, int64_t rows, const bf16* w, int64_t panel, int64_t columns,
             int64_t inputs, float* out, int64_t apart, bool adds) {
#ifdef __AMX_BF16__
  for (int64_t c = 0; has_tiles && c < columns; c += 32, w += 2 * panel, out += 32) {
    const int64_t wide = apart * sizeof(float), long_ = x.stride * sizeof(bf16);
    float* below = out + 16 * apart;
    if (adds) {
      _tile_loadd(0, out, wide);
      _tile_loadd(1, out + 16, wide);
      if (rows > 16) _tile_loadd(2, below, wide);
      if (rows > 16) _tile_loadd(3, below + 16, wide);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < inputs; k += TILE_INPUTS) {
      _tile_loadd(4, x.x + k, long_);
      _tile_loadd(6, w + k * PANEL, 64);
      _tile_loadd(7, w + panel + k * PANEL, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_zero(4);
      if (rows > 16) {
        _tile_loadd(5, x.x + 16 * x.stride + k, long_);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        _tile_zero(5);
      }
      _tile_zero(6);
      _tile_zero(7);
    }
    _tile_stored(0, out, wide);
    _tile_stored(1, out + 16, wide);
    if (rows > 16) _tile_stored(2, below, wide);
    if (rows > 16) _tile_stored(3, below + 16, wide);
  }
  if (has_tiles) return;
#endif
  const int64_t tiles = (rows + 5) / 6;
  for (int64_t c = 0; c < columns;) {
    const int64_t wide = columns - c >= 64 ? 4 : 2;
    const auto kernel = kernel_of<false>(wide);
    const bf16* from = w + c / PANEL * panel;
    const Weights by{from, panel, wide / 2 * panel, from + wide * panel};
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin;
      float* to = out + begin * apart + c;
      kernel(count, {x.x + begin * x.stride, x.stride}, by, inputs / 2, to, apart, adds, {});
    }
    c += wide * PANEL;
  }
}

// State of the online softmax: the maximum score of each row, as an exponent of 2, and the sums of its
// powers by lane.
struct Softmax {
  alignas(64) float top[QUERIES];
  alignas(64) float sums[QUERIES * 16];
};

// Columns that each row attends to: from `begin` up to `end`, which both grow by `step` per row.
struct Seen {
  int64_t begin, end, step = 1;
};

inline Mask mask_of(int64_t i, const Seen& of, int64_t r) {
  const int64_t low = std::clamp<int64_t>(of.begin + r * of.step - i, 0, 16);
  const int64_t high = std::clamp<int64_t>(of.end + r * of.step - i, 0, 16);
  return between(low, high);
}

// Converts the scores of 16 rows from `first` on, `width` columns, to powers of two, the inputs of a
// matmul; masked scores become zero. `shares` receives the factor that rescales the earlier sums of each
// row. Returns whether any factor is not 1.
template <bool ALL>
inline bool weigh(const float* scores, const Seen& of, int64_t first, int64_t width, float scale,
                  Softmax& rows, Input* powers, float* shares) {
  Lanes tops[16];
  for (int64_t r = 0; r < 16; ++r) {
    const float* from = scores + (first + r) * KEYS;
    Lanes top = set1(-INFINITY);
    for (int64_t i = 0; i < width; i += 16) {
      const Lanes score = load(from + i);
      top = ALL ? max(top, score) : max_where(mask_of(i, of, first + r), top, score);
    }
    tops[r] = top;
  }
  const Lanes greatest = joined(tops, [](auto a, auto b) { return max(a, b); });
  const Lanes by = set1(scale), before = load(rows.top + first);
  const Lanes now = max(mul(greatest, by), before);
  // For a row without visible keys so far, all powers and sums are zero.
  const Mask some = differs(now, set1(-INFINITY));
  alignas(64) float bases[16];
  store(bases, keep(some, now));
  store(rows.top + first, now);
  const Mask moved = differs(before, now);
  const Lanes share = power(sub(before, load(bases)));
  store(shares, select(moved, share, set1(1)));
  for (int64_t r = 0; r < 16; ++r) {
    const float* from = scores + (first + r) * KEYS;
    const Lanes base = set1(bases[r]);
    float* sums = rows.sums + (first + r) * 16;
    Lanes sum = mul(load(sums), set1(shares[r]));
    for (int64_t i = 0; i < width; i += 16) {
      Lanes found = power(fmsub(load(from + i), by, base));
      if (!ALL) found = keep(mask_of(i, of, first + r), found);
      sum = add(sum, found);
      store(powers + (first + r) * KEYS + i, found);
    }
    store(sums, sum);
  }
  return any(moved);
}

// Attention of up to 32 queries of `size` elements (a multiple of 32) over the visible keys from `first`
// to `end`; writes the outputs to `to`, in rows of `apart` elements.
void attend_keys(const Rows& x, int64_t count, int64_t size, const Laid& laid, int64_t first,
                 int64_t end, const Seen& seen, float scale, bf16* to, int64_t apart) {
#ifdef __AMX_BF16__
  if (has_tiles) configure(std::min<int64_t>(count, 16), count > 16 ? count - 16 : count);
#endif
  const bf16 *keys = laid.keys, *values = laid.values(size);
  alignas(64) float scores[QUERIES * KEYS], means[QUERIES * MOST_HEAD];
  alignas(64) Input powers[QUERIES * KEYS];
  Softmax rows;
  std::fill(rows.top, rows.top + QUERIES, -INFINITY);
  std::fill(rows.sums, rows.sums + QUERIES * 16, 0.0f);
  for (int64_t k = first; k < end; k += KEYS) {
    const int64_t width = std::min<int64_t>(KEYS, (end - k + 31) / 32 * 32);
    product(x, count, keys + k * size, PANEL * size, width, size, scores, KEYS, false);
    const Seen here{seen.begin - k, seen.end - k, seen.step};
    const bool all = here.begin + (count - 1) * here.step <= 0 && here.end >= width;
    const auto kernel = all ? weigh<true> : weigh<false>;
    for (int64_t r = 0; r < count; r += 16) {
      alignas(64) float shares[16];
      if (!kernel(scores, here, r, width, scale, rows, powers, shares) || k == first) continue;
      for (int64_t i = 0; i < 16 * size; i += 16) {
        float* mean = means + r * size + i;
        store(mean, mul(load(mean), set1(shares[i / size])));
      }
    }
    // The tile-load intrinsic does not tell the compiler which memory it reads.
    asm volatile("" ::"r"(powers), "r"(means) : "memory");
    product({powers, KEYS}, count, values + k * PANEL, laid.span * PANEL, size, width, means, size,
            k > first);
  }
#ifdef __AMX_BF16__
  if (has_tiles) _tile_release();
#endif
  for (int64_t r = 0; r < count; ++r) {
    const Lanes share = set1(1.0f / reduce_add(load(rows.sums + r * 16)));
    for (int64_t d = 0; d < size; d += 16)
      store(to + r * apart + d, mul(load(means + r * size + d), share));
  }
}

// Attention of up to 32 new tokens of a prompt from `begin` on, for one query head, over all visible
// keys.
void attend_block(const Model& m, const Layer& layer, const Prompts& of, const Laid& laid,
                  int64_t prompt, int64_t head, int64_t begin, const bf16* heads, bf16* out) {
  const int64_t size = m.head_dim, all = (m.heads + 2 * m.kv_heads) * size, query = m.heads * size;
  const int64_t count = std::clamp<int64_t>(of.query_lens[prompt] - begin, 0, QUERIES);
  const int64_t padded = std::min<int64_t>(of.length - begin, QUERIES);
  bf16* to = out + (prompt * of.length + begin) * query + head * size;
  for (int64_t r = count; r < padded; ++r) std::memset(to + r * query, 0, size * sizeof(bf16));
  if (count == 0) return;
  thread_local Scratch kept;
  const Rows x = rows_of(heads + (prompt * of.length + begin) * all + head * size, all, count, size, kept);
  const int64_t own = of.context_lens[prompt] + begin;  // position of the first row
  const int64_t first = layer.window ? std::max<int64_t>(0, own - layer.window + 1) / 32 * 32 : 0;
  const Seen seen{layer.window ? own + 1 - layer.window : -QUERIES, own + 1};
  attend_keys(x, count, size, laid, first, own + count, seen, m.scale * TO_POWERS, to, query);
}

// Attention of all new tokens of all prompts: `heads` (tokens, heads + 2 * kv_heads, head_dim), rotated
// and written to the cache, to `out` (tokens, heads * head_dim). Called by all threads, which share
// `kept`.
template <typename Format>
void attend_prompts(const Model& m, const Layer& layer, const Step& s, const Prompts& of,
                    const bf16* heads, bf16* out, Scratch& kept) {
  const int64_t span = (of.context * m.block_size + of.length + 31) / 32 * 32;
  const int64_t each = 2 * span * m.head_dim, group = m.heads / m.kv_heads;
  const int64_t blocks = (of.length + QUERIES - 1) / QUERIES, parts = (span + PART - 1) / PART;
  if (of.batch * m.kv_heads >= 2 * omp_get_num_threads()) {
    // Enough work for a key head per thread; its panels then stay in the core's cache.
    thread_local Scratch own;
    const Laid laid{span, own.room<bf16>(each)};
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < of.batch * m.kv_heads; ++i) {
      const int64_t prompt = i / m.kv_heads, kv = i % m.kv_heads;
      lay_out<Format>(m, layer, s, of, prompt, kv, 0, tokens_of(of, prompt), laid);
      for (int64_t j = 0; j < group * blocks; ++j)
        attend_block(m, layer, of, laid, prompt, kv * group + j / blocks, j % blocks * QUERIES,
                     heads, out);
    }
    return wait_for_all();
  }
  if (omp_get_thread_num() == 0) kept.room<bf16>(each * of.batch * m.kv_heads);
  wait_for_all();
  bf16* all = kept.room<bf16>(each * of.batch * m.kv_heads);
#pragma omp for nowait
  for (int64_t i = 0; i < of.batch * m.kv_heads * parts; ++i) {
    const int64_t at = i / parts, prompt = at / m.kv_heads, begin = i % parts * PART;
    const int64_t end = std::min<int64_t>(begin + PART, tokens_of(of, prompt));
    lay_out<Format>(m, layer, s, of, prompt, at % m.kv_heads, begin, end, {span, all + at * each});
  }
  wait_for_all();
  // Longest first, for load balance: the last work items are short.
#pragma omp for schedule(dynamic) nowait
  for (int64_t i = 0; i < of.batch * m.heads * blocks; ++i) {
    const int64_t head = i % m.heads, prompt = i / m.heads % of.batch;
    const int64_t block = blocks - 1 - i / m.heads / of.batch;
    const Laid laid{span, all + (prompt * m.kv_heads + head / group) * each};
    attend_block(m, layer, of, laid, prompt, head, block * QUERIES, heads, out);
  }
  wait_for_all();
}

}  // namespace
