#include "base/forks.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <set>

namespace allranks::sys {

std::atomic<uint32_t> detail::forks = 0;

namespace {

struct Descriptors {
  std::mutex lock;  // held during a fork, so that the child's copy has no half-registered descriptor
  std::set<int> open;
};

Descriptors& descriptors() {
  static auto* const all = new Descriptors;  // never deleted, because static objects close descriptors at process exit
  return *all;
}

const bool registered = [] {
  const auto before = [] { descriptors().lock.lock(); };
  const auto in_parent = [] { descriptors().lock.unlock(); };
  const auto in_child = [] {
    detail::forks.fetch_add(1, std::memory_order_relaxed);  // relaxed: the child has only this thread
    auto& [lock, open] = descriptors();
    // close, and never shutdown, which would also end the parent's connection.
    for (const int fd : open) close(fd);
    open.clear();
    lock.unlock();
  };
  if (pthread_atfork(before, in_parent, in_child) != 0) std::abort();  // fails only without memory for three pointers
  return true;
}();

}  // namespace

void own_descriptor(int fd) {
  auto& [lock, open] = descriptors();
  const std::lock_guard held(lock);
  open.insert(fd);
}

void disown_descriptor(int fd) noexcept {
  auto& [lock, open] = descriptors();
  const std::lock_guard held(lock);
  open.erase(fd);
}

void close_descriptor(int fd) noexcept {
  auto& [lock, open] = descriptors();
  // One lock for both steps: a fork between them would leave the descriptor open in the child.
  const std::lock_guard held(lock);
  open.erase(fd);
  close(fd);
}

}  // namespace allranks::sys
