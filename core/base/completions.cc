#include "base/completions.h"

#include <atomic>
#include <chrono>
#include <utility>

namespace allranks {

namespace {

std::atomic<Completions*>& current() {
  static std::atomic<Completions*> instance = new Completions;  // never deleted: threads may end after static objects
  return instance;
}

}  // namespace

void Completions::add(uint64_t ticket) {
  {
    const std::lock_guard lock(lock_);
    tickets_.push_back(ticket);
  }
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

Completions& completions() { return *current(); }

void renew_completions() { current() = new Completions; }

}  // namespace allranks
