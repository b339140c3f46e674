// A connected TCP socket of which nobody ever waits: bytes go in and come out as far as the kernel takes and has them.
//
// Small reads are served from a stage, so that a header and the few bytes behind it cost one system call.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <vector>

#include "../sys/sys.h"

namespace allranks {

// One thread at a time puts, one gets.
class Stream {
 public:
  Stream() = default;  // not connected yet: nothing is taken, nothing is there
  Stream(const Stream&) = delete;

  // From any thread, once.
  void open(sys::Fd fd) {
    owned_ = std::move(fd);
    fd_.store(owned_.get(), std::memory_order_release);
  }

  // The bytes that were taken; 0: the kernel's buffer is full, or the connection has ended.
  size_t put(iovec* parts, size_t n);
  size_t put(const void* data, size_t nbytes);
  // The bytes that there were, at most nbytes.
  size_t get(void* to, size_t nbytes);

  // A put or a get has found the connection ended. What has come before can still be got.
  bool ended() const { return ended_.load(std::memory_order_relaxed); }
  int error() const { return error_; }  // errno of the get that found it; 0: the peer has closed it
  // The last put could not be taken whole.
  bool full() const { return full_.load(std::memory_order_relaxed); }

  int fd() const { return fd_.load(std::memory_order_acquire); }  // -1: not open
  explicit operator bool() const { return fd() >= 0; }
  void drop() {
    fd_.store(-1, std::memory_order_relaxed);
    owned_.reset();
  }

 private:
  static constexpr size_t kStage = 8 << 10;

  size_t receive(std::byte* to, size_t nbytes);

  sys::Fd owned_;
  std::atomic<int> fd_ = -1;
  std::atomic<bool> ended_ = false;
  int error_ = 0;
  std::atomic<bool> full_ = false;
  std::vector<std::byte> stage_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace allranks
