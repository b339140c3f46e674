// reduce_scatter: rank r ends with the reduction of everybody's piece r.
//
// Each rank puts its pieces for the others into cells of its slot or of its ring's chunks, and reduces
// the cells that are meant for it, in the order 0..P-1, its own piece where it lies.
// Larger pieces that lie in a shared block on all ranks are reduced straight from there.
// Cost: (P-1) n bytes written, P n read per rank; one latency (one per chunk of cells).
#include "../reduce.h"
#include "moves.h"

namespace allranks::algorithms {

void reduce_scatter(Comm& comm, Comm::Call& call, const Pieces& ins, Buffer out, ReduceOp op) {
  const Kernel kernel = kernel_for(out.dtype, op);
  if (kernel == nullptr) throw Error("no kernel reduces this dtype with this op");
  Shm& shm = comm.shm();
  const int ranks = comm.size();
  const auto me = static_cast<size_t>(comm.rank());
  const size_t n = out.nbytes();
  std::vector<const void*> operands(static_cast<size_t>(ranks));
  const auto deal = [&](std::byte* to, size_t cell, size_t offset, size_t bytes) {
    for (size_t r = 0; r < operands.size(); r++) {
      if (r != me) move_bytes(to + r * cell, ins[r] + offset, bytes);
    }
  };
  const auto combine = [&](size_t cell, size_t offset, size_t bytes, auto&& from) {
    for (size_t r = 0; r < operands.size(); r++) {
      operands[r] = r == me ? ins[me] + offset : from(static_cast<int>(r)) + me * cell;
    }
    kernel(out.bytes() + offset, operands.data(), ranks, bytes / size_of(out.dtype));
  };
  if (const size_t cell = cell_bytes(shm.sizes().slot, ranks); n <= cell) {
    deal(shm.slot(comm.rank(), call.number), cell, 0, n);
    comm.arrive(call);
    combine(cell, 0, n, [&](int r) { return shm.slot(r, call.number); });
  } else if (const auto tensors = comm.arrive_at(call, contiguous(ins, [n](size_t) { return n; })); !tensors.empty()) {
    for (size_t r = 0; r < operands.size(); r++) operands[r] = tensors[r] + me * n;
    kernel(out.bytes(), operands.data(), ranks, out.count);
    comm.depart(call);
  } else {
    const size_t part = cell_bytes(shm.sizes().chunk, ranks);
    const auto bytes = [&](size_t s) { return std::min(part, n - s * part); };
    pipeline(
        comm, call, static_cast<uint32_t>(steps_for(n, part)),
        [&](size_t s) { deal(shm.chunk(comm.rank(), s), part, s * part, bytes(s)); },
        [&](size_t s) { combine(part, s * part, bytes(s), [&](int r) { return shm.chunk(r, s); }); });
  }
}

}  // namespace allranks::algorithms
