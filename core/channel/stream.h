// A connected TCP socket that never blocks: it writes as many bytes as the kernel accepts, and reads those that have
// arrived.
//
// Small reads are served from a staging buffer, so that a header and a short payload cost one system call. Large writes
// can lend their memory, which avoids a copy: the kernel sends the pages themselves, which it receives through a pipe
// (vmsplice, splice). Lent memory must not change until the peer has sent a receipt for all of it. TCP's
// acknowledgement is not enough: between namespaces of one host, the peer's kernel holds the same pages.
// docs/decisions/042 has the measurements.
//
// If the group uses a fabric, the bytes travel over a link (fabric.h), and the socket only shows the end of the peer.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <vector>

#include "base/sys.h"
#include "channel/fabric.h"

namespace allranks {

// Thread safety: one thread at a time calls put, lend and drain; one thread at a time calls get.
class Stream {
 public:
  Stream() = default;  // not connected yet: put and get transfer 0 bytes
  Stream(const Stream&) = delete;

  // Set the connected socket. Called once, from any thread. Release pairs with fd(): a thread that reads the descriptor
  // also sees all writes of this thread before the call.
  void open(sys::Fd fd, FabricLink* link = nullptr) {
    link_ = link;
    owned_ = std::move(fd);
    fd_.store(owned_.get(), std::memory_order_release);
  }

  // Write bytes to the socket. Return their number; 0: the kernel's buffer is full, or the connection has ended.
  size_t put(iovec* parts, size_t n);
  size_t put(const void* data, size_t nbytes);
  // Like put, but lend the memory to the kernel.
  size_t lend(const void* data, size_t nbytes);
  // Move lent bytes from the pipe to the socket. Return whether the pipe is empty.
  bool drain();
  // Return whether no call of this process is needed to move the bytes that put and lend have accepted.
  bool drained() const { return in_pipe_ == 0 && (link() == nullptr || link()->sent()); }
  size_t in_pipe() const { return in_pipe_; }
  // Read the bytes that have arrived, at most nbytes. Return their number.
  size_t get(void* to, size_t nbytes);

  // Return whether a put or get has found that the connection has ended. Bytes that arrived before can still be read.
  bool ended() const { return ended_.load(std::memory_order_relaxed); }
  // Return the errno of the call that found the end; 0: the peer has closed the connection.
  int error() const { return error_.load(std::memory_order_relaxed); }
  // Return whether the kernel did not accept all bytes of the last put.
  bool full() const { return full_.load(std::memory_order_relaxed); }
  // Return what poll() is to wait for. With a link, bytes come and go through its own descriptor.
  pollfd polled(bool reads, bool writes) const {
    if (link() != nullptr) return {.fd = link()->socket_over() ? -1 : fd(), .events = POLLIN, .revents = 0};
    return {.fd = fd(), .events = static_cast<short>((reads ? POLLIN : 0) | (writes ? POLLOUT : 0)), .revents = 0};
  }
  // The check of fd() comes first: open() writes link_ before it publishes the descriptor.
  FabricLink* link() const { return fd() < 0 ? nullptr : link_; }

  int fd() const { return fd_.load(std::memory_order_acquire); }  // -1: not open
  explicit operator bool() const { return fd() >= 0; }
  void drop() {
    fd_.store(-1, std::memory_order_relaxed);
    link_ = nullptr;
    owned_.reset();
    pipe_in_.reset();
    pipe_out_.reset();
    in_pipe_ = 0;
  }

 private:
  static constexpr size_t kStage = 8 << 10;  // bytes of the staging buffer; larger reads bypass it

  size_t receive(std::byte* to, size_t nbytes);
  bool writable();
  void refused();

  size_t over_link(size_t moved);

  FabricLink* link_ = nullptr;
  sys::Fd owned_;
  std::atomic<int> fd_ = -1;
  sys::Fd pipe_in_;
  sys::Fd pipe_out_;
  size_t in_pipe_ = 0;
  bool lends_ = true;  // false after the kernel has refused to lend
  std::atomic<bool> ended_ = false;
  std::atomic<int> error_ = 0;
  std::atomic<bool> full_ = false;
  std::vector<std::byte> stage_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace allranks
