// A barrier for the threads of a parallel region. Part of decode.cpp.
//
// GNU's OpenMP spins before it sleeps, but hardly at all once the process has more threads in all of its
// pools than cores. A second thread that runs torch operators is enough for that: a barrier then takes
// 25 us instead of 0.1 us, and a decode has hundreds of barriers.

#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace {

class Barrier {
 public:
  // Returns when all `threads` threads have arrived.
  void wait(int32_t threads) {
    const int32_t turn = turn_.load(std::memory_order_acquire);
    if (come_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      come_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1);
      if (sleepers_.load() > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
      return;
    }
    for (int i = 0; i < SPINS; ++i) {
      if (turn_.load(std::memory_order_acquire) != turn) return;
      _mm_pause();
    }
    sleepers_.fetch_add(1);
    while (turn_.load() == turn) futex(FUTEX_WAIT_PRIVATE, turn);
    sleepers_.fetch_sub(1);
  }

 private:
  // Polls before a thread sleeps: about as long as going to sleep and waking up. Equal to GOMP_SPINCOUNT
  // in config/loading/env.py.
  static constexpr int SPINS = 1000;

  void futex(int operation, int32_t value) {
    syscall(SYS_futex, &turn_, operation, value, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<int32_t> come_{0};
  alignas(64) std::atomic<int32_t> turn_{0};
  std::atomic<int32_t> sleepers_{0};
};

// The barrier of this thread's parallel region.
thread_local Barrier* own_barrier = nullptr;

// Called by all threads of a parallel region that has set own_barrier.
inline void wait_for_all() { own_barrier->wait(omp_get_num_threads()); }

}  // namespace
