// Waiting of calls: timeout, polling, and the thread that waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace allranks {

// A copy of at least this size takes so long that the caller's locks (the GIL) are released for it.
constexpr size_t kReleaseBytes = 32 << 10;

// Interface of the core to the thread that makes a call. The binding derives a class that handles the GIL and Python's
// signals. The progress thread and the core's tests need neither.
class Caller {
 public:
  virtual ~Caller() = default;
  virtual void release() {}                     // called before blocking: lets other threads of the process run
  virtual bool interrupted() { return false; }  // polled while blocked; returns whether the call must stop
  virtual std::string where() { return {}; }    // the call site; requested for errors and records
};

// Lock a mutex. Its holder may need the caller's own locks (the GIL) to continue, so the caller releases them before it
// blocks. Otherwise both would deadlock.
inline std::unique_lock<std::mutex> lock_releasing(std::mutex& mutex, Caller& caller) {
  std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) {
    caller.release();
    lock.lock();
  }
  return lock;
}

// About twice the maximum cost of a futex wake-up. A rank that received data more recently polls instead of sleeping,
// because more data may follow.
constexpr int64_t kStirredNs = 100'000;

// Polling of a rank before it sleeps. A yield gives the CPU to a thread that is ready to run. If no thread is ready,
// the rank detects the end of its wait sooner than the kernel could wake it. docs/decisions/132 has the measurements.
struct Polling {
  int64_t spin_ns = 0;            // spins first: the rank keeps its CPU and the caller's locks
  int64_t yield_ns = kStirredNs;  // then yields its CPU repeatedly
};

// Time limit and polling of one call. The clock is first read when the call has to wait, so that a call that completes
// immediately does not pay for it.
struct Patience {
  Caller& caller;
  int64_t timeout_ns;
  Polling polling;
  int64_t deadline_ns = 0;  // absolute; 0: not computed yet
  bool final = true;        // a missed deadline ends the group; false: it ends only this wait
};

}  // namespace allranks
