// Converts addresses and numbers from Python to buffers and operations of the core.
#pragma once

#include <cstdint>
#include <utility>

#include "base/types.h"
#include "collective/operation.h"
#include "python/state.h"

namespace allranks {

using Address = uintptr_t;
inline std::byte* bytes(Address address) { return reinterpret_cast<std::byte*>(address); }

inline Buffer buffer(Address data, size_t count, int dtype) { return {bytes(data), count, static_cast<DType>(dtype)}; }

using Mark = uint64_t;  // low 32 bits: a fingerprint's shape; high 32 bits: its site

inline Operation operation(Verb verb, Buffer buffer, Mark mark, int op = 0, int root = -1) {
  return {.fingerprint = {.verb = verb,
                          .dtype = buffer.dtype,
                          .op = static_cast<ReduceOp>(op),
                          .purpose = purpose,
                          .root = root,
                          .count = buffer.count,
                          .shape = static_cast<uint32_t>(mark),
                          .site = static_cast<uint32_t>(mark >> 32)},
          .buffer = buffer};
}

}  // namespace allranks
