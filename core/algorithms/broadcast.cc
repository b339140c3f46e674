// broadcast: everybody ends with the root's bytes.
//
//   up to 96 bytes    in the root's call line
//   up to a slot      in the root's slot
//   above             through the root's ring: it writes chunk s while the others read the ones
//                     before; it waits for them only when the ring is full. Where all tensors lie
//                     in a shared block, straight from the root's.
//
// Every rank waits for every rank's arrival, the root too: a broadcast is also a barrier, and a
// rank that called something else is found by all, before anybody's memory is touched.
// Cost: n bytes written once, n bytes read by each other rank, one latency (and one chunk).
#include <algorithm>
#include <cstring>

#include "algorithms.h"

namespace allranks::algorithms {

namespace {

void pipelined(Comm& comm, Comm::Call& call, Buffer buffer, int root) {
  Shm& shm = comm.shm();
  const size_t chunk = shm.sizes().chunk;
  const size_t chunks = (buffer.nbytes() + chunk - 1) / chunk;
  const auto depth = static_cast<uint32_t>(shm.sizes().chunks);
  const uint32_t base = comm.base_step;
  for (uint32_t s = 0; s < chunks; s++) {
    std::byte* mine = buffer.bytes() + s * chunk;
    const size_t n = std::min(chunk, buffer.nbytes() - s * chunk);
    if (comm.rank() == root) {
      // The chunk that lies there now was step s - depth: everybody must have read it.
      if (s >= depth) comm.wait_step_of_all(call, base + s - depth + 1);
      std::memcpy(shm.chunk(root, s), mine, n);
    } else {
      comm.wait_step_of(call, root, base + s + 1);
      std::memcpy(mine, shm.chunk(root, s), n);
    }
    comm.post_step(base + s + 1, true);
  }
  comm.base_step = base + static_cast<uint32_t>(chunks);
}

}  // namespace

void broadcast(Comm& comm, Comm::Call& call, Buffer buffer, int root) {
  Shm& shm = comm.shm();
  const size_t n = buffer.nbytes();
  const bool is_root = comm.rank() == root;
  if (n <= CallLine::kInline) {
    comm.arrive(call, buffer.data, is_root ? n : 0);
    if (!is_root && n > 0) std::memcpy(buffer.data, shm.call_line(root, call.number).payload.data(), n);
  } else if (n <= shm.sizes().slot) {
    if (is_root) std::memcpy(shm.slot(root, call.number), buffer.data, n);
    comm.arrive(call);
    if (!is_root) std::memcpy(buffer.data, shm.slot(root, call.number), n);
  } else if (const auto tensors = comm.arrive_at(call, buffer.data); !tensors.empty()) {
    if (!is_root) std::memcpy(buffer.data, tensors[static_cast<size_t>(root)], n);
    comm.depart(call);
  } else {
    pipelined(comm, call, buffer, root);
  }
}

}  // namespace allranks::algorithms
