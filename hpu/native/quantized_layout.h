// Layout of quantized weights. Part of decode.cpp.

#pragma once

#include "products.h"

namespace {

// A panel consists of groups; a group has its scales and minima, followed by blocks of values of 32
// inputs.
constexpr int64_t BLOCK = 32;
constexpr bool has_4_bits(int64_t kind) {
  return kind == INT4_GROUPS || kind == INT4_STORED || kind == MXFP4;
}
constexpr bool is_stored(int64_t kind) { return kind == INT8_STORED || kind == INT4_STORED; }
constexpr bool has_row_scales(int64_t kind) { return kind == INT8_ROWS || kind == INT16_ROWS; }
constexpr bool has_minima(int64_t kind) { return kind == INT4_GROUPS || is_stored(kind); }
constexpr int64_t table_bytes(int64_t kind) {
  if (kind == MXFP4) return PANEL;
  const int64_t width = is_stored(kind) ? 4 : 2;
  return has_row_scales(kind) ? 0 : PANEL * width * (has_minima(kind) ? 2 : 1);
}
constexpr int64_t block_bytes(int64_t kind) {
  return kind == INT16_ROWS ? PANEL * BLOCK * 2 : PANEL * BLOCK / (has_4_bits(kind) ? 2 : 1);
}

// Blocks per group.
template <int KIND>
inline int64_t blocks_of(const Product& by) {
  return is_stored(KIND) ? by.group / BLOCK : 1;
}
template <int KIND>
inline int64_t group_bytes(int64_t blocks) {
  return table_bytes(KIND) + blocks * block_bytes(KIND);
}
template <int KIND>
inline int64_t panel_bytes(int64_t inputs, int64_t blocks) {
  return inputs / (blocks * BLOCK) * group_bytes<KIND>(blocks);
}

template <int KIND>
inline Lanes scales_of(const uint8_t* group) {
  if constexpr (is_stored(KIND)) return load((const float*)group);
  else if constexpr (KIND == MXFP4) return load_powers(group);
  else return load_half(group);
}
template <int KIND>
inline Lanes minima_of(const uint8_t* group) {
  if constexpr (is_stored(KIND)) return load((const float*)group + PANEL);
  else return load_half(group + 32);
}

// Bits of the largest magnitude; bits of NaN or infinity if any element is not finite.
inline int largest_bits(const bf16* x, int64_t size) {
  __m256i most = _mm256_setzero_si256();
  for (int64_t i = 0; i < size; i += 16) {
    const __m256i bits = _mm256_loadu_si256((const __m256i*)(x + i));
    most = _mm256_max_epu16(most, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
  }
  const __m128i half =
      _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
  return 0xffff ^ _mm_extract_epi16(least, 0);
}

}  // namespace
