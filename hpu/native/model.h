// Structs of hpu/native/decoder.py: pointers and sizes of a model and a step. Part of decode.cpp.

#pragma once

#include "experts.h"
#include "ranks.h"

// Formats of the KV cache, see cache.h.
enum CacheFormat : int64_t { BFLOAT16_CACHE, FLOAT16_CACHE, FP8_CACHE, INT8_CACHE };

extern "C" {

struct Layer {
  Product qkv, out, gate_up, down;
  const bf16 *attention_norm, *mlp_norm;
  const bf16* head_norm;  // (heads + kv_heads, head_dim), or none
  uint8_t *keys, *values;  // (blocks * block_size, kv_heads): rows of the cache's format
  const Mixture* mixture;  // instead of gate_up and down, or none
  int64_t window;         // sliding window in tokens, the query included; 0: none
  float key_scale, value_scale;  // of the cache, for FP8_CACHE
  const LowRank *low_qkv, *low_out, *low_gate_up, *low_down;  // of adapters, or none
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
  int64_t cache_format;
};

// Attention inputs as in hpu/layers/metadata.py. The call allocates the residual stream, total (rows,
// hidden) in float32; hidden receives its final norm.
struct Step {
  int64_t rows, blocks;
  const int64_t *tokens, *positions, *slots, *block_list, *groups, *starts, *usage;
  bf16* hidden;
  float* total;
  const AdapterRows* adapters;  // or none
  Input* low;                   // room for LowSums, which the call allocates
  const bf16* embeddings;       // (rows, hidden) in place of those of the tokens, or none
  const int64_t* rotated_at;    // (rows): row of the rotation for each token
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
