// Decodes, prefills and matmuls of the CPU back end in bfloat16, for the instruction sets of numbers.h,
// and for AMX where available. hpu/native/library.py passes the pointers.
//
// A step that takes about 600 torch operators is a single call here, in a single parallel region.
// Activations in memory are bfloat16, as on the torch path. Sums are float32, and so is the residual
// stream, to which each layer adds twice: rounding it to bfloat16 would lose more digits than all other
// roundings.

#include "attend.h"
#include "lora_tiles.h"
#include "patches.h"

namespace {

template <typename Number>
void rms_norm(const Number* x, const bf16* weight, bf16* out, int64_t size, float eps) {
  Lanes squares = zero();
  for (int64_t i = 0; i < size; i += 16) {
    const Lanes v = load(x + i);
    squares = fmadd(v, v, squares);
  }
  const Lanes factor = set1(1.0f / std::sqrt(reduce_add(squares) / float(size) + eps));
  for (int64_t i = 0; i < size; i += 16) {
    const Lanes scaled = mul(load(x + i), factor);
    store(out + i, weight ? mul(scaled, load(weight + i)) : scaled);
  }
}

// Normalizes one head and applies the rotary embedding.
void turn(const Model& m, const Layer& layer, const Step& s, int64_t row, int64_t head, bf16* x) {
  if (layer.head_norm) {
    alignas(64) bf16 normed[MOST_HEAD];
    rms_norm(x, nullptr, normed, m.head_dim, m.eps);
    for (int64_t d = 0; d < m.head_dim; d += 16) {
      const Lanes weight = load(layer.head_norm + head * m.head_dim + d);
      store(x + d, mul(load(normed + d), weight));
    }
  }
  const bf16 *cos = m.rotation + s.rotated_at[row] * 2 * m.rotated, *sin = cos + m.rotated;
  const int64_t half = m.rotated / 2;
  alignas(64) bf16 turned[MOST_HEAD];
  for (int64_t d = 0; d < m.rotated; d += 16) {
    const Lanes crossed = mul(load(x + (d < half ? d + half : d - half)), load(sin + d));
    store(turned + d, fmadd(load(x + d), load(cos + d), crossed));
  }
  std::memcpy(x, turned, m.rotated * sizeof(bf16));
}

// For a key head of a row: rotates the key and its query heads, and writes key and value to the cache.
template <typename Format>
void file_group(const Model& m, const Layer& layer, const Step& s, int64_t row, int64_t kv,
                bf16* heads) {
  const int64_t size = m.head_dim, group = m.heads / m.kv_heads;
  bf16 *queries = heads + kv * group * size, *key = heads + (m.heads + kv) * size;
  for (int64_t g = 0; g < group; ++g) turn(m, layer, s, row, kv * group + g, queries + g * size);
  turn(m, layer, s, row, m.heads + kv, key);
  const int64_t place = (s.slots[row] * m.kv_heads + kv) * Format::row_bytes(size);
  Format::write(layer.keys + place, key, size, layer.key_scale);
  Format::write(layer.values + place, key + m.kv_heads * size, size, layer.value_scale);
}

// All threads of a parallel region call the functions from `embed` to `add`.

// Writes the token embeddings, the start of the residual stream.
void embed(const Model& m, const Step& s) {
  if (s.embeddings) {
#pragma omp for nowait
    for (int64_t r = 0; r < s.rows; ++r)
      widen(s.embeddings + r * m.hidden, m.hidden, s.total + r * m.hidden);
    return wait_for_all();
  }
  const Lanes by = set1(m.embedding_multiplier);
  if (m.group) {
    float* own = slot_of(*m.group, m.group->rank);
#pragma omp for nowait
    for (int64_t r = 0; r < s.rows; ++r) {
      const int64_t token = s.tokens[r] - m.first_token;
      const bool is_own = token >= 0 && token < m.num_tokens;
      for (int64_t i = 0; i < m.hidden; i += 16)
        store(own + r * m.hidden + i,
              is_own ? mul(load(m.embedding + token * m.hidden + i), by) : zero());
    }
    wait_for_all();
    return sum_over_ranks(*m.group, s.rows * m.hidden,
                          [&](int64_t i, Lanes sum) { store(s.total + i, sum); });
  }
#pragma omp for nowait
  for (int64_t r = 0; r < s.rows; ++r) {
    const bf16* from = m.embedding + s.tokens[r] * m.hidden;
    for (int64_t i = 0; i < m.hidden; i += 16)
      store(s.total + r * m.hidden + i, mul(load(from + i), by));
  }
  wait_for_all();
}

void norm_rows(const Model& m, const Step& s, const bf16* weight) {
#pragma omp for nowait
  for (int64_t r = 0; r < s.rows; ++r)
    rms_norm(s.total + r * m.hidden, weight, s.hidden + r * m.hidden, m.hidden, m.eps);
  wait_for_all();
}

// x times the LoRA `a` matrices, if the launch has adapters and the matmul supports them; null
// otherwise. The results are read until the matmul's barrier.
const LowSums* adapted(const Step& s, const LowRank* by, const bf16* x, int64_t inputs, LowSums& low) {
  if (!s.adapters || !by) return nullptr;
  low = low_sums(*by, *s.adapters, x, inputs, s.low);
  return &low;
}

void project(const Model& m, const Layer& layer, const Step& s, bf16* heads) {
  norm_rows(m, s, layer.attention_norm);
  LowSums low;
  End end{heads};
  end.low = adapted(s, layer.low_qkv, s.hidden, m.hidden, low);
  multiply(layer.qkv, s.hidden, s.rows, end);
  expect(layer.out, false);
  wait_for_all();
}

void add_sums_of_ranks(const Model& m, const Step& s) {
  const Lanes alpha = set1(m.multiplier);
  sum_over_ranks(*m.group, s.rows * m.hidden, [&](int64_t i, Lanes sum) {
    store(s.total + i, fmadd(alpha, sum, load(s.total + i)));
  });
}

// Multiplies `x` by a weight and adds the sums to the residual stream. `next`: the following matmul, if
// any.
void add_product(const Model& m, const Step& s, const Product& by, const bf16* x,
                 const Product* next, bool gated, const LowRank* low_rank) {
  End end{nullptr, s.total, m.multiplier};
  if (m.group) end = {nullptr, nullptr, 0, false, nullptr, slot_of(*m.group, m.group->rank)};
  LowSums low;
  end.low = adapted(s, low_rank, x, by.width, low);
  multiply(by, x, s.rows, end);
  if (next) expect(*next, gated);
  wait_for_all();
  if (m.group) add_sums_of_ranks(m, s);
}

// Output projection of attention, MLP norm, and MLP or mixture of experts; adds both outputs to the
// residual stream. `inside`: buffer for the activations of the MLP.
void add(const Model& m, const Layer& layer, const Step& s, const bf16* attended, bf16* inside,
         Groups& g) {
  add_product(m, s, layer.out, attended, layer.mixture ? nullptr : &layer.gate_up, true,
              layer.low_out);
  norm_rows(m, s, layer.mlp_norm);
  if (layer.mixture) {
    mix_routed(*layer.mixture, s.hidden, s.rows, g, inside);
    if (m.group) {
      float* own = slot_of(*m.group, m.group->rank);
#pragma omp for nowait
      for (int64_t i = 0; i < s.rows * m.hidden; i += 16) store(own + i, load(g.sums + i));
      wait_for_all();
      return add_sums_of_ranks(m, s);
    }
    const Lanes alpha = set1(m.multiplier);
#pragma omp for nowait
    for (int64_t i = 0; i < s.rows * m.hidden; i += 16)
      store(s.total + i, fmadd(alpha, load(g.sums + i), load(s.total + i)));
    return wait_for_all();
  }
  LowSums low;
  End end{inside, nullptr, 0, true};
  end.low = adapted(s, layer.low_gate_up, s.hidden, m.hidden, low);
  multiply(layer.gate_up, s.hidden, s.rows, end);
  expect(layer.down, false);
  wait_for_all();
  const bool is_last = &layer + 1 == m.layers + m.num_layers;
  add_product(m, s, layer.down, inside, is_last ? nullptr : &(&layer + 1)->qkv, false,
              layer.low_down);
}

// Allocates the low-rank sums of a launch with adapters.
Input* room_for_low(const Step& s, Scratch& kept) {
  return s.adapters ? kept.room<Input>(s.rows * LOW_OUTPUTS * s.adapters->max_rank) : nullptr;
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

// Whether a row reads what another row writes: the rows of a request are adjacent, and the block that a
// row writes to is among the last two blocks of the next row.
bool are_chained(const Model& m, const Step& s, const std::vector<Span>& spans) {
  for (int64_t r = 1; r < s.rows; ++r) {
    const int64_t written = s.slots[r - 1] / m.block_size;
    for (int64_t b = std::max(spans[r].begin, spans[r].end - 2); b < spans[r].end; ++b)
      if (s.block_list[b] == written) return true;
  }
  return false;
}

// Decode: a token per row through all layers and the last norm, into step->hidden.
template <typename Format>
void decode_in(const Model& m, Step s, int64_t threads) {
  const int64_t query = m.heads * m.head_dim, heads = query + 2 * m.kv_heads * m.head_dim;
  const int64_t group = m.heads / m.kv_heads * m.head_dim;
  const std::vector<Span> spans = spans_of(s);
  // With enough rows, a thread processes all key heads of a row: they are adjacent in memory.
  const int64_t at_once = s.rows >= 4 * threads ? m.kv_heads : 1;
  const bool chained = are_chained(m, s, spans);
  static thread_local Scratch first, second, stream, low;
  static thread_local Groups groups;
  Groups& g = groups;
  s.low = room_for_low(s, low);
  s.total = stream.room<float>(s.rows * m.hidden);
  bf16* wide = first.room<bf16>(s.rows * heads);
  bf16* inside = second.room<bf16>(s.rows * std::max(query, m.inner));
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    own_barrier = &barrier;
    embed(m, s);
    for (int64_t l = 0; l < m.num_layers; ++l) {
      const Layer& layer = m.layers[l];
      project(m, layer, s, wide);
      if (chained) {
#pragma omp for nowait
        for (int64_t i = 0; i < s.rows * m.kv_heads; ++i)
          file_group<Format>(m, layer, s, i / m.kv_heads, i % m.kv_heads,
                             wide + i / m.kv_heads * heads);
        wait_for_all();
      }
      begin_scores();
      std::vector<Tile> tiles;
#pragma omp for schedule(dynamic, at_once) nowait
      for (int64_t i = 0; i < s.rows * m.kv_heads; ++i) {
        const int64_t row = i / m.kv_heads, kv = i % m.kv_heads;
        bf16* mine = wide + row * heads;
        find_tiles<Format>(m, layer, s, {row, kv, spans[row]}, tiles);
        if (!chained) file_group<Format>(m, layer, s, row, kv, mine);
        attend<Format>(m, layer, tiles, mine + kv * group, inside + row * query + kv * group);
      }
      end_scores();
      wait_for_all();
      add(m, layer, s, inside, inside, g);
    }
    norm_rows(m, s, m.norm);
  }
}

// Prefill: the tokens of the prompts, a token per row, through all layers and the last norm, into
// step->hidden.
template <typename Format>
void prompt_in(const Model& m, Step s, const Prompts& prompts, int64_t threads) {
  const int64_t query = m.heads * m.head_dim, heads = query + 2 * m.kv_heads * m.head_dim;
  static thread_local Scratch first, second, third, stream, low;
  static thread_local Groups groups;
  Groups& g = groups;
  s.low = room_for_low(s, low);
  s.total = stream.room<float>(s.rows * m.hidden);
  bf16* wide = first.room<bf16>(s.rows * heads);
  bf16* inside = second.room<bf16>(s.rows * std::max(query, m.inner));
  Scratch& laid = third;
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    own_barrier = &barrier;
    embed(m, s);
    for (int64_t l = 0; l < m.num_layers; ++l) {
      const Layer& layer = m.layers[l];
      project(m, layer, s, wide);
#pragma omp for nowait
      for (int64_t i = 0; i < s.rows * m.kv_heads; ++i)
        file_group<Format>(m, layer, s, i / m.kv_heads, i % m.kv_heads, wide + i / m.kv_heads * heads);
      wait_for_all();
      attend_prompts<Format>(m, layer, s, prompts, wide, inside, laid);
      add(m, layer, s, inside, inside, g);
    }
    norm_rows(m, s, m.norm);
  }
}

}  // namespace

extern "C" {

// The name of the instruction set that this file is compiled for.
const char* instruction_set() { return LEVEL; }

// Enables AMX tiles if requested and available (asks the operating system for permission). Returns
// whether tiles are used.
int64_t use_tiles(int64_t wanted) {
  has_tiles = false;
#ifdef __AMX_BF16__
  has_tiles = wanted && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#endif
  return has_tiles;
}

// Enables rounding of inputs to 8 bits in matmuls with quantized weights, if requested and compiled in.
// Returns whether inputs are rounded.
int64_t round_inputs(int64_t wanted) {
  rounds_inputs = false;
#ifdef HAS_BYTE_PRODUCTS
  rounds_inputs = wanted;
#endif
  return rounds_inputs;
}

// Packs (outputs, inputs) into panels; outputs is a multiple of 16, inputs is even.
void pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* packed, int64_t threads) {
  const int64_t pairs = inputs / 2;
#pragma omp parallel for num_threads(threads)
  for (int64_t p = 0; p < outputs / PANEL; ++p)
    for (int64_t k = 0; k < pairs; ++k)
      for (int64_t n = 0; n < PANEL; ++n)
        std::memcpy(packed + ((p * pairs + k) * PANEL + n) * 2,
                    weight + (p * PANEL + n) * inputs + 2 * k, 2 * sizeof(bf16));
}

// Like `pack`, to integers of 12 bits and a sign, times a power-of-two scale per output that makes its
// largest weight use all 12 bits. Adds the squares of the weights to squares[0], and of the rounding
// errors to squares[1]. inputs is a multiple of 32.
void pack_integers(const bf16* weight, int64_t outputs, int64_t inputs, int16_t* packed, float* scales,
                   double* squares, int64_t threads) {
#ifndef __AVX512BF16__
  double all = 0, lost = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : all, lost)
  for (int64_t p = 0; p < outputs / PANEL; ++p)
    for (int64_t n = 0; n < PANEL; ++n) {
      const Loss loss = round_output(weight + (p * PANEL + n) * inputs, inputs,
                                     packed + p * PANEL * inputs + 2 * n, scales + p * PANEL + n);
      all += loss.all, lost += loss.lost;
    }
  squares[0] += all, squares[1] += lost;
#endif
}

// Matmul of (rows, inputs) to (rows, outputs).
void multiply_all(const Product* by, const bf16* x, int64_t rows, bf16* out, int64_t threads) {
#pragma omp parallel num_threads(threads)
  multiply(*by, x, rows, End{out});
}

// Gated matmul to (rows, outputs / 2): silu(first half) * second half.
void gate_all(const Product* by, const bf16* x, int64_t rows, bf16* out, int64_t threads) {
#pragma omp parallel num_threads(threads)
  multiply(*by, x, rows, End{out, nullptr, 0, true});
}

// RMS norms of the rows of x, times the weight; `size` is a multiple of 16.
void norm_all(const bf16* x, const bf16* weight, bf16* out, int64_t rows, int64_t size, float eps,
              int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) rms_norm(x + r * size, weight, out + r * size, size, eps);
}

void attend_patches(const Patches* of, int64_t threads) { attend_parts(*of, threads); }

// Like `multiply_all`, without rounding the sums.
void exact_all(const Product* by, const bf16* x, int64_t rows, float* out, int64_t threads) {
#pragma omp parallel num_threads(threads)
  multiply(*by, x, rows, End{nullptr, nullptr, 0, false, nullptr, out});
}

// Like `exact_all`, but returns only the index of each row's maximum; the lowest index wins a tie, -1 if
// the maximum is not finite.
void best_of_all(const Product* by, const bf16* x, int64_t rows, int64_t* places, int64_t threads) {
  static thread_local Scratch kept;
  Best* all = kept.room<Best>(rows * threads);
  for (int64_t i = 0; i < rows * threads; ++i) all[i].begin();
#pragma omp parallel num_threads(threads)
  multiply(*by, x, rows, End{nullptr, nullptr, 0, false, all + omp_get_thread_num() * rows});
  for (int64_t r = 0; r < rows; ++r) {
    float most = -INFINITY;
    places[r] = -1;
    for (int64_t i = r; i < rows * threads; i += rows)
      for (int64_t n = 0; n < PANEL; ++n) {
        const float value = std::isnan(all[i].values[n]) ? INFINITY : all[i].values[n];
        const int64_t place = int64_t(all[i].panels[n]) * PANEL + n;
        if (value < most || (value == most && place > places[r])) continue;
        most = value, places[r] = place;
      }
    if (std::isinf(most)) places[r] = -1;
  }
}

// Writes the weighted sum of each token's experts to out (rows, hidden).
void mix_experts(const Experts* experts, const Choice* choice, bf16* out, int64_t threads) {
  static thread_local Groups groups;
  Groups& g = groups;
  g.sort(*experts, *choice);
  const int64_t size = choice->rows * experts->hidden;
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    own_barrier = &barrier;
    mix(*experts, *choice, g);
    wait_for_all();
#pragma omp for
    for (int64_t i = 0; i < size; i += 16) store(out + i, load(g.sums + i));
  }
}

void decode(const Model* model, const Step* step, int64_t threads) {
  with_format(*model, [&](auto format) { decode_in<decltype(format)>(*model, *step, threads); });
}

void prompt(const Model* model, const Step* step, const Prompts* prompts, int64_t threads) {
  with_format(*model, [&](auto format) {
    prompt_in<decltype(format)>(*model, *step, *prompts, threads);
  });
}

}  // extern "C"
