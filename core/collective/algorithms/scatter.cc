// scatter: rank r receives part r of the root's data.
//
// Chunks of the root's ring are divided into one cell per rank. If larger data is in a shared block, the ranks read it
// directly there.
//
// Cost: P n bytes written by the root, n read by each other rank; one latency (one per chunk of the ring).
#include "collective/algorithms/moves.h"

namespace allranks::algorithms {

namespace {
constexpr size_t kAtOnce = 16 << 10;  // bytes that are sent in a single chunk
}

void scatter(LocalComm& comm, LocalComm::Call& call, const Pieces& ins, Buffer out, int root) {
  const size_t most = comm.shm().sizes().piece;
  const int ranks = comm.size();
  const auto me = static_cast<size_t>(comm.rank());
  const size_t n = out.nbytes();
  const bool is_root = comm.rank() == root;
  const auto deal = [&](std::byte* to, size_t cell, size_t offset, size_t bytes) {
    for (size_t r = 0; r < static_cast<size_t>(ranks); r++) {
      if (r != me) comm.copier().copy(to + r * cell, ins[r] + offset, bytes);
    }
  };
  if (const size_t cell = (n + 63) / 64 * 64; cell * static_cast<size_t>(ranks) <= std::min(kAtOnce, most)) {
    const auto ring = comm.take(cell * static_cast<size_t>(ranks));
    if (is_root) deal(ring.at(root), cell, 0, n);
    comm.arrive(call);
    if (!is_root) move_bytes(out.bytes(), ring.at(root) + me * cell, n);
  } else if (const auto tensors = comm.arrive_at(call, is_root ? contiguous(ins, [n](size_t) { return n; }) : out.data,
                                                 is_root ? n * ins.size() : n);
             !tensors.empty()) {
    if (!is_root) move_bytes(out.bytes(), tensors[static_cast<size_t>(root)] + me * n, n);
    comm.depart(call);
  } else {
    const size_t piece = piece_of(comm, n * static_cast<size_t>(ranks));
    const size_t part = cell_bytes(piece, ranks);
    const size_t steps = steps_for(n, part);
    const auto ring = comm.take(piece, steps);
    const auto bytes = [&](size_t s) { return std::min(part, n - s * part); };
    pipeline(
        comm, call, steps,
        [&](size_t s) {
          if (is_root) deal(ring.at(root, s), part, s * part, bytes(s));
        },
        [&](size_t s) {
          if (!is_root) move_bytes(out.bytes() + s * part, ring.at(root, s) + me * part, bytes(s));
        });
  }
  if (is_root) move_bytes(out.bytes(), ins[me], n);
}

void scatter(LocalComm& comm, LocalComm::Call& call, const Operation& operation) {
  scatter(comm, call, operation.ins, operation.buffer, operation.fingerprint.root);
}

}  // namespace allranks::algorithms
