// Forked children, such as a data loader's workers.
//
// A forked child has a copy of its parent's objects, but none of its threads. Locks stay as they were at that moment,
// and what a thread was changing stays half changed. A child therefore leaves its copies alone:
//
// - Descriptors (Fd) are closed in the child as soon as it is forked. Otherwise it would hide its parent's death.
// - Segments (Mapping) are not mapped in the child, which can therefore neither read nor write messages.
// - Objects with threads or locks are deleted only by the process that made them (make_owned). The child's copy
//   stays as it is until the child ends.
// - The methods of such objects compare forks() with its value when they were made, and refuse.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace allranks::sys {

namespace detail {
extern std::atomic<uint32_t> forks;
}

// How many forks lie between the process that loaded this library and this one.
inline uint32_t forks() { return detail::forks.load(std::memory_order_relaxed); }

// Deletes an object in the process that made it, and nowhere else.
template <class T>
class Disposer {
 public:
  void operator()(T* object) const noexcept {
    if (forks_ == forks()) delete object;
  }

 private:
  uint32_t forks_ = forks();
};

template <class T, class... Args>
std::shared_ptr<T> make_owned(Args&&... args) {
  return {new T(std::forward<Args>(args)...), Disposer<T>()};
}

// Thrown in a child that was forked within a call, by a signal handler: the call goes on in the parent. It is no
// Error, so that nothing on its way touches what the parent's threads may have held.
struct Forked {
  bool signalled;  // the handler has raised an exception of its own
};

// The descriptors that a child closes. Closing takes one away.
void own_descriptor(int fd);
void disown_descriptor(int fd) noexcept;
void close_descriptor(int fd) noexcept;

}  // namespace allranks::sys
