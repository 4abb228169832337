// Decode steps and matrix products of the CPU back end in bfloat16, for AVX-512 with BF16, and for
// AMX where it is there. Knows no tensors: pointers come from hpu/native/library.py.
//
// What torch does in some six hundred operators a step is one call here, in one parallel region.
// What lies in memory between two operations is bfloat16, as on the torch path; sums are float32.

#include "products.h"

namespace {

constexpr int MOST_HEAD = 256;   // numbers of a head
constexpr int MOST_GROUP = 16;   // query heads that share a key head

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
