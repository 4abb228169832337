// Decode steps and matrix products of the CPU back end in bfloat16, for AVX-512 with BF16, and for
// AMX where it is there. Knows no tensors: pointers come from hpu/native/library.py.
//
// What torch does in some six hundred operators a step is one call here, in one parallel region.
// What lies in memory between two operations is bfloat16, as on the torch path; sums are float32.
// Weights lie in panels of 16 outputs, two inputs side by side, as dot products and tiles read them.

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
constexpr int PANEL = 16;
constexpr int TILE_INPUTS = 32;
constexpr int MOST_HEAD = 256;   // numbers of a head
constexpr int MOST_GROUP = 16;   // query heads that share a key head
constexpr int64_t CHUNK = 1 << 20;  // bytes of weights that stay in the second cache

inline __m512 load(const bf16* from) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}

inline void store(bf16* to, __m512 value) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value));
}

// ROWS rows times PANELS panels of 16 outputs.
template <int ROWS, int PANELS>
inline void tile(const bf16* x, int64_t stride, const bf16* weight, int64_t pairs, __m512* sums) {
  __m512 acc[ROWS][PANELS];
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) acc[r][p] = _mm512_setzero_ps();
  const int64_t panel = pairs * 2 * PANEL;
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh w[PANELS];
    for (int p = 0; p < PANELS; ++p)
      w[p] = (__m512bh)_mm512_loadu_si512(weight + p * panel + k * 2 * PANEL);
    for (int r = 0; r < ROWS; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * stride + 2 * k, 4);
      __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int p = 0; p < PANELS; ++p) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], w[p], both);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) sums[r * PANELS + p] = acc[r][p];
}

template <int PANELS>
void tile_rows(int rows, const bf16* x, int64_t stride, const bf16* w, int64_t pairs, __m512* s) {
  switch (rows) {
    case 1: return tile<1, PANELS>(x, stride, w, pairs, s);
    case 2: return tile<2, PANELS>(x, stride, w, pairs, s);
    case 3: return tile<3, PANELS>(x, stride, w, pairs, s);
    case 4: return tile<4, PANELS>(x, stride, w, pairs, s);
    case 5: return tile<5, PANELS>(x, stride, w, pairs, s);
    default: return tile<6, PANELS>(x, stride, w, pairs, s);
  }
}

struct Product {
  const bf16* weight;
  const bf16* bias;
  int64_t outputs, inputs;
};

// Where the sums of `width` panels of a row block go: rounded to `out`, or added to `total`.
inline void finish(const Product& by, const float* sums, int64_t row_stride, int64_t panel_stride,
                   int64_t row, int64_t rows, int64_t panel, int width, bf16* out, bf16* total,
                   float alpha) {
  if (width == 2 && !by.bias && !total) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = sums + r * row_stride;
      const __m512bh both =
          _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + panel_stride), _mm512_loadu_ps(from));
      _mm512_storeu_si512(out + (row + r) * by.outputs + panel * PANEL, (__m512i)both);
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int q = 0; q < width; ++q) {
      __m512 sum = _mm512_loadu_ps(sums + r * row_stride + q * panel_stride);
      const int64_t at = (panel + q) * PANEL;
      if (by.bias) sum = _mm512_add_ps(sum, load(by.bias + at));
      bf16* place = (total ? total : out) + (row + r) * by.outputs + at;
      if (total) sum = _mm512_fmadd_ps(_mm512_set1_ps(alpha), sum, load(place));
      store(place, sum);
    }
}

#ifdef __AMX_BF16__
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Sums in tiles 0 to 3, rows of x in 4 and 5, weights in 6 and 7.
void configure(int first, int second) {
  TileConfig config;
  const int rows[8] = {first, first, second, second, first, second, 16, 16};
  for (int t = 0; t < 8; ++t) config.bytes[t] = 64, config.rows[t] = rows[t];
  _tile_loadconfig(&config);
}

// Up to 32 rows times `wide` panels: 4 panels for up to 16 rows, else 2 or 1.
void multiply_block(const Product& by, const bf16* x, int64_t row, int64_t count, int64_t p,
                    int wide, bf16* out, bf16* total, float alpha) {
  const int64_t steps = by.inputs / TILE_INPUTS, panel = by.inputs * PANEL;
  const int64_t stride = by.inputs * sizeof(bf16);
  const bf16 *a = x + row * by.inputs, *a1 = a + 16 * by.inputs, *w = by.weight + p * panel;
  alignas(64) float sums[32 * 32];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (wide == 4) {
    for (int64_t k = 0; k < steps; ++k) {
      const bf16* at = w + k * 512;
      _tile_loadd(4, a + k * 32, stride);
      _tile_loadd(6, at, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, at + panel, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, at + 2 * panel, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, at + 3 * panel, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
    return finish(by, sums, 16, 256, row, count, p, 4, out, total, alpha);
  }
  for (int64_t k = 0; k < steps; ++k) {
    const bf16* at = w + k * 512;
    _tile_loadd(4, a + k * 32, stride);
    _tile_loadd(6, at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (wide == 2) {
      _tile_loadd(7, at + panel, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (count > 16) {
      _tile_loadd(5, a1 + k * 32, stride);
      _tile_dpbf16ps(2, 5, 6);
      if (wide == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (count > 16) {
    _tile_stored(2, sums + 512, 128);
    _tile_stored(3, sums + 528, 128);
  }
  finish(by, sums, 32, 16, row, count, p, wide, out, total, alpha);
}

void multiply_tiles(const Product& by, const bf16* x, int64_t rows, bf16* out, bf16* total,
                    float alpha, int64_t first, int64_t last) {
  // So many panels stay in the second cache while the rows pass by.
  const int64_t most = std::max<int64_t>(4, CHUNK / (by.inputs * PANEL * sizeof(bf16)) / 4 * 4);
  int shape = 0;
  for (int64_t begin = first; begin < last; begin += most) {
    const int64_t end = std::min(last, begin + most);
    for (int64_t row = 0; row < rows; row += 32) {
      const int count = std::min<int64_t>(rows - row, 32);
      const int r0 = std::min(count, 16), r1 = count > 16 ? count - 16 : r0;
      if (shape != r0 * 32 + r1) configure(r0, r1), shape = r0 * 32 + r1;
      for (int64_t p = begin; p < end;) {
        const int wide = count <= 16 && end - p >= 4 ? 4 : end - p >= 2 ? 2 : 1;
        multiply_block(by, x, row, count, p, wide, out, total, alpha);
        p += wide;
      }
    }
  }
  _tile_release();
}
#endif

bool has_tiles = false;

// This thread's share of out = x W^T + bias, (rows, outputs); with `total`, total += alpha * that.
void multiply(const Product& by, const bf16* x, int64_t rows, bf16* out, bf16* total, float alpha) {
  const int64_t pairs = by.inputs / 2, panels = by.outputs / PANEL;
  const int64_t threads = omp_get_num_threads(), mine = omp_get_thread_num();
  const int64_t first = panels * mine / threads, last = panels * (mine + 1) / threads;
#ifdef __AMX_BF16__
  if (has_tiles && by.inputs % TILE_INPUTS == 0)
    return multiply_tiles(by, x, rows, out, total, alpha, first, last);
#endif
  const int64_t tiles = (rows + 5) / 6;
  for (int64_t p = first; p < last;) {
    const int width = last - p >= 4 ? 4 : last - p >= 2 ? 2 : 1;
    const bf16* w = by.weight + p * pairs * 2 * PANEL;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin;
      alignas(64) float sums[24 * 16];
      const bf16* from = x + begin * by.inputs;
      if (width == 4) tile_rows<4>(count, from, by.inputs, w, pairs, (__m512*)sums);
      else if (width == 2) tile_rows<2>(count, from, by.inputs, w, pairs, (__m512*)sums);
      else tile_rows<1>(count, from, by.inputs, w, pairs, (__m512*)sums);
      finish(by, sums, width * 16, 16, begin, count, p, width, out, total, alpha);
    }
    p += width;
  }
}

void rms_norm(const bf16* x, const bf16* weight, bf16* out, int64_t size, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) {
    __m512 v = load(x + i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale =
      _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(size) + eps));
  for (int64_t i = 0; i < size; i += 16)
  {
    const __m512 scaled = _mm512_mul_ps(load(x + i), scale);
    store(out + i, weight ? _mm512_mul_ps(scaled, load(weight + i)) : scaled);
  }
}

inline __m512 exponential(__m512 x) {
  // 2^(x / ln 2): a polynomial of the fraction, to some 2 ulp of float32; the order of max keeps NaN.
  const __m512 t = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-87.0f), x), _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT);
  const __m512 f = _mm512_sub_ps(t, whole);
  __m512 p = _mm512_set1_ps(1.535336188e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.339887440e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.618437357e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550332548e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402264791e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931472028e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

}  // namespace

extern "C" {

struct Layer {
  Product qkv, out, gate_up, down;
  const bf16 *attention_norm, *mlp_norm;
  const bf16* head_norm;  // (heads + kv_heads, head_dim), or none
  bf16 *keys, *values;    // (blocks * block_size, kv_heads, head_dim)
  int64_t window;         // tokens that a query sees, itself included; 0: all
};

struct Model {
  const Layer* layers;
  const bf16* norm;
  int64_t num_layers, hidden, inner, heads, kv_heads, head_dim, rotated, block_size;
  float eps, scale, multiplier;
};

// As hpu/layers/context.py has it; rotation (rows, 2 * rotated) is cos, then sin with its first
// half negated; total (rows, hidden) the embedded tokens, which become the residual stream.
struct Step {
  int64_t rows, blocks;
  const int64_t *positions, *slots, *block_list, *groups, *starts, *usage;
  const bf16* rotation;
  bf16 *total, *hidden;
};

}  // extern "C"

namespace {

// A row's blocks in the list.
struct Span {
  int64_t begin = 0, end = 0;
};

// Where in a block the row begins to see.
inline int64_t hidden_slots(const Layer& layer, const Step& s, int64_t row, int64_t block) {
  if (!layer.window) return 0;
  const int64_t first = s.positions[row] - layer.window + 1 - s.starts[block];
  return std::clamp<int64_t>(first, 0, s.usage[block]);
}

// The query heads of one row that share the key head `kv`, over the row's blocks.
void attend(const Model& m, const Layer& layer, const Step& s, int64_t row, Span span, int64_t kv,
            const bf16* queries, bf16* out) {
  const int64_t size = m.head_dim, group = m.heads / m.kv_heads, stride = m.kv_heads * size;
  const int64_t room = (span.end - span.begin) * m.block_size + 16;
  thread_local std::vector<float> kept;
  if (int64_t(kept.size()) < room * group) kept.resize(room * group);
  float *scores = kept.data(), top[MOST_GROUP], sums[MOST_GROUP];
  std::fill(top, top + group, -INFINITY);
  int64_t n = 0;
  for (int64_t b = span.begin; b < span.end; ++b) {
    const bf16* keys = layer.keys + s.block_list[b] * m.block_size * stride + kv * size;
    for (int64_t i = hidden_slots(layer, s, row, b); i < s.usage[b]; ++i, ++n)
      for (int64_t g = 0; g < group; ++g) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t d = 0; d < size; d += 32)
          sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(keys + i * stride + d),
                                 (__m512bh)_mm512_loadu_si512(queries + g * size + d));
        const float score = _mm512_reduce_add_ps(sum) * m.scale;
        scores[g * room + n] = score;
        top[g] = std::max(top[g], score);
      }
  }
  for (int64_t g = 0; g < group; ++g) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
      const __mmask16 mask = n - i >= 16 ? 0xffff : (1 << (n - i)) - 1;
      const __m512 score = _mm512_maskz_loadu_ps(mask, scores + g * room + i);
      const __m512 weight = exponential(_mm512_sub_ps(score, _mm512_set1_ps(top[g])));
      _mm512_mask_storeu_ps(scores + g * room + i, mask, weight);
      sum = _mm512_mask_add_ps(sum, mask, sum, weight);
    }
    sums[g] = _mm512_reduce_add_ps(sum);
  }
  alignas(64) float means[MOST_GROUP * MOST_HEAD];
  std::fill(means, means + group * size, 0.0f);
  n = 0;
  for (int64_t b = span.begin; b < span.end; ++b) {
    const bf16* values = layer.values + s.block_list[b] * m.block_size * stride + kv * size;
    const int64_t first = hidden_slots(layer, s, row, b), count = s.usage[b] - first;
    for (int64_t g = 0; g < group; ++g)
      for (int64_t d = 0; d < size; d += 16) {
        __m512 mean = _mm512_load_ps(means + g * size + d);
        for (int64_t i = 0; i < count; ++i)
          mean = _mm512_fmadd_ps(_mm512_set1_ps(scores[g * room + n + i]),
                                 load(values + (first + i) * stride + d), mean);
        _mm512_store_ps(means + g * size + d, mean);
      }
    n += count;
  }
  // A padded row holds no block: it gets zeros.
  for (int64_t g = 0; g < group; ++g) {
    const __m512 share = _mm512_set1_ps(n ? 1.0f / sums[g] : 0.0f);
    for (int64_t d = 0; d < size; d += 16)
      store(out + g * size + d, _mm512_mul_ps(_mm512_load_ps(means + g * size + d), share));
  }
}

// Norms one head and turns it to its position.
void turn(const Model& m, const Layer& layer, const Step& s, int64_t row, int64_t head, bf16* x) {
  if (layer.head_norm) {
    alignas(64) bf16 normed[MOST_HEAD];
    rms_norm(x, nullptr, normed, m.head_dim, m.eps);
    for (int64_t d = 0; d < m.head_dim; d += 16) {
      const __m512 weight = load(layer.head_norm + head * m.head_dim + d);
      store(x + d, _mm512_mul_ps(load(normed + d), weight));
    }
  }
  const bf16 *cos = s.rotation + row * 2 * m.rotated, *sin = cos + m.rotated;
  const int64_t half = m.rotated / 2;
  alignas(64) bf16 turned[MOST_HEAD];
  for (int64_t d = 0; d < m.rotated; d += 16) {
    const __m512 crossed = _mm512_mul_ps(load(x + (d < half ? d + half : d - half)), load(sin + d));
    store(turned + d, _mm512_fmadd_ps(load(x + d), load(cos + d), crossed));
  }
  std::memcpy(x, turned, m.rotated * sizeof(bf16));
}

// One key head of one row: turns it and the queries that share it, and files key and value.
void file_group(const Model& m, const Layer& layer, const Step& s, int64_t row, int64_t kv,
                bf16* heads) {
  const int64_t size = m.head_dim, group = m.heads / m.kv_heads;
  bf16 *queries = heads + kv * group * size, *key = heads + (m.heads + kv) * size;
  for (int64_t g = 0; g < group; ++g) turn(m, layer, s, row, kv * group + g, queries + g * size);
  turn(m, layer, s, row, m.heads + kv, key);
  const int64_t place = (s.slots[row] * m.kv_heads + kv) * size;
  std::memcpy(layer.keys + place, key, size * sizeof(bf16));
  std::memcpy(layer.values + place, key + m.kv_heads * size, size * sizeof(bf16));
}

// silu(gate) * up, 16 at a time.
inline void gate(const bf16* gates, const bf16* ups, bf16* out) {
  const __m512 x = load(gates);
  const __m512 grown = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
  const __m512 opened = _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1), grown));
  store(out, _mm512_mul_ps(opened, load(ups)));
}

// Scratch of one call, kept for the next one of this thread.
bf16* scratch(std::vector<bf16>& kept, int64_t size) {
  if (int64_t(kept.size()) < size) kept.resize(size);
  return kept.data();
}

// What follows is called by all threads of a region.

void norm_rows(const Model& m, const Step& s, const bf16* weight) {
#pragma omp for
  for (int64_t r = 0; r < s.rows; ++r)
    rms_norm(s.total + r * m.hidden, weight, s.hidden + r * m.hidden, m.hidden, m.eps);
}

void project(const Model& m, const Layer& layer, const Step& s, bf16* heads) {
  norm_rows(m, s, layer.attention_norm);
  multiply(layer.qkv, s.hidden, s.rows, heads, nullptr, 0);
#pragma omp barrier
}

// The output of the attention, and then that of the MLP, added to the residual stream.
void add(const Model& m, const Layer& layer, const Step& s, const bf16* attended, bf16* wide,
         bf16* inside) {
  multiply(layer.out, attended, s.rows, nullptr, s.total, m.multiplier);
#pragma omp barrier
  norm_rows(m, s, layer.mlp_norm);
  multiply(layer.gate_up, s.hidden, s.rows, wide, nullptr, 0);
#pragma omp barrier
#pragma omp for
  for (int64_t i = 0; i < s.rows * m.inner; i += 16) {
    const bf16* gates = wide + i / m.inner * 2 * m.inner + i % m.inner;
    gate(gates, gates + m.inner, inside + i);
  }
  multiply(layer.down, inside, s.rows, nullptr, s.total, m.multiplier);
#pragma omp barrier
}

std::vector<Span> spans_of(const Step& s) {
  std::vector<Span> spans(s.rows);
  for (int64_t b = 0; b < s.blocks; ++b) {
    if (s.groups[b] < 0) continue;
    Span& span = spans[s.groups[b]];
    if (span.end == 0) span.begin = b;
    span.end = b + 1;
  }
  return spans;
}

}  // namespace

extern "C" {

// Whether products run in tiles from now on: if they are wanted, and this machine has them, which
// the operating system is asked to let this process use.
int64_t use_tiles(int64_t wanted) {
  has_tiles = false;
#ifdef __AMX_BF16__
  has_tiles = wanted && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#endif
  return has_tiles;
}

// (outputs, inputs) to panels; outputs a multiple of 16, inputs even.
void pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* packed, int64_t threads) {
  const int64_t pairs = inputs / 2;
#pragma omp parallel for num_threads(threads)
  for (int64_t p = 0; p < outputs / PANEL; ++p)
    for (int64_t k = 0; k < pairs; ++k)
      for (int64_t n = 0; n < PANEL; ++n)
        std::memcpy(packed + ((p * pairs + k) * PANEL + n) * 2,
                    weight + (p * PANEL + n) * inputs + 2 * k, 2 * sizeof(bf16));
}

// (rows, inputs) to (rows, outputs).
void multiply_all(const Product* by, const bf16* x, int64_t rows, bf16* out, int64_t threads) {
#pragma omp parallel num_threads(threads)
  multiply(*by, x, rows, out, nullptr, 0);
}

// One token a row through all layers and the last norm, into step->hidden.
void decode(const Model* model, const Step* step, int64_t threads) {
  const Model& m = *model;
  const Step& s = *step;
  const int64_t query = m.heads * m.head_dim, heads = query + 2 * m.kv_heads * m.head_dim;
  const int64_t group = m.heads / m.kv_heads * m.head_dim;
  const std::vector<Span> spans = spans_of(s);
  static thread_local std::vector<bf16> first, second;
  bf16* wide = scratch(first, s.rows * std::max(heads, 2 * m.inner));
  bf16* inside = scratch(second, s.rows * std::max(query, m.inner));
#pragma omp parallel num_threads(threads)
  {
    for (int64_t l = 0; l < m.num_layers; ++l) {
      const Layer& layer = m.layers[l];
      project(m, layer, s, wide);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < s.rows * m.kv_heads; ++i) {
        const int64_t row = i / m.kv_heads, kv = i % m.kv_heads;
        bf16* mine = wide + row * heads;
        file_group(m, layer, s, row, kv, mine);
        attend(m, layer, s, row, spans[row], kv, mine + kv * group,
               inside + row * query + kv * group);
      }
      add(m, layer, s, inside, wide, inside);
    }
    norm_rows(m, s, m.norm);
  }
}

// The two halves of layer `l` around an attention that the caller computes: step->total to `heads`
// (rows, heads + 2 * kv_heads, head_dim), turned and filed; `attended` (rows, heads * head_dim)
// through the rest of the layer into step->total.
void before_attention(const Model* model, int64_t l, const Step* step, bf16* heads,
                      int64_t threads) {
  const Model& m = *model;
  const int64_t size = (m.heads + 2 * m.kv_heads) * m.head_dim;
#pragma omp parallel num_threads(threads)
  {
    project(m, m.layers[l], *step, heads);
#pragma omp for
    for (int64_t i = 0; i < step->rows * m.kv_heads; ++i)
      file_group(m, m.layers[l], *step, i / m.kv_heads, i % m.kv_heads,
                 heads + i / m.kv_heads * size);
  }
}

void after_attention(const Model* model, int64_t l, const Step* step, const bf16* attended,
                     int64_t threads) {
  const Model& m = *model;
  static thread_local std::vector<bf16> first, second;
  bf16* wide = scratch(first, step->rows * 2 * m.inner);
  bf16* inside = scratch(second, step->rows * m.inner);
#pragma omp parallel num_threads(threads)
  add(m, m.layers[l], *step, attended, wide, inside);
}

// The last norm of step->total, into step->hidden.
void finish_rows(const Model* model, const Step* step, int64_t threads) {
#pragma omp parallel num_threads(threads)
  norm_rows(*model, *step, model->norm);
}

}  // extern "C"
