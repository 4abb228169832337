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
  const bf16* head_norm;  // (heads + kv_heads, head_dim), or null
  uint8_t *keys, *values;  // (blocks * block_size, kv_heads): rows of the cache's format
  const Mixture* mixture;  // instead of gate_up and down, or null
  int64_t window;         // sliding window in tokens, the query's own token included; 0: no window
  float key_scale, value_scale;  // scales of the cache, for FP8_CACHE
  const LowRank *low_qkv, *low_out, *low_gate_up, *low_down;  // matrices of adapters, or null
};

struct Model {
  const Layer* layers;
  const bf16 *norm, *embedding;  // (hidden), (tokens, hidden)
  const bf16* rotation;          // (positions, 2 * rotated): cos, then sin with its first half negated
  int64_t num_layers, hidden, inner, heads, kv_heads, head_dim, rotated, block_size;
  float eps, scale, multiplier, embedding_multiplier;
  // The tensor-parallel ranks, or null. With a group, the heads are this rank's, and the embedding has
  // `num_tokens` tokens from `first_token` on.
  Group* group;
  int64_t first_token, num_tokens;
  int64_t cache_format;
};

// Attention inputs; see hpu/layers/metadata.py. The call allocates the residual stream `total` (rows,
// hidden) in float32, and writes its final norm to `hidden`.
struct Step {
  int64_t rows, blocks;
  const int64_t *tokens, *positions, *slots, *block_list, *groups, *starts, *usage;
  bf16* hidden;
  float* total;
  const AdapterRows* adapters;  // or null
  Input* low;                   // buffer for LowSums, which the call allocates
  const bf16* embeddings;       // (rows, hidden), used instead of token embeddings; or null
  const int64_t* rotated_at;    // (rows): row of the rotation for each token
};

// Right-padded prompts. The tokens are the rows of a Step, and the cached blocks are its block list; see
// hpu/layers/metadata.py.
struct Prompts {
  int64_t batch, length, context;  // number of prompts; new tokens, and cached blocks, of each prompt
  const int64_t *query_lens, *context_lens;
};

}  // extern "C"

namespace {

constexpr int MOST_HEAD = 256;   // elements of a head
constexpr int MOST_GROUP = 16;   // query heads that share a key head

}  // namespace
