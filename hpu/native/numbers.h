// Sixteen numbers at a time: bfloat16 in memory, float32 in registers. Part of decode.cpp.
//
// One of the headers lanes_*.h defines them for the instruction set of the compiler's flags. All
// define the same names:
//
// LEVEL          the instruction set's name
// Lanes          16 float32; Mask: a condition on each lane; Words: 16 integers of 32 bits
// load, store    of float32, or of bfloat16, which is rounded to nearest even; NaN stays NaN.
//                `store` of two Lanes stores 32 numbers
// fraction(x)    x - floor(x), below 1; scale(x, y): x * 2^floor(y), zero for y = -infinity
// between(a, b)  the lanes from a up to b, which is excluded
// joined(v, f)   lane i of the result is v[i] reduced with f
// load_half, load_int8, load_fp8, store_half, store_int8   16 numbers of such a type; load_fp8 gives
//                them divided by 256
// store_pairs    interleaves two times 16 numbers; store_transposed(to, rows, size): 16 rows of `size`
//                bfloat16 numbers, so that pairs of the 16 rows are adjacent (and `size` may be rounded
//                up to a multiple of 16)
//
// Products multiply bfloat16 weights of 16 outputs, stored in pairs of inputs, by Input numbers in
// TURNS turns: BF16 instructions multiply both numbers of a pair at once, and x is bfloat16; the others
// multiply the first numbers of the pairs, then the second ones, and x is float32.
//
// Factor         the operand of one turn
// factor(w, t)   the numbers of turn t of 16 pairs; repeat(x, t): those of one pair of Input in all lanes
// dot(c, a, b)   c plus the products of a turn
// load_powers    2^(byte - 127) of 16 bytes
// MOST_SUMS      Lanes of sums that the registers hold beside factors
//
// Quantized weights, with BF16 instructions:
//
// int4(w, i)     the i-th nibble of each word; int4_factor(w, i, t): the factor of pair i of four
// fp4, fp4_factor  likewise, of 4-bit floats (e2m1)
//
// Without them, where Words are also pairs of integers of 16 bits:
//
// dot(c, a, b)   c plus the sums of the products of pairs; no_words(): zero; repeat_word(w): one in all
// dot_pairs(x, stride, w, n, c)   of each row of x with n pairs of 16 outputs, into c
// int4_pair(w, i), fp4_pair(w, i)   pair i of four; of 4-bit floats twice the numbers
// int8_pair      pairs of the i-th of 16 bytes and the i-th of the next 16
// to_lanes       the words as float32; store_int16: of whole numbers, after rounding
// to_pairs       lanes, after rounding, in both numbers of a pair
// scaled_pair<m>(v, a, b)   (v * 2^m * a) / 2^15, rounded, plus b
// magnitude, power_below   of lanes; the power of two at most as large
//
// Sums over tokens take TOKENS tokens at once: `split` makes factors of 32 numbers of each, store_split
// stores the sums of both in the order of the numbers; store_halves stores those of factors of Lanes,
// of which each token has two.

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

// Memory that is reused between calls, aligned to a cache line: otherwise each row of a tile would
// span two lines.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(start_); }

  // Memory for `count` uninitialised numbers.
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

// Rows of x as the products read them: `stride` numbers apart.
template <typename Number>
struct RowsOf {
  const Number* x;
  int64_t stride;
};
using Rows = RowsOf<Input>;

// Copies `size` numbers to float32.
inline void widen(const bf16* from, int64_t size, float* to) {
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) store(to + i, load(from + i));
  for (; i < size; ++i) {
    const uint32_t bits = uint32_t(from[i]) << 16;
    std::memcpy(to + i, &bits, 4);
  }
}

// `rows` rows of `size` numbers, converted into `kept` if products do not read bfloat16.
template <typename Number = Input>
inline RowsOf<Number> rows_of(const bf16* x, int64_t stride, int64_t rows, int64_t size,
                              Scratch& kept) {
  if constexpr (std::is_same_v<Number, bf16>) {
    return {x, stride};
  } else {
    // Rows that are a power of two apart would share few lines of the L1 cache.
    const int64_t apart = (size + 15) / 16 * 16 + 16;
    float* wide = kept.room<float>(rows * apart);
    for (int64_t r = 0; r < rows; ++r) widen(x + r * stride, size, wide + r * apart);
    return {wide, apart};
  }
}

// e^x as 2^(x / ln 2): a polynomial of the fraction, within about 2 ulp of float32; the order of the
// operands of max keeps NaN.
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

// 2^x for x of at most about 1: a polynomial of the fraction with a relative error of about 3e-6;
// bfloat16 then rounds to 2e-3.
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
