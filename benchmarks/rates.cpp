// What the cores do at most: products without memory, and reading memory without products. Loaded by
// benchmarks/kernels.py. Each call returns seconds.

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {

#ifdef __AMX_BF16__
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Four independent sums of 16 x 16 numbers, 32 inputs each.
void multiply(int64_t turns) {
  const TileConfig config;
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t i = 0; i < turns; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
constexpr int64_t OPERATIONS = 4 * 2 * 16 * 16 * 32;
#else
#if defined(__AVX512BF16__)
#define STEP(sum) "vdpbf16ps %%zmm0, %%zmm0, %%zmm" #sum "\n"
constexpr int64_t PRODUCTS = 32;
#elif defined(__AVX512F__)
#define STEP(sum) "vfmadd231ps %%zmm0, %%zmm0, %%zmm" #sum "\n"
constexpr int64_t PRODUCTS = 16;
#else
#define STEP(sum) "vfmadd231ps %%ymm0, %%ymm0, %%ymm" #sum "\n"
constexpr int64_t PRODUCTS = 8;
#endif
// Twelve independent sums.
void multiply(int64_t turns) {
  asm volatile("vpxor %%xmm0, %%xmm0, %%xmm0\n" ::: "xmm0");
  for (int64_t i = 0; i < turns; ++i)
    asm volatile(STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10)
                 STEP(11) STEP(12)
                 ::: "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
                     "xmm11", "xmm12");
}
constexpr int64_t OPERATIONS = 12 * 2 * PRODUCTS;
#endif

}  // namespace

extern "C" {

// Seconds for about `operations` floating-point operations (a multiply-add is two): of bfloat16 with
// AVX512-BF16 or AMX, else of float32.
double multiply_only(int64_t operations, int64_t threads) {
#ifdef __AMX_BF16__
  syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
#endif
  const double start = omp_get_wtime();
#pragma omp parallel num_threads(threads)
  multiply(operations / OPERATIONS / threads);
  return omp_get_wtime() - start;
}

// Seconds to read `bytes` from `from`, each thread its part from begin to end.
double read_only(const char* from, int64_t bytes, int64_t threads) {
  constexpr int64_t AHEAD = 4096;
  const double start = omp_get_wtime();
#pragma omp parallel num_threads(threads)
  {
    const int64_t part = bytes / threads / 256 * 256;
    const char* at = from + part * omp_get_thread_num();
    __m256i sum = _mm256_setzero_si256();
    for (const char* end = at + part; at < end; at += 256)
      for (int i = 0; i < 256; i += 32) {
        if (i % 64 == 0) _mm_prefetch(at + i + AHEAD, _MM_HINT_T1);
        sum = _mm256_xor_si256(sum, _mm256_loadu_si256((const __m256i*)(at + i)));
      }
    asm volatile("" ::"x"(sum));
  }
  return omp_get_wtime() - start;
}

}  // extern "C"
