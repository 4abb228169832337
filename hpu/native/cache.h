// KV cache formats: how a head of a token is stored (see hpu/quantization/kv_cache.py). Part of
// decode.cpp.
//
// Members of a format:
//
// Number         element type of the tiles that attention reads: the cache itself, or converted tiles
// CONVERTS       whether tiles are converted
// TOKEN_SCALES   whether each row has a scale; formats that use `layer_scale` have scales per layer
// row_bytes      bytes of a head of `size` elements
// load(row, d)   loads 16 elements from element d on, without scales
// write          stores a head of a layer with `scale`
// token_scale, layer_scale   factors of loaded elements

#pragma once

#include "model.h"

namespace {

// The model's own data type; attention reads the cache in place.
struct AsBfloat16 {
  using Number = bf16;
  static constexpr bool CONVERTS = false, TOKEN_SCALES = false;

  static constexpr int64_t row_bytes(int64_t size) { return size * int64_t(sizeof(bf16)); }
  static float layer_scale(float) { return 1; }
  static void write(uint8_t* row, const bf16* x, int64_t size, float) {
    std::memcpy(row, x, size * sizeof(bf16));
  }
};

// float16; larger magnitudes are stored as the largest float16.
struct AsFloat16 {
  using Number = Input;
  static constexpr bool CONVERTS = true, TOKEN_SCALES = false;

  static constexpr int64_t row_bytes(int64_t size) { return size * 2; }
  static float layer_scale(float) { return 1; }
  static float token_scale(const uint8_t*, int64_t) { return 1; }
  static Lanes load(const uint8_t* row, int64_t d) { return load_half(row + 2 * d); }
  static void write(uint8_t* row, const bf16* x, int64_t size, float) {
    for (int64_t d = 0; d < size; d += 16)
      store_half(row + 2 * d, within(::load(x + d), 65504.0f));
  }

  // The order of the operands preserves NaN.
  static Lanes within(Lanes x, float most) {
    return sub(zero(), max(set1(-most), sub(zero(), max(set1(-most), x))));
  }
};

// Integers from -127 to 127, followed by the float32 scale of the row.
struct AsInt8 {
  using Number = Input;
  static constexpr bool CONVERTS = true, TOKEN_SCALES = true;
  static constexpr float MOST = 127, MIN_AMAX = 1e-30f;

  static constexpr int64_t row_bytes(int64_t size) { return size + int64_t(sizeof(float)); }
  static float layer_scale(float) { return 1; }
  static float token_scale(const uint8_t* row, int64_t size) {
    float scale;
    std::memcpy(&scale, row + size, sizeof(scale));
    return scale;
  }
  static Lanes load(const uint8_t* row, int64_t d) { return load_int8(row + d); }
  static void write(uint8_t* row, const bf16* x, int64_t size, float) {
    Lanes most = zero(), nothing = zero();
    for (int64_t d = 0; d < size; d += 16) {
      const Lanes v = ::load(x + d);
      most = max(most, max(v, sub(zero(), v)));
      // 0, or NaN if an element is not finite: max alone may drop NaN.
      nothing = fmadd(v, zero(), nothing);
    }
    const float amax = reduce_max(most) + reduce_add(nothing);
    const float scale = amax / MOST;
    // The same rounding as torch's division of a scalar by a tensor.
    const Lanes inverse = set1(amax > MIN_AMAX ? 1 / amax * MOST : 0.0f);
    for (int64_t d = 0; d < size; d += 16) store_int8(row + d, nearest(mul(::load(x + d), inverse)));
    std::memcpy(row + size, &scale, sizeof(scale));
  }
};

// FP8 e4m3 with a scale per layer; larger magnitudes are stored as the largest e4m3.
struct AsFp8 {
  using Number = Input;
  static constexpr bool CONVERTS = true, TOKEN_SCALES = false;

  static constexpr int64_t row_bytes(int64_t size) { return size; }
  // load_fp8 returns elements divided by 256.
  static float layer_scale(float scale) { return scale * 256; }
  static float token_scale(const uint8_t*, int64_t) { return 1; }
  static Lanes load(const uint8_t* row, int64_t d) { return load_fp8(row + d); }
  static void write(uint8_t* row, const bf16* x, int64_t size, float scale) {
    alignas(64) float wide[MOST_HEAD];
    widen(x, size, wide);
    const float inverse = 1 / scale;
    // No branches, so that compilers vectorize the loop.
    for (int64_t d = 0; d < size; ++d) row[d] = encoded(wide[d] * inverse);
  }

  static uint8_t encoded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    // Clamp to 448; NaN gets its own code below.
    const uint32_t bounded = std::min<uint32_t>(magnitude, 0x43e00000);
    // Below 2^-6, the sum with 2^14 rounds to multiples of 2^-9, the smallest subnormal.
    float small;
    std::memcpy(&small, &bounded, 4);
    small += 16384.0f;
    uint32_t subnormal;
    std::memcpy(&subnormal, &small, 4);
    subnormal -= 0x46800000;
    const uint32_t normal = ((bounded + 0x7ffff + (bounded >> 20 & 1)) >> 20) - (120 << 3);
    const uint32_t code = bounded < 0x3c800000 ? subnormal : normal;
    return uint8_t(sign | (magnitude > 0x7f800000 ? 0x7f : code));
  }
};

// Converts `count` rows of `size` elements, `stride` bytes apart, to a tile with rows `size` elements
// apart.
template <typename Format>
inline void convert(const uint8_t* rows, int64_t stride, int64_t count, int64_t size, Input* tile) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < size; d += 16)
      store(tile + i * size + d, Format::load(rows + i * stride, d));
  // The tile-load intrinsic does not tell the compiler which memory it reads.
  asm volatile("" ::"r"(tile) : "memory");
}

// Dequantizes a head to bfloat16, with its scales.
template <typename Format>
inline void dequantize(const uint8_t* row, int64_t size, float layer_scale, bf16* to) {
  const float scale = Format::layer_scale(layer_scale) * Format::token_scale(row, size);
  const Lanes by = set1(scale);
  for (int64_t d = 0; d < size; d += 16) store(to + d, mul(Format::load(row, d), by));
}

// Whether queries are widened to the element type of the converted keys.
template <typename Number>
constexpr bool WIDENS = !std::is_same_v<Number, bf16>;

// Calls `run` with the format of the model's caches.
template <typename Run>
void with_format(const Model& m, Run run) {
  switch (m.cache_format) {
    case FLOAT16_CACHE: return run(AsFloat16());
    case FP8_CACHE: return run(AsFp8());
    case INT8_CACHE: return run(AsInt8());
    default: return run(AsBfloat16());
  }
}

}  // namespace
