// What the core needs of Linux: a clock, futexes, sealed memory, owned descriptors.
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

// Brings a line of memory, which other CPUs have read, into this one's cache to be written.
inline void prefetch_to_write(const void* address) {
#if defined(__x86_64__)
  asm volatile("prefetchw (%0)" ::"r"(address));  // the compiler's own would be one to read; without effect on old CPUs
#else
  __builtin_prefetch(address, 1);
#endif
}

inline void yield() { sched_yield(); }

// Called by a thread of the core's: signals are left to threads that are not. The kernel gives one to whichever thread
// looks first, and python's main thread, which alone acts on it, sleeps on if that is another.
void leave_signals() noexcept;
// By the same, if it sleeps for microseconds: the kernel ends a sleep up to 50 us late, unless a thread asks for
// better.
void wake_on_time() noexcept;

// Sleeps while `word` holds `expected`, for at most `timeout_ns`. False: the time was up.
bool futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns);
void futex_wake_all(std::atomic<uint32_t>& word);

// Rounding to nearest and denormals as they are, whatever the calling thread has set: results must not
// depend on which thread reduces.
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
  static constexpr unsigned kDefault = 0x1f80;
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

// A descriptor of this process. In a forked child it has been closed, whatever get() returns.
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

// True when the other end of a connected socket is closed: its process died or let go of it.
bool hung_up(int socket);

// `bytes` of anonymous memory that can be handed to other processes, sealed against a change of size. Nothing is
// allocated yet.
Fd sealed_memory(const std::string& name, size_t bytes);

// Allocates all of it (a full machine is an error here, not a SIGBUS later).
void allocate(const Fd& memory, size_t bytes);
// Allocates a part of mapped memory, so that writing there cannot fail. Throws std::bad_alloc. False: this kernel
// cannot (before Linux 5.14); all of it must be allocated up front.
bool allocate_mapped(std::byte* begin, size_t bytes);

class Mapping {
 public:
  Mapping() = default;
  // inherited: whether a forked child has it, too. populated: with no page fault later.
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
