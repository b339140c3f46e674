// scatter: rank r ends with the root's piece r.
//
// The root's slot, or each chunk of its ring, is cut into one cell per rank.
// Larger pieces in a shared block are read straight from there.
// Cost: P n bytes written by the root, n read by each other rank; one latency (one per chunk of cells).
#include "moves.h"

namespace allranks::algorithms {

void scatter(Comm& comm, Comm::Call& call, const Pieces& ins, Buffer out, int root) {
  Shm& shm = comm.shm();
  const int ranks = comm.size();
  const auto me = static_cast<size_t>(comm.rank());
  const size_t n = out.nbytes();
  const bool is_root = comm.rank() == root;
  const auto deal = [&](std::byte* to, size_t cell, size_t offset, size_t bytes) {
    for (size_t r = 0; r < static_cast<size_t>(ranks); r++) {
      if (r != me) move_bytes(to + r * cell, ins[r] + offset, bytes);
    }
  };
  if (const size_t cell = cell_bytes(shm.sizes().slot, ranks); n <= cell) {
    if (is_root) deal(shm.slot(root, call.number), cell, 0, n);
    comm.arrive(call);
    if (!is_root) move_bytes(out.bytes(), shm.slot(root, call.number) + me * cell, n);
  } else if (const auto tensors = comm.arrive_at(call, is_root ? contiguous(ins, [n](size_t) { return n; }) : out.data);
             !tensors.empty()) {
    if (!is_root) move_bytes(out.bytes(), tensors[static_cast<size_t>(root)] + me * n, n);
    comm.depart(call);
  } else {
    const size_t part = cell_bytes(shm.sizes().chunk, ranks);
    const auto bytes = [&](size_t s) { return std::min(part, n - s * part); };
    pipeline(
        comm, call, static_cast<uint32_t>(steps_for(n, part)),
        [&](size_t s) {
          if (is_root) deal(shm.chunk(root, s), part, s * part, bytes(s));
        },
        [&](size_t s) {
          if (!is_root) move_bytes(out.bytes() + s * part, shm.chunk(root, s) + me * part, bytes(s));
        });
  }
  if (is_root) move_bytes(out.bytes(), ins[me], n);
}

}  // namespace allranks::algorithms
