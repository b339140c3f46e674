// Which lines of other ranks' memory a rank touches. Counted in the core as the tests build it, for
// benchmarks/model.py.
#pragma once

#ifdef ALLRANKS_COUNT_LINES
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>

namespace allranks::lines {

constexpr size_t kBytes = 128;  // control lines are aligned to as many

using Touched = std::set<std::pair<int, uintptr_t>>;  // whose, and which
inline thread_local Touched* touched = nullptr;       // of the rank that this thread is

inline void touch(int owner, const void* line) {
  if (touched != nullptr) touched->emplace(owner, reinterpret_cast<uintptr_t>(line) / kBytes);
}

}  // namespace allranks::lines
#else
namespace allranks::lines {
inline void touch(int, const void*) {}
}  // namespace allranks::lines
#endif
