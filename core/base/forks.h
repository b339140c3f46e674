// Protection of forked children, such as the workers of a data loader (docs/decisions/068).
//
// A forked child has a copy of its parent's objects, but none of its threads. Locks keep their state of that moment.
// An object that a thread was modifying stays half modified. A child therefore does not use its copies:
//
// - Descriptors (Fd) are closed in the child immediately after the fork. An open copy would hide the parent's death.
// - Segments (Mapping) are not mapped in the child. The child can therefore neither read nor write messages.
// - Objects with threads or locks are deleted only by the process that created them (make_owned). The child's copy
//   stays unchanged until the child exits.
// - The methods of such objects compare forks() with its value at their creation. If it differs, they raise an error.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace allranks::sys {

namespace detail {
extern std::atomic<uint32_t> forks;
}

// Return the number of forks between the process that loaded this library and this process. Relaxed: the value changes
// only in the child of a fork, before the child has other threads.
inline uint32_t forks() { return detail::forks.load(std::memory_order_relaxed); }

// Deleter that deletes an object only in the process that created it.
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

// Thrown in a child that a signal handler forked during a call. The call continues in the parent. Forked is not derived
// from Error: handlers of Error take locks that threads of the parent may have held during the fork.
struct Forked {
  bool signalled;  // the handler has also raised an exception
};

// Register or unregister a descriptor that a forked child closes. close_descriptor unregisters and closes it.
void own_descriptor(int fd);
void disown_descriptor(int fd) noexcept;
void close_descriptor(int fd) noexcept;

}  // namespace allranks::sys
