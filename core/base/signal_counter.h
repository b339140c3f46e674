// A counter in memory that processes of one host share: some processes add to it, one process waits for additions.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/sys.h"
#include "base/waiting.h"

namespace allranks {

// All zero at first. It fills a cache line, because the counters of other processes lie beside it.
struct alignas(64) SignalCounter {
  std::atomic<uint32_t> count;     // a futex word
  std::atomic<uint32_t> sleepers;  // threads in futex_wait. A killed one stays counted, so a wake-up may reach none.

  // Add 1. A thread that sees the addition also sees all earlier writes of this thread.
  void add() {
    // seq_cst, here and in wait_beyond: either the sleeper sees the count, or this thread sees the sleeper.
    count.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) sys::futex_wake_all(count);
  }

  // Wait until the count differs from `seen`. Return false after the timeout or a signal of the system.
  bool wait_beyond(uint32_t seen, int64_t timeout_ns) {
    const auto beyond = [&] { return count.load(std::memory_order_acquire) != seen; };
    const int64_t began = sys::now_ns();
    while (!beyond() && sys::now_ns() - began < kStirredNs) {
      for (int i = 0; i < 8 && !beyond(); i++) sys::yield();
    }
    if (beyond()) return true;
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (count.load(std::memory_order_seq_cst) == seen) sys::futex_wait(count, seen, timeout_ns);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    return beyond();
  }
};
static_assert(sizeof(SignalCounter) == 64);

}  // namespace allranks
