// all_gather: every rank receives the bytes of every rank. gather: only the ranks that pass outputs receive them.
//
//   up to 88 bytes    in the call lines
//   up to 128 KiB     in one chunk of each ring
//   above             in several chunks, all ranks simultaneously. If all operands are in a shared block, the
//                     ranks read them there.
//
// Cost: n bytes written (except by the root of a gather), (P-1) n read per receiver; one latency (one per chunk).
#include "collective/algorithms/moves.h"

namespace allranks::algorithms {

namespace {

// root: the root of a gather, -1 for all_gather. No other rank reads the operand of the root.
void collect_all(LocalComm& comm, LocalComm::Call& call, Buffer in, const Pieces& outs, int root) {
  Shm& shm = comm.shm();
  const int me = comm.rank();
  const size_t n = in.nbytes();
  const bool read = root != me;
  // Whether the outputs of this rank overlap its operand. If so, other ranks must not read the operand in place.
  bool spoilt = false;
  for (size_t r = 0; r < outs.size(); r++) {
    spoilt = spoilt || (r != static_cast<size_t>(me) && intersect(outs[r], n, in.bytes(), n));
  }
  const auto collect = [&](size_t offset, size_t bytes, auto&& from) {
    if (outs.empty()) return;
    for (int r = 0; r < comm.size(); r++) {
      if (r != me) move_bytes(outs[static_cast<size_t>(r)] + offset, from(r), bytes);
    }
  };
  // Must run before any other output is written, because `in` may overlap the output of another rank.
  const auto keep_own = [&] {
    if (!outs.empty()) move_bytes(outs[static_cast<size_t>(me)], in.bytes(), n);
  };
  if (n <= CallLine::kInline) {
    comm.arrive(call, in.data, n);
    keep_own();
    collect(0, n, [&](int r) { return comm.payload(call, r, n); });
  } else if (n <= shm.sizes().piece) {
    const auto ring = comm.take(n);
    if (read) comm.copier().copy(ring.at(me), in.bytes(), n);
    comm.arrive(call);
    keep_own();
    collect(0, n, [&](int r) { return ring.at(r); });
  } else if (const auto operands = comm.arrive_at(call, spoilt ? nullptr : in.data, n); !operands.empty()) {
    keep_own();
    collect(0, n, [&](int r) { return operands[static_cast<size_t>(r)]; });
    comm.depart(call);
  } else {
    keep_own();
    const size_t piece = piece_of(comm, n);
    const size_t steps = steps_for(n, piece);
    const auto ring = comm.take(piece, steps);
    const auto bytes = [&](size_t s) { return std::min(piece, n - s * piece); };
    pipeline(
        comm, call, steps,
        [&](size_t s) {
          if (read) comm.copier().copy(ring.at(me, s), in.bytes() + s * piece, bytes(s));
        },
        [&](size_t s) { collect(s * piece, bytes(s), [&](int r) { return ring.at(r, s); }); });
  }
}

}  // namespace

void all_gather(LocalComm& comm, LocalComm::Call& call, Buffer in, const Pieces& outs) {
  collect_all(comm, call, in, outs, -1);
}

void gather(LocalComm& comm, LocalComm::Call& call, Buffer in, const Pieces& outs, int root) {
  collect_all(comm, call, in, outs, root);
}

void all_gather(LocalComm& comm, LocalComm::Call& call, const Operation& operation) {
  all_gather(comm, call, operation.buffer, operation.outs);
}

void gather(LocalComm& comm, LocalComm::Call& call, const Operation& operation) {
  gather(comm, call, operation.buffer, operation.outs, operation.fingerprint.root);
}

}  // namespace allranks::algorithms
