#include "base/completions.h"

#include <chrono>
#include <utility>

namespace allranks {

void Completions::add(uint64_t ticket) {
  {
    const std::lock_guard lock(lock_);
    tickets_.push_back(ticket);
  }
  // After unlocking, so that the woken thread does not block on the mutex.
  changed_.notify_one();
}

std::vector<uint64_t> Completions::take(int64_t timeout_ns) {
  std::unique_lock lock(lock_);
  const auto some = [this] { return !tickets_.empty(); };
  if (timeout_ns < 0) {
    changed_.wait(lock, some);
  } else {
    changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), some);
  }
  return std::exchange(tickets_, {});
}

}  // namespace allranks
