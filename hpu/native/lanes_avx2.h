// The sixteen lanes of numbers.h as two registers of eight, on AVX2 with FMA and F16C.

#pragma once

struct Lanes {
  __m256 low, high;
};

// Each lane has all bits set or no bits set.
struct Mask {
  __m256 low, high;
};

struct Words {
  __m256i low, high;
};

constexpr char LEVEL[] = "AVX2";

// Accumulators that fit in the registers together with the operands of `dot`.
constexpr int MOST_SUMS = 6;

using Input = float;
using Factor = Lanes;
constexpr int TURNS = 2;
constexpr int TOKENS = 1;

inline __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
inline __m256 max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }

inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes set1(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Lanes add(Lanes a, Lanes b) { return {add(a.low, b.low), add(a.high, b.high)}; }
inline Lanes sub(Lanes a, Lanes b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Lanes mul(Lanes a, Lanes b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Lanes div(Lanes a, Lanes b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline Lanes max(Lanes a, Lanes b) { return {max(a.low, b.low), max(a.high, b.high)}; }
inline Lanes min(Lanes a, Lanes b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Lanes fmadd(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes fmsub(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}

inline Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Lanes value) {
  _mm256_storeu_ps(to, value.low), _mm256_storeu_ps(to + 8, value.high);
}

inline Lanes load(const bf16* from) {
  const auto wide = [](const bf16* eight) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)eight));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  };
  return {wide(from), wide(from + 8)};
}

inline Lanes load_half(const uint8_t* from) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 16)))};
}

inline Lanes load_int8(const uint8_t* from) {
  const auto wide = [](const uint8_t* eight) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)eight)));
  };
  return {wide(from), wide(from + 8)};
}

// e4m3 / 256: the bits of the float16 value whose exponent is 8 less. NaN stays NaN.
inline Lanes load_fp8(const uint8_t* from) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
  const __m256i kept = _mm256_set1_epi16(int16_t(0xbf80));
  const __m256i moved = _mm256_and_si256(_mm256_slli_epi16(wide, 7), kept);
  const __m256i magnitude = _mm256_and_si256(moved, _mm256_set1_epi16(0x3f80));
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
  const __m256i halves = _mm256_or_si256(moved, nan);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

inline void store_half(uint8_t* to, Lanes value) {
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(value.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(to + 16), _mm256_cvtps_ph(value.high, _MM_FROUND_TO_NEAREST_INT));
}

// Stores integral values.
inline void store_int8(uint8_t* to, Lanes value) {
  const __m256i words =
      _mm256_packs_epi32(_mm256_cvtps_epi32(value.low), _mm256_cvtps_epi32(value.high));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128((__m128i*)to, _mm_packs_epi16(_mm256_castsi256_si128(ordered),
                                                 _mm256_extracti128_si256(ordered, 1)));
}

inline Lanes load_powers(const uint8_t* from) {
  const auto wide = [](const uint8_t* eight) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)eight));
    // 2^-127 is subnormal.
    const __m256i least = _mm256_set1_epi32(0x00400000);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(bytes, 23), least));
  };
  return {wide(from), wide(from + 8)};
}

inline Words load_words(const void* from) {
  const __m256i* at = (const __m256i*)from;
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}

inline __m256 nearest(__m256 x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Lanes nearest(Lanes x) { return {nearest(x.low), nearest(x.high)}; }

// Clamps to the exponents that `scale` supports; the order of the operands preserves NaN.
inline __m256 bounded(__m256 x) {
  return _mm256_min_ps(_mm256_set1_ps(128), _mm256_max_ps(_mm256_set1_ps(-127), x));
}

inline Lanes fraction(Lanes x) {
  const auto of = [](__m256 a) { return _mm256_sub_ps(bounded(a), _mm256_floor_ps(bounded(a))); };
  return {of(x.low), of(x.high)};
}

// 2^-127 gets the bits of zero, 2^128 the bits of infinity.
inline Lanes scale(Lanes x, Lanes by) {
  const auto power = [](__m256 of) {
    const __m256i whole = _mm256_cvtps_epi32(_mm256_floor_ps(bounded(of)));
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23));
  };
  return {_mm256_mul_ps(x.low, power(by.low)), _mm256_mul_ps(x.high, power(by.high))};
}

inline Mask between(int64_t begin, int64_t end) {
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i before = _mm256_set1_epi32(int32_t(begin) - 1);
  const __m256i after = _mm256_set1_epi32(int32_t(end));
  const auto inside = [&](__m256i lanes) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_cmpgt_epi32(lanes, before), _mm256_cmpgt_epi32(after, lanes)));
  };
  return {inside(first), inside(_mm256_add_epi32(first, _mm256_set1_epi32(8)))};
}
inline bool any(Mask mask) { return _mm256_movemask_ps(_mm256_or_ps(mask.low, mask.high)); }
inline Mask either(Mask a, Mask b) {
  return {_mm256_or_ps(a.low, b.low), _mm256_or_ps(a.high, b.high)};
}
inline Mask is_greater(Lanes a, Lanes b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ)};
}
inline Mask differs(Lanes a, Lanes b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_NEQ_UQ), _mm256_cmp_ps(a.high, b.high, _CMP_NEQ_UQ)};
}
inline Mask is_nan(Lanes a) {
  return {_mm256_cmp_ps(a.low, a.low, _CMP_UNORD_Q), _mm256_cmp_ps(a.high, a.high, _CMP_UNORD_Q)};
}
inline Lanes select(Mask mask, Lanes a, Lanes b) {
  return {_mm256_blendv_ps(b.low, a.low, mask.low), _mm256_blendv_ps(b.high, a.high, mask.high)};
}
inline Lanes keep(Mask mask, Lanes a) {
  return {_mm256_and_ps(mask.low, a.low), _mm256_and_ps(mask.high, a.high)};
}
inline Lanes max_where(Mask mask, Lanes a, Lanes b) { return select(mask, max(a, b), a); }
inline void store_where(Mask mask, float* to, Lanes a) {
  _mm256_maskstore_ps(to, _mm256_castps_si256(mask.low), a.low);
  _mm256_maskstore_ps(to + 8, _mm256_castps_si256(mask.high), a.high);
}
inline void store_where(Mask mask, int32_t* to, int32_t value) {
  _mm256_maskstore_epi32(to, _mm256_castps_si256(mask.low), _mm256_set1_epi32(value));
  _mm256_maskstore_epi32(to + 8, _mm256_castps_si256(mask.high), _mm256_set1_epi32(value));
}

template <typename Join>
inline float reduce(Lanes a, Join join) {
  __m256 v = join(a.low, a.high);
  v = join(v, _mm256_permute2f128_ps(v, v, 1));
  v = join(v, _mm256_permute_ps(v, 0x4e));
  return _mm256_cvtss_f32(join(v, _mm256_permute_ps(v, 0xb1)));
}
inline float reduce_add(Lanes a) {
  return reduce(a, [](__m256 x, __m256 y) { return add(x, y); });
}
inline float reduce_max(Lanes a) {
  return reduce(a, [](__m256 x, __m256 y) { return max(x, y); });
}

template <typename Join>
inline __m256 joined_half(const Lanes* of, Join join) {
  __m256 by_four[2];
  for (int i = 0; i < 2; ++i) {
    const Lanes* from = of + 4 * i;
    const __m256 v[4] = {join(from[0].low, from[0].high), join(from[1].low, from[1].high),
                         join(from[2].low, from[2].high), join(from[3].low, from[3].high)};
    const __m256 a = join(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    const __m256 b = join(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    const __m256d c = _mm256_castps_pd(a), d = _mm256_castps_pd(b);
    by_four[i] = join(_mm256_castpd_ps(_mm256_unpacklo_pd(c, d)),
                      _mm256_castpd_ps(_mm256_unpackhi_pd(c, d)));
  }
  return join(_mm256_permute2f128_ps(by_four[0], by_four[1], 0x20),
              _mm256_permute2f128_ps(by_four[0], by_four[1], 0x31));
}

template <typename Join>
inline Lanes joined(const Lanes* of, Join join) {
  return {joined_half(of, join), joined_half(of + 8, join)};
}

inline void store_pairs(bf16* to, const bf16* first, const bf16* second) {
  const __m256i even = _mm256_loadu_si256((const __m256i*)first);
  const __m256i odd = _mm256_loadu_si256((const __m256i*)second);
  const __m256i a = _mm256_unpacklo_epi16(even, odd), b = _mm256_unpackhi_epi16(even, odd);
  _mm256_storeu_si256((__m256i*)to, _mm256_permute2x128_si256(a, b, 0x20));
  _mm256_storeu_si256((__m256i*)(to + 16), _mm256_permute2x128_si256(a, b, 0x31));
}

// Transposes eight rows of eight pairs into columns that are 32 elements apart.
inline void transpose(bf16* to, const bf16* const* rows, int64_t from) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps((const float*)(rows[i] + from));
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps((float*)(to + i * 32), _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps((float*)(to + (i + 4) * 32), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

inline void store_transposed(bf16* to, const bf16* const* rows, int64_t size) {
  for (int64_t d = 0; d < size; d += 16) {
    transpose(to + d * 16, rows, d);
    transpose(to + d * 16 + 16, rows + 8, d);
  }
}

inline __m256i high_half() { return _mm256_set1_epi32(int32_t(0xffff0000)); }

inline Factor factor(const bf16* pairs, int turn) {
  const Words words = load_words(pairs);
  const auto of = [&](__m256i half) {
    return _mm256_castsi256_ps(turn == 0 ? _mm256_slli_epi32(half, 16)
                                         : _mm256_and_si256(half, high_half()));
  };
  return {of(words.low), of(words.high)};
}

inline Factor repeat(const Input* pair, int turn) { return set1(pair[turn]); }

inline Lanes dot(Lanes sum, Factor a, Factor b) { return fmadd(a, b, sum); }

inline Words no_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline void store(int16_t* to, Words words) {
  _mm256_storeu_si256((__m256i*)to, words.low);
  _mm256_storeu_si256((__m256i*)(to + 16), words.high);
}
inline Words repeat_word(int32_t word) { return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)}; }
inline Lanes to_lanes(Words words) {
  return {_mm256_cvtepi32_ps(words.low), _mm256_cvtepi32_ps(words.high)};
}

inline Lanes magnitude(Lanes x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Lanes power_below(Lanes x) {
  const __m256 exponent = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
  return {_mm256_and_ps(x.low, exponent), _mm256_and_ps(x.high, exponent)};
}

inline Words to_pairs(Lanes value) {
  const auto of = [](__m256 half) {
    const __m256i words = _mm256_cvtps_epi32(half);
    return _mm256_blend_epi16(words, _mm256_slli_epi32(words, 16), 0xaa);
  };
  return {of(value.low), of(value.high)};
}

template <int MOVED>
inline Words scaled_pair(Words value, Words by, Words plus) {
  const auto of = [](__m256i a, __m256i b, __m256i c) {
    return _mm256_add_epi16(_mm256_mulhrs_epi16(_mm256_slli_epi16(a, MOVED), b), c);
  };
  return {of(value.low, by.low, plus.low), of(value.high, by.high, plus.high)};
}

inline Words dot(Words sum, Words a, Words b) {
  sum.low = _mm256_add_epi32(sum.low, _mm256_madd_epi16(a.low, b.low));
  sum.high = _mm256_add_epi32(sum.high, _mm256_madd_epi16(a.high, b.high));
  // Keeps the order of the additions: the compiler's order would need more registers than exist.
  asm volatile("" : "+x"(sum.low), "+x"(sum.high));
  return sum;
}

template <int ROWS>
inline void dot_pairs(const int16_t* x, int64_t stride, const int16_t* weights, int64_t pairs,
                      Words (&sums)[ROWS]) {
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) sums[r] = no_words();
  for (int64_t k = 0; k < pairs; ++k, x += 2, weights += 32) {
    Words pair = load_words(weights);
    // Keeps the weights in registers: the compiler would read them again for each row.
    asm volatile("" : "+x"(pair.low), "+x"(pair.high));
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      const float* both = (const float*)(x + r * stride);
      const __m256i repeated = _mm256_castps_si256(_mm256_broadcast_ss(both));
      sums[r] = dot(sums[r], pair, {repeated, repeated});
    }
  }
}

// Six rows use all registers; compilers would spill some of the sums to memory.
#define ROW_OF_PAIR(X, LOW, HIGH)               \
  "vbroadcastss " X ",%[both]\n\t"              \
  "vpmaddwd %[both],%[near],%[product]\n\t"     \
  "vpmaddwd %[both],%[far],%[both]\n\t"         \
  "vpaddd %[product],%[" LOW "],%[" LOW "]\n\t" \
  "vpaddd %[both],%[" HIGH "],%[" HIGH "]\n\t"
inline void dot_pairs(const int16_t* x, int64_t stride, const int16_t* weights, int64_t pairs,
                      Words (&sums)[6]) {
  const int16_t* fourth = x + 3 * stride;
  __m256i near, far, both, product;
  asm volatile(
      "vpxor %[a],%[a],%[a]\n\tvpxor %[b],%[b],%[b]\n\tvpxor %[c],%[c],%[c]\n\t"
      "vpxor %[d],%[d],%[d]\n\tvpxor %[e],%[e],%[e]\n\tvpxor %[f],%[f],%[f]\n\t"
      "vpxor %[g],%[g],%[g]\n\tvpxor %[h],%[h],%[h]\n\tvpxor %[i],%[i],%[i]\n\t"
      "vpxor %[j],%[j],%[j]\n\tvpxor %[k],%[k],%[k]\n\tvpxor %[l],%[l],%[l]\n\t"
      "1:\n\tvmovdqu (%[weights]),%[near]\n\tvmovdqu 32(%[weights]),%[far]\n\t"
      ROW_OF_PAIR("(%[x])", "a", "b") ROW_OF_PAIR("(%[x],%[stride])", "c", "d")
      ROW_OF_PAIR("(%[x],%[stride],2)", "e", "f") ROW_OF_PAIR("(%[fourth])", "g", "h")
      ROW_OF_PAIR("(%[fourth],%[stride])", "i", "j")
      ROW_OF_PAIR("(%[fourth],%[stride],2)", "k", "l")
      "add $64,%[weights]\n\tadd $4,%[x]\n\tadd $4,%[fourth]\n\tdec %[pairs]\n\tjnz 1b"
      : [a] "=&x"(sums[0].low), [b] "=&x"(sums[0].high), [c] "=&x"(sums[1].low),
        [d] "=&x"(sums[1].high), [e] "=&x"(sums[2].low), [f] "=&x"(sums[2].high),
        [g] "=&x"(sums[3].low), [h] "=&x"(sums[3].high), [i] "=&x"(sums[4].low),
        [j] "=&x"(sums[4].high), [k] "=&x"(sums[5].low), [l] "=&x"(sums[5].high),
        [near] "=&x"(near), [far] "=&x"(far), [both] "=&x"(both), [product] "=&x"(product),
        [weights] "+r"(weights), [x] "+r"(x), [fourth] "+r"(fourth), [pairs] "+r"(pairs)
      : [stride] "r"(stride * int64_t(sizeof(int16_t)))
      : "cc", "memory");
}
#undef ROW_OF_PAIR

inline Words int4_pair(Words words, int pair) {
  const auto of = [&](__m256i half) {
    return _mm256_and_si256(_mm256_srli_epi16(half, 4 * pair), _mm256_set1_epi16(15));
  };
  return {of(words.low), of(words.high)};
}

inline Words fp4_pair(Words words, int pair) {
  // The lookup fills the high bytes; the low bytes look up zero.
  const __m256i numbers = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
  const auto of = [&](__m256i half) {
    const __m256i moved =
        pair < 2 ? _mm256_slli_epi16(half, 8 - 4 * pair) : _mm256_srli_epi16(half, 4 * pair - 8);
    const __m256i places = _mm256_and_si256(moved, _mm256_set1_epi16(0x0f00));
    return _mm256_srai_epi16(_mm256_shuffle_epi8(numbers, places), 8);
  };
  return {of(words.low), of(words.high)};
}

inline Words int8_pair(const uint8_t* from) {
  const __m128i first = _mm_loadu_si128((const __m128i*)from);
  const __m128i second = _mm_loadu_si128((const __m128i*)(from + 16));
  return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second)),
          _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second))};
}

inline void store_int16(int16_t* to, Lanes value) {
  const __m256i words =
      _mm256_packs_epi32(_mm256_cvtps_epi32(value.low), _mm256_cvtps_epi32(value.high));
  _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(words, 0xd8));
}

inline void split(const bf16* token, const bf16*, Factor& low, Factor& high) {
  low = factor(token, 0), high = factor(token, 1);
}

inline __m256i round_bits(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  // Set the quiet bit, so that NaN does not become infinity.
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm256_and_si256(_mm256_blendv_epi8(up, quiet, nan), high_half());
}

// The bits of `value` rounded to bfloat16, in the high half of each lane.
inline Words round_bits(Lanes value) { return {round_bits(value.low), round_bits(value.high)}; }

inline void store_pairs(bf16* to, Lanes first, Lanes second) {
  const Words even = round_bits(first), odd = round_bits(second);
  const __m256i low = _mm256_or_si256(_mm256_srli_epi32(even.low, 16), odd.low);
  const __m256i high = _mm256_or_si256(_mm256_srli_epi32(even.high, 16), odd.high);
  _mm256_storeu_si256((__m256i*)to, low);
  _mm256_storeu_si256((__m256i*)(to + 16), high);
}

inline void store_split(bf16* to, Lanes low, Lanes high) { store_pairs(to, low, high); }

inline void store(bf16* to, Lanes value) {
  const Words bits = round_bits(value);
  const __m256i narrow =
      _mm256_packus_epi32(_mm256_srli_epi32(bits.low, 16), _mm256_srli_epi32(bits.high, 16));
  _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(narrow, 0xd8));
}

inline void store(bf16* to, Lanes low, Lanes high) { store(to, low), store(to + 16, high); }

inline Factor factor(const float* numbers, int turn) { return load(numbers + 16 * turn); }
inline void split(const Lanes* token, const Lanes*, Factor& low, Factor& high) {
  low = token[0], high = token[1];
}
inline void store_halves(bf16* to, Lanes low, Lanes high) { store(to, low, high); }

inline Lanes rounded(Lanes value) {
  const Words bits = round_bits(value);
  return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)};
}
