#include "channel/stream.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace allranks {

namespace {

// Default capacity of a pipe: 16 pages. If each vmsplice fills it, TCP sends full segments.
constexpr size_t kPipe = 64 << 10;

// Scope in which SIGPIPE does not reach the process. splice raises it if the connection has ended, and has no flag to
// prevent this. Python ignores the signal, but a program may have restored the default action, which terminates it.
// If the scope's own splice has raised the signal, the destructor removes it before it unblocks SIGPIPE.
class WithoutSigpipe {
 public:
  WithoutSigpipe() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~WithoutSigpipe() {
    if (sigismember(&before_, SIGPIPE) == 1) return;
    const timespec now{};
    if (raised) sigtimedwait(&signal_, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  bool raised = false;

 private:
  sigset_t signal_;
  sigset_t before_;
};

}  // namespace

// Return whether to write now. The kernel reports a full socket as writable when a large part of its buffer is free.
// Filling every small gap immediately would split the stream into small packets (docs/decisions/031).
bool Stream::writable() {
  if (fd() < 0) return false;
  if (!full()) return true;
  pollfd p{.fd = fd(), .events = POLLOUT, .revents = 0};
  return poll(&p, 1, 0) != 0;
}

// Record the errno of a failed write.
void Stream::refused() {
  const bool full = errno == EAGAIN || errno == ENOBUFS;
  full_.store(full, std::memory_order_relaxed);
  if (full) return;
  // The kernel reports the error of a connection once. A later read finds only that the connection is closed.
  if (errno != EPIPE) error_.store(errno, std::memory_order_relaxed);
  ended_.store(true, std::memory_order_relaxed);
}

// Take over the state of the link after a call that has moved some bytes.
size_t Stream::over_link(size_t moved) {
  if (link_->ended()) {
    error_.store(link_->socket_error(), std::memory_order_relaxed);
    ended_.store(true, std::memory_order_relaxed);
  }
  return moved;
}

size_t Stream::put(iovec* parts, size_t n) {
  size_t nbytes = 0;
  for (size_t i = 0; i < n; i++) nbytes += parts[i].iov_len;
  if (link() != nullptr) {
    const size_t taken = over_link(link_->put(parts, n));
    full_.store(taken < nbytes, std::memory_order_relaxed);
    return taken;
  }
  if (!drain() || !writable()) return 0;
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = n;
  for (;;) {
    const ssize_t taken = sendmsg(fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (taken >= 0) {
      full_.store(static_cast<size_t>(taken) < nbytes, std::memory_order_relaxed);
      return static_cast<size_t>(taken);
    }
    if (errno == EINTR) continue;
    refused();
    return 0;
  }
}

size_t Stream::put(const void* data, size_t nbytes) {
  iovec part{const_cast<void*>(data), nbytes};
  return put(&part, 1);
}

size_t Stream::lend(const void* data, size_t nbytes) {
  if (!lends_) return put(data, nbytes);
  if (pipe_in_.get() < 0) {
    std::array<int, 2> ends;
    if (pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) {
      lends_ = false;
      return put(data, nbytes);
    }
    pipe_out_ = sys::Fd(ends[0]);
    pipe_in_ = sys::Fd(ends[1]);
  }
  if (!drain() || !writable()) return 0;
  iovec part{const_cast<void*>(data), std::min(nbytes, kPipe)};
  ssize_t taken;
  do {
    taken = vmsplice(pipe_in_.get(), &part, 1, SPLICE_F_NONBLOCK);
  } while (taken < 0 && errno == EINTR);
  if (taken <= 0) {
    // The pages of this memory cannot be lent (device memory), or the kernel does not support it.
    lends_ = false;
    return put(data, nbytes);
  }
  in_pipe_ = static_cast<size_t>(taken);
  drain();
  return static_cast<size_t>(taken);
}

bool Stream::drain() {
  if (in_pipe_ == 0) return true;
  if (!writable()) return false;
  WithoutSigpipe without;
  while (in_pipe_ > 0) {
    const ssize_t taken = splice(pipe_out_.get(), nullptr, fd(), nullptr, in_pipe_, SPLICE_F_NONBLOCK);
    if (taken < 0 && errno == EINTR) continue;
    if (taken <= 0) {
      if (taken == 0) errno = EPIPE;
      without.raised = errno == EPIPE;
      refused();
      return false;
    }
    full_.store(false, std::memory_order_relaxed);
    in_pipe_ -= static_cast<size_t>(taken);
  }
  return true;
}

size_t Stream::get(void* to, size_t nbytes) {
  if (link() != nullptr) return over_link(link_->get(to, nbytes));
  auto* out = static_cast<std::byte*>(to);
  if (begin_ == end_) {
    if (nbytes >= kStage) return receive(out, nbytes);
    if (stage_.empty()) stage_.resize(kStage);
    begin_ = 0;
    end_ = receive(stage_.data(), kStage);
  }
  const size_t n = std::min(nbytes, end_ - begin_);
  if (n > 0) std::memcpy(out, stage_.data() + begin_, n);
  begin_ += n;
  return n;
}

size_t Stream::receive(std::byte* to, size_t nbytes) {
  if (fd() < 0) return 0;
  for (;;) {
    const ssize_t n = recv(fd(), to, nbytes, MSG_DONTWAIT);
    if (n > 0) return static_cast<size_t>(n);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0 || errno != EAGAIN) {
      if (n < 0) error_.store(errno, std::memory_order_relaxed);
      ended_.store(true, std::memory_order_relaxed);
    }
    return 0;
  }
}

}  // namespace allranks
