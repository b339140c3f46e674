// The worker's side of master-worker mode: receives the frames that the master sends.
//
// An ECHO frame that arrives alone means that all earlier frames have been processed. C++ answers it, not Python. If
// there are more workers than cores, the master waits until each worker has run. An answer in Python would access some
// hundred cache lines in each worker.
//
//   answer to an ECHO: u32 0, u32 number
#pragma once

#include <cstddef>
#include <span>

#include "base/waiting.h"

namespace allranks {

// Wait for bytes and return their number, or 0 at the end of the stream.
//
// echoes: answer ECHO frames that arrive alone. Throws Error if the system call fails, or if a signal handler raises.
size_t receive(int fd, std::span<std::byte> room, bool echoes, Caller& caller);

}  // namespace allranks
