#include "stream.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace allranks {

size_t Stream::put(iovec* parts, size_t n) {
  if (fd() < 0) return 0;
  if (full()) {
    // The kernel calls it writable when a good part of its buffer is free. To fill every gap as it opens would
    // cut the stream into crumbs.
    pollfd p{.fd = fd(), .events = POLLOUT, .revents = 0};
    if (poll(&p, 1, 0) == 0) return 0;
  }
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = n;
  size_t nbytes = 0;
  for (size_t i = 0; i < n; i++) nbytes += parts[i].iov_len;
  for (;;) {
    const ssize_t taken = sendmsg(fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (taken >= 0) {
      full_.store(static_cast<size_t>(taken) < nbytes, std::memory_order_relaxed);
      return static_cast<size_t>(taken);
    }
    if (errno == EINTR) continue;
    const bool full = errno == EAGAIN || errno == ENOBUFS;
    full_.store(full, std::memory_order_relaxed);
    if (!full) ended_.store(true, std::memory_order_relaxed);
    return 0;
  }
}

size_t Stream::put(const void* data, size_t nbytes) {
  iovec part{const_cast<void*>(data), nbytes};
  return put(&part, 1);
}

size_t Stream::get(void* to, size_t nbytes) {
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
      if (n < 0) error_ = errno;
      ended_.store(true, std::memory_order_relaxed);
    }
    return 0;
  }
}

}  // namespace allranks
