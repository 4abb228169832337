// Matmuls with all kinds of weights. Part of decode.cpp.

#pragma once

#ifdef __AVX512BF16__
#include "quantized_bfloat16.h"
#else
#include "quantized_integers.h"
#endif
#ifdef HAS_BYTE_PRODUCTS
#include "quantized_bytes.h"
#endif

namespace {

// x (rows, width) with its entries in the order of the weight's inputs: (rows, inputs), a buffer of this
// thread.
const bf16* reordered(const Product& by, const bf16* x, int64_t rows) {
  thread_local Scratch kept;
  bf16* out = kept.room<bf16>(rows * by.inputs);
  for (int64_t r = 0; r < rows; ++r, x += by.width)
    for (int64_t i = 0; i < by.inputs; ++i)
      out[r * by.inputs + i] = by.order[i] < 0 ? bf16{} : x[by.order[i]];
  return out;
}

// Whether matmuls with quantized weights round x to 8 bits.
bool rounds_inputs = false;

template <int KIND>
void multiply_quantized(const Product& by, const bf16* x, int64_t rows, const End& end,
                        Range range) {
#ifdef HAS_BYTE_PRODUCTS
  if (rounds_inputs) return multiply_in_bytes<KIND>(by, x, rows, end, range);
#endif
#ifdef __AVX512BF16__
  multiply_in_bfloat16<KIND>(by, x, rows, end, range);
#else
  multiply_in_integers<KIND>(by, x, rows, end, range);
#endif
}

// Computes this thread's panels of x (rows, width) times `by`.
void multiply(const Product& by, const bf16* x, int64_t rows, const End& end) {
  const Range range = share_of(by, end.gated);
  if (by.order != nullptr) x = reordered(by, x, rows);
  switch (by.kind) {
    case INT8_ROWS: return multiply_quantized<INT8_ROWS>(by, x, rows, end, range);
    case INT8_GROUPS: return multiply_quantized<INT8_GROUPS>(by, x, rows, end, range);
    case INT4_GROUPS: return multiply_quantized<INT4_GROUPS>(by, x, rows, end, range);
    case INT8_STORED: return multiply_quantized<INT8_STORED>(by, x, rows, end, range);
    case INT4_STORED: return multiply_quantized<INT4_STORED>(by, x, rows, end, range);
    case MXFP4: return multiply_quantized<MXFP4>(by, x, rows, end, range);
#ifndef __AVX512BF16__
    case INT16_ROWS: return multiply_in_integers<INT16_ROWS>(by, x, rows, end, range);
#endif
    default: return multiply_wide(by, panels_of(by, range), x, rows, end, range);
  }
}

}  // namespace
