// A connected TCP socket that never blocks: bytes go in and come out as far as the kernel takes and has them.
//
// Small reads are served from a stage, so that a header and the few bytes behind it cost one system call. Large writes
// may lend their memory instead of having it copied: the kernel sends from the pages themselves, which it gets by way
// of a pipe (vmsplice, splice). Lent memory must not change until the peer has sent a receipt for all of it. TCP's
// acknowledgement is not enough, as between namespaces of one host the peer's kernel holds the same pages.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <vector>

#include "base/sys.h"

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
  // As put; the memory is lent.
  size_t lend(const void* data, size_t nbytes);
  // Hands on what was taken and lies in the pipe still. True: nothing is left there.
  bool drain();
  bool drained() const { return in_pipe_ == 0; }
  size_t in_pipe() const { return in_pipe_; }
  // The bytes that there were, at most nbytes.
  size_t get(void* to, size_t nbytes);

  // A put or a get has found the connection ended. What has come before can still be got.
  bool ended() const { return ended_.load(std::memory_order_relaxed); }
  // errno of what found it; 0: the peer has closed it.
  int error() const { return error_.load(std::memory_order_relaxed); }
  // The last put could not be taken whole.
  bool full() const { return full_.load(std::memory_order_relaxed); }

  int fd() const { return fd_.load(std::memory_order_acquire); }  // -1: not open
  explicit operator bool() const { return fd() >= 0; }
  void drop() {
    fd_.store(-1, std::memory_order_relaxed);
    owned_.reset();
    pipe_in_.reset();
    pipe_out_.reset();
    in_pipe_ = 0;
  }

 private:
  static constexpr size_t kStage = 8 << 10;

  size_t receive(std::byte* to, size_t nbytes);
  bool writable();
  void refused();

  sys::Fd owned_;
  std::atomic<int> fd_ = -1;
  sys::Fd pipe_in_;
  sys::Fd pipe_out_;
  size_t in_pipe_ = 0;
  bool lends_ = true;  // the kernel has not refused to
  std::atomic<bool> ended_ = false;
  std::atomic<int> error_ = 0;
  std::atomic<bool> full_ = false;
  std::vector<std::byte> stage_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace allranks
