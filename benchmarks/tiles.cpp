// Products of AMX tiles in the inner loop of a matmul of 32 rows and 32 outputs, whose operands are in
// the L1 cache. Loaded by benchmarks/tiles.py.

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <ctime>

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

alignas(64) uint16_t memory[8][4][512];

double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// Loads one of four tiles of a step.
#define LOAD(tile, part) _tile_loadd(tile, memory[i % 8][part], 64)

// No loads; the operands are tiles with values.
void products_alone(int64_t steps) {
  int64_t i = 0;
  LOAD(4, 0);
  LOAD(5, 1);
  LOAD(6, 2);
  LOAD(7, 3);
  for (; i < steps; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

void loads_alone(int64_t steps) {
  for (int64_t i = 0; i < steps; ++i) {
    LOAD(4, 0);
    LOAD(6, 2);
    LOAD(7, 3);
    LOAD(5, 1);
  }
}

void with_loads(int64_t steps) {
  for (int64_t i = 0; i < steps; ++i) {
    LOAD(4, 0);
    LOAD(6, 2);
    _tile_dpbf16ps(0, 4, 6);
    LOAD(7, 3);
    _tile_dpbf16ps(1, 4, 7);
    LOAD(5, 1);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Zeroes each operand after its last use.
void with_zeros(int64_t steps) {
  for (int64_t i = 0; i < steps; ++i) {
    LOAD(4, 0);
    LOAD(6, 2);
    LOAD(7, 3);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_zero(4);
    LOAD(5, 1);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
  }
}

}  // namespace

extern "C" {

// Seconds of this thread's processor time for `steps` steps of four products or loads.
double run(int64_t kind, int64_t steps) {
  syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  const TileConfig config;
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  void (*const kinds[])(int64_t) = {products_alone, loads_alone, with_loads, with_zeros};
  const double start = now();
  kinds[kind](steps);
  const double seconds = now() - start;
  _tile_release();
  return seconds;
}

}  // extern "C"
