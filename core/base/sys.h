// Linux interfaces of the core: clock, futexes, sealed memory, owned descriptors.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "base/forks.h"

namespace allranks::sys {

int64_t now_ns();  // CLOCK_MONOTONIC

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Prefetch a cache line for writing: take it from the caches of other CPUs that have read it.
inline void prefetch_to_write(const void* address) {
#if defined(__x86_64__)
  // The compiler's builtin would emit a prefetch for reading. On old CPUs, prefetchw has no effect.
  asm volatile("prefetchw (%0)" ::"r"(address));
#else
  __builtin_prefetch(address, 1);
#endif
}

inline void yield() { sched_yield(); }

// Block all signals except faults in the calling thread, which must be a thread of the core. The kernel delivers a
// signal of the process to any thread that does not block it. Only Python's main thread acts on signals, and it would
// continue to sleep if another thread received the signal.
void leave_signals() noexcept;
// Request exact wake-ups for the calling thread, which sleeps for microseconds at a time. By default the kernel ends a
// sleep up to 50 us late.
void wake_on_time() noexcept;

// Sleep while `word` holds `expected`, for at most `timeout_ns`. Return false after a timeout or a signal.
bool futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns);
void futex_wake_all(std::atomic<uint32_t>& word);

// Scope with rounding to nearest and with denormals, whatever mode the calling thread has set. Results must not depend
// on which thread reduces.
class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  DefaultFloatMode() : before_(__builtin_ia32_stmxcsr()) {
    if (before_ != kDefault) __builtin_ia32_ldmxcsr(kDefault);
  }
  ~DefaultFloatMode() {
    if (before_ != kDefault) __builtin_ia32_ldmxcsr(before_);
  }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // MXCSR after reset: exceptions masked, nearest, denormals
  unsigned before_;
#elif defined(__aarch64__)
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if (before_ != 0) asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~DefaultFloatMode() {
    if (before_ != 0) asm volatile("msr fpcr, %0" ::"r"(before_));
  }

 private:
  uint64_t before_;
#endif
};

// Owner of a file descriptor. In a forked child the descriptor is closed, whatever get() returns.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd);
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), forks_(other.forks_) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  int release();
  void reset();

 private:
  int fd_ = -1;
  uint32_t forks_ = forks();
};

// Return whether the other end of a connected socket is closed: its process has terminated or closed its descriptor.
bool hung_up(int socket);

// Create `bytes` of anonymous memory that can be sent to other processes. It is sealed against a change of size,
// because access after the end of shrunk memory raises SIGBUS. No page is allocated yet.
Fd sealed_memory(const std::string& name, size_t bytes);

// Allocate all pages. If the machine has too little memory, this throws Error; without it, a later write would raise
// SIGBUS.
void allocate(const Fd& memory, size_t bytes);
// Allocate a part of mapped memory, so that writes to it cannot fail. Throws std::bad_alloc. Return false if the kernel
// cannot do this (Linux before 5.14). All memory must then be allocated up front with allocate().
bool allocate_mapped(std::byte* begin, size_t bytes);

class Mapping {
 public:
  Mapping() = default;
  // inherited: a forked child has the mapping, too. populated: all pages are mapped now, so that no page fault follows.
  Mapping(const Fd& fd, size_t bytes, bool inherited = false, bool populated = false);
  Mapping(Mapping&& other) noexcept : Mapping() { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  bool inherited_ = false;
  uint32_t forks_ = forks();
};

}  // namespace allranks::sys
