// The worker's side of master-worker mode: what the master has sent.
//
// An ECHO frame that comes alone, when all before it is done, is answered here and not in Python: with more workers
// than cores the master waits for all of them to be woken, and each would touch some hundred cache lines of Python.
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
