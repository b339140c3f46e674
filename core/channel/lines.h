// Counts the cache lines of other ranks' memory that a rank accesses. Active only in the core that the tests build, for
// benchmarks/model.py.
#pragma once

#ifdef ALLRANKS_COUNT_LINES
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>

namespace allranks::lines {

constexpr size_t kBytes = 128;  // the alignment of control lines (kLine)

using Touched = std::set<std::pair<int, uintptr_t>>;  // owner and number of each line
inline thread_local Touched* touched = nullptr;       // of the rank that this thread runs

inline void touch(int owner, const void* line) {
  if (touched != nullptr) touched->emplace(owner, reinterpret_cast<uintptr_t>(line) / kBytes);
}

}  // namespace allranks::lines
#else
namespace allranks::lines {
inline void touch(int, const void*) {}
}  // namespace allranks::lines
#endif
