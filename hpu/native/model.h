// Structs of hpu/native/decoder.py: pointers and sizes of a model and a step. Part of decode.cpp.

#pragma once

#include "experts.h"
#include "ranks.h"

extern "C" {

struct Layer {
  Product qkv, out, gate_up, down;
  const bf16 *attention_norm, *mlp_norm;
  const bf16* head_norm;  // (heads + kv_heads, head_dim), or none
  bf16 *keys, *values;    // (blocks * block_size, kv_heads, head_dim)
  const Mixture* mixture;  // instead of gate_up and down, or none
  int64_t window;         // sliding window in tokens, the query included; 0: none
};

struct Model {
  const Layer* layers;
  const bf16 *norm, *embedding;  // (hidden), (tokens, hidden)
  const bf16* rotation;          // (positions, 2 * rotated): cos, then sin with its first half negated
  int64_t num_layers, hidden, inner, heads, kv_heads, head_dim, rotated, block_size;
  float eps, scale, multiplier, embedding_multiplier;
  // Of ranks that divide the layers, or none: heads and inner sizes are those of this rank, and the
  // embedding has `num_tokens` tokens from `first_token` on.
  Group* group;
  int64_t first_token, num_tokens;
};

// Attention inputs as in hpu/layers/metadata.py. The call allocates the residual stream, total (rows,
// hidden); hidden receives its final norm.
struct Step {
  int64_t rows, blocks;
  const int64_t *tokens, *positions, *slots, *block_list, *groups, *starts, *usage;
  bf16 *hidden, *total;
};

// Right-padded prompts: their tokens are the rows of a step, their cached blocks its block list, as in
// hpu/layers/metadata.py.
struct Prompts {
  int64_t batch, length, context;  // prompts, new tokens and cached blocks of each
  const int64_t *query_lens, *context_lens;
};

}  // extern "C"

namespace {

constexpr int MOST_HEAD = 256;   // numbers of a head
constexpr int MOST_GROUP = 16;   // query heads that share a key head

}  // namespace
