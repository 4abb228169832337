// Routed experts of the CPU back end: tokens are grouped by expert, so that only the weights of chosen
// experts are read, each once. Part of decode.cpp.

#pragma once

#include <cmath>

#include "quantized.h"

extern "C" {

// A weight of all experts, in the layout of Product: packed in panels, experts `bytes` apart. Biases,
// scales and orders are stacked; `order` is (experts, inputs).
struct Stacked {
  const void* weight;
  const bf16* bias;
  int64_t bytes, kind;
  const float* scales;
  int64_t group;
  const int32_t* order;
  int64_t inputs;
};

// Stacked gated MLPs: gate before up (2 * inner, hidden), and down (hidden, inner).
struct Experts {
  Stacked gate_up, down;
  int64_t count, hidden, inner;
  Clamped swiglu;
};

// The experts of each token of x (rows, hidden) and their weights, (rows, top_k) each. The id
// `Experts::count` marks experts of other ranks.
struct Choice {
  int64_t rows, top_k;
  const int64_t* ids;
  const float* weights;
  const bf16* x;
};

// The experts of a layer with their router; see hpu/layers/moe.py.
struct Mixture {
  Experts experts;
  const void* gate;          // (count, hidden), rows in bfloat16 or float32
  const float* correction;   // (count), added to the scores for the choice; or null
  Product shared_gate_up, shared_down;  // the shared expert; 0 outputs: no shared expert
  const bf16* shared_gate;   // (hidden), or null
  int64_t is_float32, top_k, is_sigmoid, renormalizes, groups, top_groups;
  float scaling;
};

}  // extern "C"

namespace {

constexpr float LEAST_SUM = 1e-20f;  // minimum divisor when weights are renormalized

template <typename T>
float product_of(const T* weight, const bf16* x, int64_t size) {
  Lanes sum = zero();
  for (int64_t i = 0; i < size; i += 16) sum = fmadd(load(weight + i), load(x + i), sum);
  return reduce_add(sum);
}

// Dot products of x with each of `count` rows of `weight`, four at a time: a single sum would be bound
// by the latency of its additions.
template <typename T>
void products_of(const T* weight, const bf16* x, int64_t size, int64_t count, float* out) {
  int64_t n = 0;
  for (; n + 4 <= count; n += 4, weight += 4 * size) {
    Lanes sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < size; i += 16) {
      const Lanes own = load(x + i);
#pragma GCC unroll 4
      for (int64_t r = 0; r < 4; ++r) sums[r] = fmadd(load(weight + r * size + i), own, sums[r]);
    }
    for (int64_t r = 0; r < 4; ++r) out[n + r] = reduce_add(sums[r]);
  }
  for (; n < count; ++n, weight += size) out[n] = product_of(weight, x, size);
}

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// Marks in `taken` the largest value that is not marked yet, and returns its index; the lowest index
// wins a tie. With NaN, any index.
inline int64_t take_best(const float* values, std::vector<char>& taken) {
  int64_t best = -1;
  for (int64_t i = 0; i < int64_t(taken.size()); ++i)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  taken[best] = true;
  return best;
}

// Marks in `taken` the experts outside of the top groups. The score of a group is the sum of its two
// best values.
void leave_groups(const Mixture& m, const std::vector<float>& choice, std::vector<char>& taken) {
  const int64_t size = m.experts.count / m.groups;
  std::vector<float> sums(m.groups);
  for (int64_t group = 0; group < m.groups; ++group) {
    std::vector<char> seen(size);
    const float* values = choice.data() + group * size;
    const float first = values[take_best(values, seen)];
    sums[group] = first + values[take_best(values, seen)];
  }
  std::vector<char> kept(m.groups);
  for (int64_t i = 0; i < m.top_groups; ++i) take_best(sums.data(), kept);
  for (int64_t i = 0; i < m.experts.count; ++i) taken[i] = !kept[i / size];
}

// Chooses the experts of a token and their weights, (top_k) each.
void route(const Mixture& m, const bf16* x, int64_t* ids, float* weights) {
  const int64_t count = m.experts.count, hidden = m.experts.hidden;
  std::vector<float> scores(count), choice(count);
  std::vector<char> taken(count);
  if (m.is_float32) products_of((const float*)m.gate, x, hidden, count, scores.data());
  else products_of((const bf16*)m.gate, x, hidden, count, scores.data());
  if (m.is_sigmoid) {
    for (float& score : scores) score = sigmoid(score);
  } else {
    const float most = *std::max_element(scores.begin(), scores.end());
    float sum = 0;
    for (float& score : scores) sum += score = std::exp(score - most);
    for (float& score : scores) score /= sum;
  }
  for (int64_t i = 0; i < count; ++i) choice[i] = scores[i] + (m.correction ? m.correction[i] : 0);
  if (m.groups > 1) leave_groups(m, choice, taken);
  float sum = 0;
  for (int64_t i = 0; i < m.top_k; ++i) {
    ids[i] = take_best(choice.data(), taken);
    sum += weights[i] = scores[ids[i]];
  }
  const float scale = m.scaling / (m.renormalizes ? std::max(sum, LEAST_SUM) : 1);
  for (int64_t i = 0; i < m.top_k; ++i) weights[i] *= scale;
}

// (token, expert) pairs sorted by expert, and buffers for their activations.
class Groups {
 public:
  int64_t* starts;  // (count + 2): the first pair of each expert, and of other ranks' experts
  int64_t* tokens;  // token of each pair
  float* shares;    // weight of each pair
  bf16 *gathered, *inside;  // (pairs, hidden), (pairs, inner)
  float* sums;              // (rows, hidden)
  // Routing of a Mixture, by token: its experts and their weights, (rows, top_k) each; its own index;
  // and the weight of the shared expert.
  int64_t *ids, *rows;
  float *weights, *shared;

  // Called by one thread.
  void make_room(int64_t count, int64_t top_k) {
    ids = ids_.room<int64_t>(count * top_k);
    weights = weights_.room<float>(count * top_k);
    rows = rows_.room<int64_t>(count);
    shared = shared_.room<float>(count);
  }

  // Called by one thread.
  void sort(const Experts& e, const Choice& c) {
    const int64_t pairs = c.rows * c.top_k;
    starts = starts_.room<int64_t>(e.count + 2);
    tokens = tokens_.room<int64_t>(pairs);
    shares = shares_.room<float>(pairs);
    gathered = gathered_.room<bf16>(pairs * e.hidden);
    inside = inside_.room<bf16>(pairs * e.inner);
    sums = sums_.room<float>(c.rows * e.hidden);
    std::fill_n(starts, e.count + 2, 0);
    for (int64_t i = 0; i < pairs; ++i) ++starts[c.ids[i] + 1];
    for (int64_t i = 0; i <= e.count; ++i) starts[i + 1] += starts[i];
    std::vector<int64_t> next(starts, starts + e.count + 1);
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t at = next[c.ids[i]]++;
      tokens[at] = i / c.top_k, shares[at] = c.weights[i];
    }
  }

 private:
  Scratch starts_, tokens_, shares_, gathered_, inside_, sums_, ids_, rows_, weights_, shared_;
};

inline Product expert_of(const Stacked& all, int64_t index, int64_t outputs, int64_t width) {
  return {(const bf16*)((const uint8_t*)all.weight + index * all.bytes),
          all.bias ? all.bias + index * outputs : nullptr,
          outputs,
          all.inputs,
          all.kind,
          all.scales ? all.scales + index * outputs : nullptr,
          all.group,
          all.order ? all.order + index * all.inputs : nullptr,
          width};
}

// One of the two matmuls, for all chosen experts. Called by all threads.
template <typename MakeEnd>
void multiply_chosen(const Experts& e, const Groups& g, const Stacked& stacked, int64_t outputs,
                     int64_t width, bool gated, const bf16* x, MakeEnd make_end) {
  for (int64_t i = 0; i < e.count; ++i) {
    const int64_t begin = g.starts[i], rows = g.starts[i + 1] - begin;
    if (rows == 0) continue;
    int64_t next = i + 1;
    while (next < e.count && g.starts[next + 1] == g.starts[next]) ++next;
    if (next < e.count) expect(expert_of(stacked, next, outputs, width), gated);
    multiply(expert_of(stacked, i, outputs, width), x + begin * width, rows, make_end(begin));
  }
}

// Weighted sum of each token's experts, into g.sums. `g` must be sorted. Called by all threads of a
// parallel region; the sums are complete when the last thread returns, so a barrier must follow.
void mix(const Experts& e, const Choice& c, const Groups& g) {
#pragma omp for nowait
  for (int64_t r = 0; r < c.rows; ++r) std::fill_n(g.sums + r * e.hidden, e.hidden, 0.0f);
#pragma omp for nowait
  for (int64_t i = 0; i < g.starts[e.count]; ++i)
    std::memcpy(g.gathered + i * e.hidden, c.x + g.tokens[i] * e.hidden, e.hidden * sizeof(bf16));
  wait_for_all();
  multiply_chosen(e, g, e.gate_up, 2 * e.inner, e.hidden, true, g.gathered, [&](int64_t begin) {
    End end{g.inside + begin * e.inner, nullptr, 0, true};
    end.swiglu = e.swiglu;
    return end;
  });
  wait_for_all();
  // A thread computes the same outputs of every expert, so no two threads add to the same sum.
  multiply_chosen(e, g, e.down, e.hidden, e.inner, false, g.inside, [&](int64_t begin) {
    End end;
    end.mixed = g.sums, end.tokens = g.tokens + begin, end.shares = g.shares + begin;
    return end;
  });
}

// Sums of a layer's routed and shared experts for x (rows, hidden), into g.sums. Called by all threads
// of a parallel region. `inside`: buffer of (rows, inner size of the shared expert).
void mix_routed(const Mixture& m, const bf16* x, int64_t rows, Groups& g, bf16* inside) {
  const int64_t hidden = m.experts.hidden;
  if (omp_get_thread_num() == 0) g.make_room(rows, m.top_k);
  wait_for_all();
#pragma omp for nowait
  for (int64_t r = 0; r < rows; ++r) {
    const bf16* token = x + r * hidden;
    route(m, token, g.ids + r * m.top_k, g.weights + r * m.top_k);
    g.rows[r] = r;
    g.shared[r] = m.shared_gate ? sigmoid(product_of(m.shared_gate, token, hidden)) : 1;
  }
  wait_for_all();
  const Choice choice{rows, m.top_k, g.ids, g.weights, x};
  if (omp_get_thread_num() == 0) g.sort(m.experts, choice);
  wait_for_all();
  mix(m.experts, choice, g);
  if (m.shared_down.outputs) {
    multiply(m.shared_gate_up, x, rows, End{inside, nullptr, 0, true});
    wait_for_all();
    End end;
    end.mixed = g.sums, end.tokens = g.rows, end.shares = g.shared;
    multiply(m.shared_down, inside, rows, end);
  }
  wait_for_all();
}

}  // namespace
