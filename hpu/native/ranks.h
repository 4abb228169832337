// All-reduce over the ranks of a model on this host, which are processes, in shared memory. Part of
// decode.cpp.

#pragma once

#include <sched.h>
#include <signal.h>
#include <time.h>

#include <atomic>

#include "products.h"

extern "C" {

// The memory begins with a RankState per rank. Two slots per rank follow, of `capacity` float32 elements
// each. A rank alternates between its slots: before it writes to a slot again, all ranks have arrived at
// a barrier (`meet`) after reading the slot.
struct Group {
  int64_t rank, size, capacity;
  uint8_t* memory;
  int64_t meetings;  // barriers that this rank has passed
  int64_t lost;      // 0, or 1 + the rank of a process that has ended: all later sums are wrong
};

}  // extern "C"

namespace {

// State that a rank publishes.
struct alignas(64) RankState {
  std::atomic<int64_t> meetings;
  int64_t process;
};

constexpr int SPINS = 4096;                 // polls of another rank before yielding the core
constexpr int64_t WAIT_NS = 50'000;         // interval between polls during a long wait
constexpr int64_t LOOKS_PER_CHECK = 2'000;  // polls between checks that the other process is alive

inline RankState& state_of(const Group& g, int64_t rank) { return ((RankState*)g.memory)[rank]; }

inline float* slot_of(const Group& g, int64_t rank) {
  float* slots = (float*)(g.memory + g.size * sizeof(RankState));
  return slots + (rank * 2 + (g.meetings & 1)) * g.capacity;
}

// Waits until the rank arrives at the barrier `meeting`; false if its process has ended.
inline bool await(const RankState& other, int64_t meeting) {
  const auto has_come = [&] {
    return other.meetings.load(std::memory_order_acquire) >= meeting;
  };
  for (int i = 0; i < SPINS; ++i) {
    if (has_come()) return true;
    _mm_pause();
  }
  for (int i = 0; i < SPINS; ++i) {
    if (has_come()) return true;
    sched_yield();
  }
  for (int64_t look = 1; !has_come(); ++look) {
    const timespec pause{0, WAIT_NS};
    nanosleep(&pause, nullptr);
    if (look % LOOKS_PER_CHECK == 0 && kill(pid_t(other.process), 0) != 0) return has_come();
  }
  return true;
}

// Barrier over the ranks: waits until all ranks have written their slots. A rank may read the slots
// until its next barrier. Called by one thread.
inline void meet(Group& g) {
  const int64_t meeting = g.meetings + 1;
  state_of(g, g.rank).meetings.store(meeting, std::memory_order_release);
  for (int64_t rank = 0; rank < g.size && !g.lost; ++rank)
    if (rank != g.rank && !await(state_of(g, rank), meeting)) g.lost = 1 + rank;
}

// Calls `take(i, sum)` for each 16 of `count` elements with the sum over the ranks' slots, added in the
// same order on all ranks. Called by all threads of a parallel region, after a barrier.
template <typename Take>
void sum_over_ranks(Group& g, int64_t count, Take take) {
  if (omp_get_thread_num() == 0) meet(g);
  wait_for_all();
#pragma omp for nowait
  for (int64_t i = 0; i < count; i += 16) {
    Lanes sum = load(slot_of(g, 0) + i);
    for (int64_t rank = 1; rank < g.size; ++rank) sum = add(sum, load(slot_of(g, rank) + i));
    take(i, sum);
  }
  wait_for_all();
  if (omp_get_thread_num() == 0) ++g.meetings;
  wait_for_all();
}

}  // namespace
