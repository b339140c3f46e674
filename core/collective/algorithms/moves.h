// Building blocks that several verbs share. Names with `piece` refer to a chunk.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "collective/algorithms/algorithms.h"
#include "collective/algorithms/table.h"

namespace allranks::algorithms {

// Copy n bytes. Source and destination may overlap or be identical, for example if a tensor is gathered in place.
inline void move_bytes(std::byte* to, const std::byte* from, size_t n) {
  if (n > 0 && to != from) std::memmove(to, from, n);
}

// Return the address of the first chunk if the chunks are contiguous in memory, else nullptr.
template <class Bytes>
const std::byte* contiguous(const Pieces& pieces, Bytes&& bytes) {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  for (size_t r = 0; r < pieces.size(); r++) {
    if (bytes(r) == 0) continue;
    if (begin == nullptr) begin = end = pieces[r];
    if (pieces[r] != end) return nullptr;
    end += bytes(r);
  }
  return begin;
}

inline bool intersect(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

// Return the chunk size of a call of nbytes. Chunks are large enough that the waits between them are inexpensive. They
// are small enough that writing and reading ranks work at the same time.
inline size_t piece_of(LocalComm& comm, size_t nbytes) {
  const size_t most = comm.shm().sizes().piece;
  const size_t cells = std::bit_ceil(64 * static_cast<size_t>(comm.size()));  // room for one cell per rank
  const size_t least = std::min(std::max<size_t>(16 << 10, cells), most);
  return std::clamp(std::bit_ceil(nbytes / 4), least, most);
}

// Run a large call in steps. fill(s) writes this rank's part of step s into its ring; drain(s) reads the parts of the
// other ranks. Step s + 1 is filled before step s is drained, so one wait per step is enough.
//
// fill(s + depth) overwrites the chunk of step s. Before that, every rank has posted step s + 3 and has therefore
// drained step s. This requires a depth of at least 4.
template <class Fill, class Drain>
void pipeline(LocalComm& comm, LocalComm::Call& call, size_t steps, Fill&& fill, Drain&& drain) {
  const uint32_t base = comm.base_step;
  for (size_t s = 0; s <= steps; s++) {
    if (s < steps) {
      fill(s);
      comm.post_step(base + static_cast<uint32_t>(s) + 1);
    }
    if (s >= 1) {
      comm.wait_step_of_all(call, base + static_cast<uint32_t>(s));
      drain(s - 1);
    }
  }
  comm.base_step = base + static_cast<uint32_t>(steps);
}

// Return the size of a cell if a chunk is divided into one cell per rank. Cells do not share cache lines.
inline size_t cell_bytes(size_t room, int ranks) {
  const size_t cell = room / static_cast<size_t>(ranks) / 64 * 64;
  if (cell == 0) throw Error("too many ranks for a chunk of the ring");
  return cell;
}

inline size_t steps_for(size_t nbytes, size_t per_step) { return (nbytes + per_step - 1) / per_step; }

}  // namespace allranks::algorithms
