// Sixteen elements at a time: bfloat16 in memory, float32 in registers. Part of decode.cpp.
//
// A header lanes_*.h, chosen by the instruction set of the compiler's flags, defines these names:
//
// LEVEL          name of the instruction set
// Lanes          16 float32; Mask: a condition per lane; Words: 16 integers of 32 bits
// load, store    float32 or bfloat16 elements; bfloat16 is rounded to nearest even (BF16 instructions
//                round subnormals to zero), and NaN stays NaN. `store` of two Lanes stores 32 elements
// fraction(x)    x - floor(x), below 1; scale(x, y): x * 2^floor(y), zero for y = -infinity
// between(a, b)  lanes a to b - 1
// joined(v, f)   lane i of the result is v[i] reduced with f
// load_half, load_int8, load_fp8, store_half, store_int8   16 elements of this type; load_fp8 returns
//                elements divided by 256
// store_pairs    interleaves two times 16 elements; store_transposed(to, rows, size): transposes 16 rows
//                of `size` bfloat16 elements so that pairs of the 16 rows are adjacent (`size` may be
//                rounded up to a multiple of 16)
//
// Matmuls multiply bfloat16 weights of 16 outputs, stored in pairs of inputs, by elements of type
// Input in TURNS turns. BF16 instructions multiply both elements of a pair in a single turn, and Input
// is bfloat16. Without BF16 instructions, the first turn multiplies the first elements of the pairs, the
// second turn the second elements, and Input is float32.
//
// Factor         operand of a turn
// factor(w, t)   elements of turn t of 16 pairs; repeat(x, t): element of turn t of an Input pair, in
//                all lanes
// dot(c, a, b)   c plus the products of a turn
// load_powers    2^(byte - 127) of 16 bytes
// MOST_SUMS      Lanes of sums that fit in the registers together with factors
//
// Quantized weights, with BF16 instructions:
//
// store_exact_pairs   `store_pairs` of elements that bfloat16 represents exactly
// int4(w, i)     i-th nibble of each word; int4_factor(w, i, t): factor of the i-th of four pairs
// fp4, fp4_factor   the same for 4-bit floats (e2m1)
//
// Quantized weights, without BF16 instructions; Words then also hold pairs of 16-bit integers:
//
// dot(c, a, b)   c plus the sums of the products of pairs; no_words(): zero; repeat_word(w): w in all
//                lanes
// dot_pairs(x, stride, w, n, c)   sums of products of each row of x with n pairs of 16 outputs, into c
// int4_pair(w, i), fp4_pair(w, i)   i-th of four pairs; fp4_pair returns twice the values
// int8_pair      pairs of the i-th of 16 bytes and the i-th of the next 16 bytes
// to_lanes       words as float32; store_int16: stores rounded lanes
// to_pairs       rounded lanes, in both elements of each pair
// scaled_pair<m>(v, a, b)   (v * 2^m * a) / 2^15, rounded, plus b
// magnitude, power_below   absolute value; largest power of two that is not greater
//
// Sums over tokens process TOKENS tokens at once: `split` makes factors of 32 elements of each token,
// store_split stores the sums of both tokens in the order of the elements, and store_halves stores
// sums of factors of Lanes, two per token.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

using bf16 = uint16_t;

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "lanes_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "lanes_avx2.h"
#else
#error "AVX2 with FMA and F16C is needed"
#endif

// Memory that is reused between calls. Aligned to a cache line, since otherwise each row of a tile would
// span two lines.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(start_); }

  // Memory for `count` uninitialized elements.
  template <typename T>
  T* room(int64_t count) {
    const int64_t bytes = (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    if (bytes > bytes_) {
      std::free(start_);
      start_ = std::aligned_alloc(64, bytes);
      if (!start_) std::abort();
      bytes_ = bytes;
    }
    return static_cast<T*>(start_);
  }

 private:
  void* start_ = nullptr;
  int64_t bytes_ = 0;
};

// Rows of x in the input type of the matmuls, `stride` elements apart.
template <typename Number>
struct RowsOf {
  const Number* x;
  int64_t stride;
};
using Rows = RowsOf<Input>;

// Copies `size` elements to float32.
inline void widen(const bf16* from, int64_t size, float* to) {
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) store(to + i, load(from + i));
  for (; i < size; ++i) {
    const uint32_t bits = uint32_t(from[i]) << 16;
    std::memcpy(to + i, &bits, 4);
  }
}

// Rows of `size` elements, converted into `kept` unless the matmuls read bfloat16.
template <typename Number = Input>
inline RowsOf<Number> rows_of(const bf16* x, int64_t stride, int64_t rows, int64_t size,
                              Scratch& kept) {
  if constexpr (std::is_same_v<Number, bf16>) {
    return {x, stride};
  } else {
    // A power-of-two stride would map rows to few lines of the L1 cache.
    const int64_t apart = (size + 15) / 16 * 16 + 16;
    float* wide = kept.room<float>(rows * apart);
    for (int64_t r = 0; r < rows; ++r) widen(x + r * stride, size, wide + r * apart);
    return {wide, apart};
  }
}

// e^x as 2^(x / ln 2), with a polynomial of the fraction, within about 2 ulp of float32. The order of
// the operands of max preserves NaN.
inline Lanes exponential(Lanes x) {
  const Lanes t = mul(max(set1(-87.0f), x), set1(1.44269504f));
  const Lanes whole = nearest(t);
  const Lanes f = sub(t, whole);
  Lanes p = set1(1.535336188e-4f);
  p = fmadd(p, f, set1(1.339887440e-3f));
  p = fmadd(p, f, set1(9.618437357e-3f));
  p = fmadd(p, f, set1(5.550332548e-2f));
  p = fmadd(p, f, set1(2.402264791e-1f));
  p = fmadd(p, f, set1(6.931472028e-1f));
  p = fmadd(p, f, set1(1.0f));
  return scale(p, whole);
}

// silu(x) * up
inline Lanes gate(Lanes x, Lanes up) {
  const Lanes grown = exponential(sub(zero(), x));
  return mul(div(x, add(set1(1), grown)), up);
}

constexpr float TO_POWERS = 1.44269504f;  // log2(e): turns exponents of e into exponents of 2

// 2^x for x up to about 1, with a polynomial of the fraction. Relative error about 3e-6; bfloat16 then
// rounds to 2e-3.
inline Lanes power(Lanes x) {
  const Lanes f = fraction(x);
  Lanes p = set1(1.353416605e-2f);
  p = fmadd(p, f, set1(5.201146419e-2f));
  p = fmadd(p, f, set1(2.414427548e-1f));
  p = fmadd(p, f, set1(6.930038349e-1f));
  p = fmadd(p, f, set1(1.000002593f));
  return scale(p, x);
}

}  // namespace
