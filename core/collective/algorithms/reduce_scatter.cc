// reduce_scatter: rank r receives the reduction of the operands r of all ranks.
//
// Each rank writes its operands for the other ranks into cells of its ring. It then reduces the cells intended for it,
// in the order 0..P-1. It reads its own operand in place. If larger operands are in a shared block on all ranks, they
// are reduced directly from there.
//
// Cost: (P-1) n bytes written, P n read per rank; one latency (one per chunk of the ring).
#include "collective/algorithms/moves.h"
#include "collective/reduce.h"

namespace allranks::algorithms {

void reduce_scatter(LocalComm& comm, LocalComm::Call& call, const Pieces& ins, Buffer out, ReduceOp op) {
  const Kernel kernel = kernel_for(out.dtype, op);
  if (kernel == nullptr) throw Error("no kernel reduces this dtype with this op");
  const int ranks = comm.size();
  const auto me = static_cast<size_t>(comm.rank());
  const size_t n = out.nbytes();
  std::vector<const void*> operands(static_cast<size_t>(ranks));
  const std::byte* whole = contiguous(ins, [n](size_t) { return n; });
  // Whether the result overlaps the operands. If so, other ranks must not read the operands in place.
  const bool spoilt = whole != nullptr && out.bytes() != ins[me] && intersect(out.bytes(), n, whole, n * ins.size());
  const auto deal = [&](std::byte* to, size_t cell, size_t offset, size_t bytes) {
    for (size_t r = 0; r < operands.size(); r++) {
      if (r != me) comm.copier().copy(to + r * cell, ins[r] + offset, bytes);
    }
  };
  const auto combine = [&](size_t cell, size_t offset, size_t bytes, auto&& from) {
    for (size_t r = 0; r < operands.size(); r++) {
      operands[r] = r == me ? ins[me] + offset : from(static_cast<int>(r)) + me * cell;
    }
    kernel(out.bytes() + offset, operands.data(), ranks, bytes / size_of(out.dtype), ranks);
  };
  if (const size_t cell = (n + 63) / 64 * 64; cell * static_cast<size_t>(ranks) <= comm.shm().sizes().piece) {
    const auto ring = comm.take(cell * static_cast<size_t>(ranks));
    deal(ring.at(comm.rank()), cell, 0, n);
    comm.arrive(call);
    combine(cell, 0, n, [&](int r) { return ring.at(r); });
  } else if (const auto tensors = comm.arrive_at(call, spoilt ? nullptr : whole, n * ins.size()); !tensors.empty()) {
    for (size_t r = 0; r < operands.size(); r++) operands[r] = tensors[r] + me * n;
    kernel(out.bytes(), operands.data(), ranks, out.count, ranks);
    comm.depart(call);
  } else {
    const size_t piece = piece_of(comm, n * static_cast<size_t>(ranks));
    const size_t part = cell_bytes(piece, ranks);
    const size_t steps = steps_for(n, part);
    const auto ring = comm.take(piece, steps);
    const auto bytes = [&](size_t s) { return std::min(part, n - s * part); };
    pipeline(
        comm, call, steps, [&](size_t s) { deal(ring.at(comm.rank(), s), part, s * part, bytes(s)); },
        [&](size_t s) { combine(part, s * part, bytes(s), [&](int r) { return ring.at(r, s); }); });
  }
}

void reduce_scatter(LocalComm& comm, LocalComm::Call& call, const Operation& operation) {
  reduce_scatter(comm, call, operation.ins, operation.buffer, operation.fingerprint.op);
}

}  // namespace allranks::algorithms
