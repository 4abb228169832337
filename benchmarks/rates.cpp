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
  _tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3);
  _tile_zero(4), _tile_zero(5), _tile_zero(6), _tile_zero(7);
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
#define DOT(sum) "vdpbf16ps %%zmm30, %%zmm31, %%zmm" #sum "\n"
// Sixteen independent sums of 16 numbers, 2 inputs each.
void multiply(int64_t turns) {
  asm volatile("vpxorq %%zmm30, %%zmm30, %%zmm30\nvpxorq %%zmm31, %%zmm31, %%zmm31\n" ::: "zmm30", "zmm31");
  for (int64_t i = 0; i < turns; ++i)
    asm volatile(DOT(0) DOT(1) DOT(2) DOT(3) DOT(4) DOT(5) DOT(6) DOT(7) DOT(8) DOT(9) DOT(10)
                 DOT(11) DOT(12) DOT(13) DOT(14) DOT(15)
                 ::: "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9",
                     "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15");
}
constexpr int64_t OPERATIONS = 16 * 2 * 16 * 2;
#endif

}  // namespace

extern "C" {

// Seconds for about `operations` floating-point operations (a multiply-add is two) in bfloat16.
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
    __m512i sum = _mm512_setzero_si512();
    for (const char* end = at + part; at < end; at += 256)
      for (int i = 0; i < 256; i += 64) {
        _mm_prefetch(at + i + AHEAD, _MM_HINT_T0);
        sum = _mm512_xor_si512(sum, _mm512_loadu_si512(at + i));
      }
    asm volatile("" ::"v"(sum));
  }
  return omp_get_wtime() - start;
}

}  // extern "C"
