// The sixteen lanes of numbers.h on AVX-512 (F, BW, VL, DQ), with or without BF16.

#pragma once

using Lanes = __m512;
using Mask = __mmask16;
using Words = __m512i;

// Accumulators that fit in the registers together with the operands of `dot`.
constexpr int MOST_SUMS = 24;

inline Lanes zero() { return _mm512_setzero_ps(); }
inline Lanes set1(float value) { return _mm512_set1_ps(value); }
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes max(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes min(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
inline Lanes fmadd(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
inline Lanes fmsub(Lanes a, Lanes b, Lanes c) { return _mm512_fmsub_ps(a, b, c); }

inline Lanes load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Lanes value) { _mm512_storeu_ps(to, value); }

inline Lanes load(const bf16* from) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}

inline Lanes load_half(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

inline Lanes load_int8(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

// e4m3 / 256: the bits of the float16 value whose exponent is 8 less. NaN stays NaN.
inline Lanes load_fp8(const uint8_t* from) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
  const __m256i kept = _mm256_set1_epi16(int16_t(0xbf80));
  const __m256i moved = _mm256_and_si256(_mm256_slli_epi16(wide, 7), kept);
  const __m256i magnitude = _mm256_and_si256(moved, _mm256_set1_epi16(0x3f80));
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
  return _mm512_cvtph_ps(_mm256_or_si256(moved, nan));
}

inline void store_half(uint8_t* to, Lanes value) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

// Stores integral values.
inline void store_int8(uint8_t* to, Lanes value) {
  _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(value)));
}

inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }

inline Lanes load_powers(const uint8_t* from) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
  // 2^-127 is subnormal.
  const __m512i least = _mm512_set1_epi32(0x00400000);
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(bytes, 23), least));
}

inline Lanes nearest(Lanes x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
inline Lanes fraction(Lanes x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF); }
inline Lanes scale(Lanes x, Lanes by) { return _mm512_scalef_ps(x, by); }

inline Mask between(int64_t begin, int64_t end) { return ((1 << end) - 1) & ~((1 << begin) - 1); }
inline bool any(Mask mask) { return mask; }
inline Mask either(Mask a, Mask b) { return a | b; }
inline Mask is_greater(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask differs(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
inline Mask is_nan(Lanes a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline Lanes select(Mask mask, Lanes a, Lanes b) { return _mm512_mask_mov_ps(b, mask, a); }
inline Lanes keep(Mask mask, Lanes a) { return _mm512_maskz_mov_ps(mask, a); }
inline Lanes max_where(Mask mask, Lanes a, Lanes b) { return _mm512_mask_max_ps(a, mask, a, b); }
inline void store_where(Mask mask, float* to, Lanes a) { _mm512_mask_storeu_ps(to, mask, a); }
inline void store_where(Mask mask, int32_t* to, int32_t value) {
  _mm512_mask_storeu_epi32(to, mask, _mm512_set1_epi32(value));
}

inline float reduce_add(Lanes a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(Lanes a) { return _mm512_reduce_max_ps(a); }

template <typename Join>
inline Lanes joined(const Lanes* of, Join join) {
  Lanes by_four[4];
  for (int i = 0; i < 4; ++i) {
    const Lanes* v = of + 4 * i;
    const Lanes a = join(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const Lanes b = join(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    by_four[i] = join(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)),
                      _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
  Lanes by_eight[2];
  for (int i = 0; i < 2; ++i) {
    const Lanes a = by_four[2 * i], b = by_four[2 * i + 1];
    by_eight[i] = join(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  return join(_mm512_shuffle_f32x4(by_eight[0], by_eight[1], 0x88),
              _mm512_shuffle_f32x4(by_eight[0], by_eight[1], 0xdd));
}

inline void store_pairs(bf16* to, const bf16* first, const bf16* second) {
  const auto wide = [](const bf16* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  };
  const __m512i even = wide(first), odd = wide(second);
  _mm512_storeu_si512(to, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
}

// Transposes 16 x 16 words.
inline void transpose(__m512i* v) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    v[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    v[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    v[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

inline void store_transposed(bf16* to, const bf16* const* rows, int64_t size) {
  for (int64_t d = 0; d < size; d += 32) {
    const int64_t pairs = std::min<int64_t>((size - d + 1) / 2, 16);
    const __mmask16 mask = (1 << pairs) - 1;
    __m512i words[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) words[r] = _mm512_maskz_loadu_epi32(mask, rows[r] + d);
    transpose(words);
    for (int i = 0; i < pairs; ++i) _mm512_storeu_si512(to + d * 16 + i * 32, words[i]);
  }
}

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define HAS_BYTE_PRODUCTS

// Adds the products of four unsigned and four signed bytes to each word.
inline Words dot_bytes(Words sum, Words a, Words b) { return _mm512_dpbusd_epi32(sum, a, b); }

// Regroups four inputs of 16 outputs each to four inputs per output, plus 128.
inline Words four_inputs(Words values) {
  alignas(64) static const uint8_t order[64] = {
      0, 16, 32, 48, 1, 17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21,
      37, 53, 6, 22, 38, 54, 7, 23, 39, 55, 8, 24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58,
      11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
  const __m512i together = _mm512_permutexvar_epi8(_mm512_load_si512(order), values);
  return _mm512_xor_si512(together, _mm512_set1_epi8(int8_t(0x80)));
}

inline Words four_nibbles(Words values, int half) {
  return _mm512_and_si512(half ? _mm512_srli_epi16(values, 4) : values, _mm512_set1_epi8(15));
}

// Twice the e2m1 values, plus 12.
inline Words fp4_bytes(Words codes) {
  const __m128i numbers = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), codes);
}

// Stores 32 integers and returns their sum. IN_NIBBLES: in the order of the inputs that `four_nibbles`
// returns.
template <bool IN_NIBBLES>
inline int32_t store_bytes(int8_t* to, Lanes low, Lanes high) {
  const __m512i first = _mm512_cvtps_epi32(low), second = _mm512_cvtps_epi32(high);
  __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(first)),
                                         _mm512_cvtepi32_epi8(second), 1);
  if constexpr (IN_NIBBLES) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    both = _mm256_shuffle_epi8(both, _mm256_broadcastsi128_si256(order));
  }
  _mm256_storeu_si256((__m256i*)to, both);
  return _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
}

// Stores the integers nearest to 32 elements times `by`; zeros if `by` is NaN. `lost` is positive if
// rounding changes the elements below the largest by more than 1/40 (root mean square).
template <bool IN_NIBBLES>
inline int32_t store_bytes(int8_t* to, Lanes low, Lanes high, float by, float* lost) {
  const Mask is_known = by == by ? 0xffff : 0;
  low = keep(is_known, mul(low, set1(by))), high = keep(is_known, mul(high, set1(by)));
  const Lanes first = nearest(low), second = nearest(high);
  const Lanes a = sub(low, first), b = sub(high, second);
  const Lanes largest = set1(126), none = zero();
  const Lanes c = select(is_greater(_mm512_abs_ps(first), largest), none, low);
  const Lanes d = select(is_greater(_mm512_abs_ps(second), largest), none, high);
  const Lanes changed = fmadd(a, a, mul(b, b)), others = fmadd(c, c, mul(d, d));
  *lost = reduce_add(sub(changed, mul(others, set1(1.0f / (40 * 40)))));
  return store_bytes<IN_NIBBLES>(to, first, second);
}

// Steps into which `store_rest` divides a step of `store_bytes`.
constexpr float REST = 254;
template <bool IN_NIBBLES>
inline int32_t store_rest(int8_t* to, Lanes low, Lanes high, float by) {
  low = mul(low, set1(by)), high = mul(high, set1(by));
  return store_bytes<IN_NIBBLES>(to, mul(sub(low, nearest(low)), set1(REST)),
                                 mul(sub(high, nearest(high)), set1(REST)));
}
#endif

inline Words repeat_word(int32_t word) { return _mm512_set1_epi32(word); }
inline Lanes to_lanes(Words words) { return _mm512_cvtepi32_ps(words); }

#ifdef __AVX512BF16__

constexpr char LEVEL[] = "AVX512-BF16";

using Input = bf16;
using Factor = __m512bh;
constexpr int TURNS = 1;
constexpr int TOKENS = 2;

inline Factor factor(const bf16* pairs, int) { return (Factor)_mm512_loadu_si512(pairs); }

inline Factor repeat(const Input* pair, int) {
  int32_t both;
  std::memcpy(&both, pair, 4);
  return (Factor)_mm512_set1_epi32(both);
}

inline Lanes dot(Lanes sum, Factor a, Factor b) { return _mm512_dpbf16_ps(sum, a, b); }

inline Factor int4_factor(Words words, int pair, int) {
  // Two copies: the lookup uses five bits, of which four matter.
  alignas(64) static const bf16 numbers[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  return (Factor)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * pair),
                                          _mm512_load_si512(numbers));
}

inline Factor fp4_factor(Words words, int pair, int) {
  alignas(64) static const bf16 numbers[32] = {
      0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
      0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
      0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  return (Factor)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * pair),
                                          _mm512_load_si512(numbers));
}

inline Lanes fp4(Words words, int place) {
  const __m512 numbers = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                        -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * place), numbers);
}

inline Lanes int4(Words words, int place) {
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * place), numbers);
}

// Interleaving two tokens puts alternating groups of four elements into each half.
inline void split(const bf16* token, const bf16* next, Factor& low, Factor& high) {
  const __m512i one = _mm512_loadu_si512(token), two = _mm512_loadu_si512(next);
  low = (Factor)_mm512_unpacklo_epi16(one, two);
  high = (Factor)_mm512_unpackhi_epi16(one, two);
}

inline void store_split(bf16* to, Lanes low, Lanes high) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
}

inline void store(bf16* to, Lanes value) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value));
}

inline void store(bf16* to, Lanes low, Lanes high) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// `split` of float32 elements, rounded to bfloat16.
inline void split(const Lanes* token, const Lanes* next, Factor& low, Factor& high) {
  const __m512i one = (__m512i)_mm512_cvtne2ps_pbh(token[1], token[0]);
  const __m512i two = (__m512i)_mm512_cvtne2ps_pbh(next[1], next[0]);
  low = (Factor)_mm512_unpacklo_epi16(one, two);
  high = (Factor)_mm512_unpackhi_epi16(one, two);
}
inline void store_halves(bf16* to, Lanes low, Lanes high) { store_split(to, low, high); }

inline void store_pairs(bf16* to, Lanes first, Lanes second) {
  alignas(64) static const int16_t side_by_side[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(side_by_side), both));
}

// `store_pairs` of elements that bfloat16 represents exactly.
inline void store_exact_pairs(bf16* to, Lanes first, Lanes second) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
  const __m512i high = _mm512_castps_si512(second), mask = _mm512_set1_epi32(int32_t(0xffff0000));
  _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(low, high, mask, 0xf8));
}

inline Lanes rounded(Lanes value) {
  const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(value);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

#else

constexpr char LEVEL[] = "AVX-512";

using Input = float;
using Factor = Lanes;
constexpr int TURNS = 2;
constexpr int TOKENS = 1;

inline Words high_half() { return _mm512_set1_epi32(int32_t(0xffff0000)); }

inline Factor factor(const bf16* pairs, int turn) {
  const __m512i words = _mm512_loadu_si512(pairs);
  return _mm512_castsi512_ps(turn == 0 ? _mm512_slli_epi32(words, 16)
                                       : _mm512_and_si512(words, high_half()));
}

inline Factor repeat(const Input* pair, int turn) { return _mm512_set1_ps(pair[turn]); }

inline Lanes dot(Lanes sum, Factor a, Factor b) { return _mm512_fmadd_ps(a, b, sum); }

inline Words no_words() { return _mm512_setzero_si512(); }
inline void store(int16_t* to, Words words) { _mm512_storeu_si512(to, words); }

inline Lanes magnitude(Lanes x) { return _mm512_abs_ps(x); }
inline Lanes power_below(Lanes x) {
  return _mm512_and_ps(x, _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000)));
}

inline Words to_pairs(Lanes value) {
  const __m512i words = _mm512_cvtps_epi32(value);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, words, _mm512_slli_epi32(words, 16));
}

template <int MOVED>
inline Words scaled_pair(Words value, Words by, Words plus) {
  return _mm512_add_epi16(_mm512_mulhrs_epi16(_mm512_slli_epi16(value, MOVED), by), plus);
}

inline Words dot(Words sum, Words a, Words b) {
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
  // Keeps the order of the additions: the compiler's order would need more registers than exist.
  asm volatile("" : "+v"(sum));
  return sum;
}

template <int ROWS>
inline void dot_pairs(const int16_t* x, int64_t stride, const int16_t* weights, int64_t pairs,
                      Words (&sums)[ROWS]) {
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) sums[r] = no_words();
  for (int64_t k = 0; k < pairs; ++k) {
    const Words pair = load_words(weights + k * 32);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      int32_t both;
      std::memcpy(&both, x + r * stride + 2 * k, 4);
      sums[r] = dot(sums[r], pair, repeat_word(both));
    }
  }
}

inline Words int4_pair(Words words, int pair) {
  return _mm512_and_si512(_mm512_srli_epi16(words, 4 * pair), _mm512_set1_epi16(15));
}

inline Words fp4_pair(Words words, int pair) {
  // Two copies: the lookup uses five bits, of which four matter.
  alignas(64) static const int16_t numbers[32] = {
      0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
      0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * pair), _mm512_load_si512(numbers));
}

inline Words int8_pair(const uint8_t* from) {
  const __m128i first = _mm_loadu_si128((const __m128i*)from);
  const __m128i second = _mm_loadu_si128((const __m128i*)(from + 16));
  const __m256i low = _mm256_castsi128_si256(_mm_unpacklo_epi8(first, second));
  return _mm512_cvtepi8_epi16(
      _mm256_inserti128_si256(low, _mm_unpackhi_epi8(first, second), 1));
}

inline void store_int16(int16_t* to, Lanes value) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(value)));
}

inline void split(const bf16* token, const bf16*, Factor& low, Factor& high) {
  low = factor(token, 0), high = factor(token, 1);
}

// The bits of `value` rounded to bfloat16, in the high half of each lane.
inline Words round_bits(Lanes value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  // Set the quiet bit, so that NaN does not become infinity.
  const __m512i found = _mm512_mask_or_epi32(up, is_nan(value), bits, _mm512_set1_epi32(0x400000));
  return _mm512_and_si512(found, high_half());
}

inline void store_pairs(bf16* to, Lanes first, Lanes second) {
  const __m512i even = _mm512_srli_epi32(round_bits(first), 16);
  _mm512_storeu_si512(to, _mm512_or_si512(even, round_bits(second)));
}

inline void store_split(bf16* to, Lanes low, Lanes high) { store_pairs(to, low, high); }

inline void store(bf16* to, Lanes value) {
  const __m512i narrow = _mm512_srli_epi32(round_bits(value), 16);
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(narrow));
}

inline void store(bf16* to, Lanes low, Lanes high) { store(to, low), store(to + 16, high); }

inline Factor factor(const float* numbers, int turn) { return load(numbers + 16 * turn); }
inline void split(const Lanes* token, const Lanes*, Factor& low, Factor& high) {
  low = token[0], high = token[1];
}
inline void store_halves(bf16* to, Lanes low, Lanes high) { store(to, low, high); }

inline Lanes rounded(Lanes value) { return _mm512_castsi512_ps(round_bits(value)); }

#endif
