// The worker's side of master-worker mode: it receives what the master sends.
//
// An ECHO frame that comes alone, when all before it is done, is answered here and not in Python. With more workers
// than cores the master waits until each has run, and an answer in Python would touch some hundred cache lines in each.
//
//   answer to an ECHO: u32 0, u32 number
#pragma once

#include <cstddef>
#include <span>

#include "base/waiting.h"

namespace allranks {

// Waits for bytes: how many there are; 0 at the end of the stream.
// echoes: answer ECHO frames that come alone. Throws Error where the system refuses, and when a signal asks to stop.
size_t receive(int fd, std::span<std::byte> room, bool echoes, Caller& caller);

}  // namespace allranks
