// How a call waits: how long, with how much spinning, and which thread waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace allranks {

// From this size on a copy takes long enough that other threads should run meanwhile.
constexpr size_t kReleaseBytes = 32 << 10;

// The thread that makes a call, seen from the core. The binding derives one for the GIL and
// Python's signals; the progress thread and the core's tests need neither.
class Caller {
 public:
  virtual ~Caller() = default;
  virtual void release() {}                     // before blocking: let other threads of the process run
  virtual bool interrupted() { return false; }  // now and then while blocked: should the call give up?
  virtual std::string where() { return {}; }    // where in the program the call stands; asked when it has failed
};

// A lock may be held by a thread that needs the caller's own locks (the GIL) to go on.
inline std::unique_lock<std::mutex> lock_releasing(std::mutex& mutex, Caller& caller) {
  std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) {
    caller.release();
    lock.lock();
  }
  return lock;
}

// About twice what a futex wake-up may cost. A rank that got something so recently does not sleep: more may follow.
constexpr int64_t kStirredNs = 100'000;

// How a rank waits before it sleeps. A yield leaves the CPU to a thread that wants it. If none does, the rank sees the
// end of its wait sooner than the kernel could wake it. docs/decisions/132 has the measurements.
struct Polling {
  int64_t spin_ns = 0;            // keeps its CPU, and the caller's locks
  int64_t yield_ns = kStirredNs;  // then gives its CPU away again and again
};

// One call's patience. The clock is first read when something is not there at once.
struct Patience {
  Caller& caller;
  int64_t timeout_ns;
  Polling polling;
  int64_t deadline_ns = 0;  // absolute; 0: not computed yet
  bool final = true;        // whether a missed deadline ends the group, or only this wait
};

}  // namespace allranks
