#include "remote/inbox.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace allranks {

namespace {

constexpr uint16_t kEcho = 3;
constexpr size_t kEchoBytes = sizeof(uint16_t) + sizeof(uint32_t);

bool is_echo(std::span<const std::byte> frame) {
  uint16_t kind;
  if (frame.size() != kEchoBytes) return false;
  std::memcpy(&kind, frame.data(), sizeof kind);
  return kind == kEcho;
}

}  // namespace

size_t receive(int fd, std::span<std::byte> room, bool echoes, Caller& caller) {
  caller.release();
  for (;;) {
    const ssize_t n = recv(fd, room.data(), room.size(), 0);
    if (n < 0) {
      if (errno == ECONNRESET) return 0;  // the master may have exited with unread input: also the end of the stream
      if (errno != EINTR) throw Error(std::string("recv: ") + std::strerror(errno));
      if (caller.interrupted()) {
        Error error(Failure{.kind = Kind::interrupted});
        error.signalled = true;
        throw error;
      }
      continue;
    }
    const auto count = static_cast<size_t>(n);
    if (!echoes || !is_echo(room.first(count))) return count;
    std::byte answer[8] = {};
    std::memcpy(answer + 4, room.data() + 2, sizeof(uint32_t));
    // The answer has 8 bytes and the master reads all answers. So a send that fails or is partial means that the
    // connection is lost.
    if (send(fd, answer, sizeof answer, MSG_NOSIGNAL) != sizeof answer) return 0;
  }
}

}  // namespace allranks
