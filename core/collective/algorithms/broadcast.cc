// broadcast: every rank receives the bytes of the root.
//
//   up to 88 bytes    in the call line of the root
//   up to 16 KiB      in one chunk of the root's ring
//   above             in several chunks: the root writes a chunk while the other ranks read the previous
//                     ones. It waits for them only if the ring is full.
//                     With groups (levels.h), only the leader of a group reads the root's ring. It copies
//                     the chunk into its own ring, and its group reads it there. The root's ring then has
//                     about P / 16 + 16 readers instead of P.
//                     If all tensors are in a shared block, the ranks read the root's tensor there.
//
// Every rank, including the root, waits until every rank has arrived. A broadcast is therefore also a barrier. All
// ranks detect a rank that made another call before any memory is changed.
//
// Cost: n bytes written once (with groups: once per group), n bytes read by each other rank, one latency and one chunk
// (with groups: two of each).
#include "collective/algorithms/moves.h"

namespace allranks::algorithms {

namespace {

constexpr size_t kAtOnce = 16 << 10;  // bytes that are sent in a single chunk

class OfOne final : public Combining {
 public:
  OfOne(int root, size_t nbytes) : root_(static_cast<size_t>(root)), nbytes_(nbytes) {}
  void combine(std::byte* result, const void* const* operands) const override {
    std::memcpy(result, operands[root_], nbytes_);
  }

 private:
  size_t root_;
  size_t nbytes_;
};

void pipelined(LocalComm& comm, LocalComm::Call& call, Buffer buffer, int root) {
  const size_t n = buffer.nbytes();
  const size_t piece = piece_of(comm, n);
  const auto steps = static_cast<uint32_t>(steps_for(n, piece));
  const auto ring = comm.take(piece, steps);
  const auto depth = static_cast<uint32_t>(comm.shm().sizes().ring / ring.room);
  const uint32_t base = comm.base_step;
  const int source = comm.source(root);
  const bool relays = comm.relays(root);
  for (uint32_t s = 0; s < steps; s++) {
    std::byte* mine = buffer.bytes() + s * piece;
    const size_t bytes = std::min(piece, n - s * piece);
    if (comm.rank() == root) {
      // This slot holds the chunk of step s - depth. Every rank must have read it before it is overwritten.
      if (s >= depth) comm.wait_step_of_each(call, base + s - depth + 1);
      comm.copier().copy(ring.at(root, s), mine, bytes);
    } else {
      comm.wait_step_of(call, source, base + s + 1, root);
      std::memcpy(mine, ring.at(source, s), bytes);
      // This slot held the chunk of step s - depth. The root wrote step s only after every rank had read it.
      if (relays) comm.copier().copy(ring.at(comm.rank(), s), mine, bytes);
    }
    comm.post_step_to_any(base + s + 1);
  }
  comm.base_step = base + steps;
  // The next call may overwrite all chunks except the last three (segment.h), so every rank must have read the others.
  if ((comm.rank() == root || relays) && steps > 3) comm.wait_step_of_each(call, base + steps - 3);
}

}  // namespace

void broadcast(LocalComm& comm, LocalComm::Call& call, Buffer buffer, int root) {
  const size_t n = buffer.nbytes();
  const bool is_root = comm.rank() == root;
  if (n <= CallLine::kInline) {
    const std::byte* result = comm.arrive_and_combine(call, is_root ? buffer.data : nullptr, n, OfOne(root, n));
    if (result == nullptr) result = comm.payload(call, root, n);
    if (!is_root && n > 0) std::memcpy(buffer.data, result, n);
  } else if (n <= std::min(kAtOnce, comm.shm().sizes().piece)) {
    const auto ring = comm.take(n);
    if (is_root) comm.copier().copy(ring.at(root), buffer.bytes(), n);
    comm.arrive(call);
    if (!is_root) std::memcpy(buffer.data, ring.at(root), n);
  } else if (const auto tensors = comm.arrive_at(call, buffer.data, n); !tensors.empty()) {
    if (!is_root) std::memcpy(buffer.data, tensors[static_cast<size_t>(root)], n);
    comm.depart(call);
  } else {
    pipelined(comm, call, buffer, root);
  }
}

void broadcast(LocalComm& comm, LocalComm::Call& call, const Operation& operation) {
  broadcast(comm, call, operation.buffer, operation.fingerprint.root);
}

}  // namespace allranks::algorithms
