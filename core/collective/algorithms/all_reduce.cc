// all_reduce: every rank receives the element-wise reduction of all operands.
// reduce: only the root receives it; the operands of the other ranks stay unchanged.
//
//   one-shot    each rank writes its operand where all ranks can read it: up to 88 bytes in its call
//               line, larger operands in one chunk of its ring. Each rank then reduces all P operands.
//               Cost: one latency; P n bytes read, 2 n written per rank.
//   two-shot    for larger operands: reduce-scatter and all-gather through the rings, pipelined in
//               chunks. A chunk is divided into P shards; rank r reduces shard r. In one step a rank
//                 copies chunk s in       (the shards that other ranks reduce),
//                 reduces chunk s-1       (its shard: result to its own memory and to its ring),
//                 copies chunk s-2 out    (the shards that other ranks have reduced).
//               One wait per chunk is therefore enough, and copies overlap with the work of other ranks.
//               Cost: one latency per chunk; about (3 + 2(P-1)/P - 1/P) n bytes moved per rank.
//
//   in place    if all operands are in a shared block: rank r reduces shard r from the memory of every
//               rank into the memory of every rank. Cost: two latencies; 2 n bytes moved per rank.
//
// All operands are combined in the order 0..P-1, independent of the rank that combines them. Results are therefore
// bit-identical on all ranks, in every run, and on every path.
//
// Source: reduce-scatter + all-gather is Rabenseifner's algorithm. DeepSpeed's and sglang's shm.cpp use it on shared
// memory, without a pipeline.
#include <algorithm>
#include <cstring>
#include <vector>

#include "collective/algorithms/moves.h"
#include "collective/reduce.h"

namespace allranks::algorithms {

namespace {

constexpr int kEverybody = -1;
class Reduction final : public Combining {
 public:
  Reduction(Buffer buffer, Kernel kernel, int ranks) : buffer_(buffer), kernel_(kernel), ranks_(ranks) {}
  void combine(std::byte* result, const void* const* operands) const override {
    kernel_(result, operands, ranks_, buffer_.count, ranks_);
  }

 private:
  Buffer buffer_;
  Kernel kernel_;
  int ranks_;
};

// root: the rank that receives the result; kEverybody: all ranks. in_line: the operand fits into the call line.
void one_shot(LocalComm& comm, LocalComm::Call& call, Buffer buffer, Kernel kernel, int root, bool in_line) {
  const size_t n = buffer.nbytes();
  const auto ring = in_line ? LocalComm::Pieces{&comm.shm(), 0, 0} : comm.take(n);
  if (in_line && comm.has_levels()) {
    const std::byte* result = comm.arrive_and_combine(call, buffer.data, n, Reduction(buffer, kernel, comm.size()));
    if (result != nullptr) {
      if (root == kEverybody || root == comm.rank()) std::memcpy(buffer.data, result, n);
      return;
    }
  } else if (in_line) {
    comm.arrive(call, buffer.data, n);
  } else {
    comm.copier().copy(ring.at(comm.rank()), buffer.bytes(), n);
    comm.arrive(call);
  }
  if (root != kEverybody && root != comm.rank()) return;
  const void* few[16];  // up to 16 ranks need no heap allocation
  std::vector<const void*> many;
  const void** operands = few;
  if (comm.size() > 16) {
    many.resize(static_cast<size_t>(comm.size()));
    operands = many.data();
  }
  for (int r = 0; r < comm.size(); r++) {
    operands[r] = r == comm.rank() ? buffer.data
                  : in_line        ? static_cast<const void*>(comm.payload(call, r, n))
                                   : static_cast<const void*>(ring.at(r));
  }
  kernel(buffer.data, operands, comm.size(), buffer.count, comm.size());
}

// The chunks of a large operand. Shards end on cache lines, so that no two ranks write to the same line.
class Shards {
 public:
  Shards(Buffer buffer, size_t piece_bytes, int ranks)
      : buffer_(buffer),
        element_(size_of(buffer.dtype)),
        ranks_(static_cast<size_t>(ranks)),
        most_(piece_bytes / element_) {}

  size_t pieces() const { return (buffer_.count + most_ - 1) / most_; }

  struct Shard {
    size_t offset;  // in bytes, within the chunk
    size_t count;   // in elements
    size_t nbytes;
    std::byte* data;  // in the user's buffer
  };
  Shard shard(size_t piece, size_t rank) const {
    const size_t count = std::min(most_, buffer_.count - piece * most_);
    const size_t line = 64 / element_;
    const size_t share = (count / ranks_ + line - 1) / line * line;
    const size_t begin = std::min(rank * share, count);
    const size_t end = rank + 1 == ranks_ ? count : std::min(begin + share, count);
    return {begin * element_, end - begin, (end - begin) * element_,
            buffer_.bytes() + (piece * most_ + begin) * element_};
  }

 private:
  Buffer buffer_;
  size_t element_;
  size_t ranks_;
  size_t most_;  // elements per chunk
};

void in_place(LocalComm& comm, LocalComm::Call& call, Buffer buffer, Kernel kernel, int root,
              const std::vector<std::byte*>& operands) {
  // Small enough that a reduced tile is still in the cache when it is copied to the other ranks.
  constexpr size_t kTileBytes = 16 << 10;
  const size_t element = size_of(buffer.dtype);
  const size_t tile = kTileBytes / element;
  const auto ranks = operands.size();
  const auto me = static_cast<size_t>(comm.rank());
  const auto shard = Shards(buffer, buffer.nbytes(), comm.size()).shard(0, me);
  std::vector<const void*> srcs(ranks);
  for (size_t begin = 0; begin < shard.count; begin += tile) {
    const size_t count = std::min(tile, shard.count - begin);
    const size_t offset = shard.offset + begin * element;
    for (size_t r = 0; r < ranks; r++) srcs[r] = operands[r] + offset;
    std::byte* first = operands[root == kEverybody ? me : static_cast<size_t>(root)] + offset;
    kernel(first, srcs.data(), comm.size(), count, comm.size());
    if (root != kEverybody) continue;
    for (size_t r = 0; r < ranks; r++) {
      if (r != me) std::memcpy(operands[r] + offset, first, count * element);
    }
  }
  comm.depart(call);
}

void two_shot(LocalComm& comm, LocalComm::Call& call, Buffer buffer, Kernel kernel, int root) {
  const auto ranks = static_cast<size_t>(comm.size());
  const auto me = static_cast<size_t>(comm.rank());
  const size_t piece = piece_of(comm, buffer.nbytes());
  const Shards shards(buffer, piece, comm.size());
  const auto pieces = static_cast<uint32_t>(shards.pieces());
  const auto ring = comm.take(piece, pieces);
  const uint32_t base = comm.base_step;
  const bool gets_result = root == kEverybody || root == comm.rank();
  std::vector<const void*> operands(ranks);
  for (uint32_t s = 0; s < pieces + 2; s++) {
    if (s < pieces) {
      // This slot held chunk s - depth, which every rank copied out in step s - depth + 2. The wait of the previous
      // step showed that every rank had finished step s - 2. A depth of 4 is therefore enough.
      for (size_t r = 0; r < ranks; r++) {
        const auto shard = shards.shard(s, r);
        if (r != me) comm.copier().copy(ring.at(comm.rank(), s) + shard.offset, shard.data, shard.nbytes);
      }
    }
    if (s >= 1) comm.wait_step_of_all(call, base + s);
    if (s >= 1 && s <= pieces) {
      const auto shard = shards.shard(s - 1, me);
      for (size_t r = 0; r < ranks; r++) {
        operands[r] = r == me ? shard.data : ring.at(static_cast<int>(r), s - 1) + shard.offset;
      }
      std::byte* shared = ring.at(comm.rank(), s - 1) + shard.offset;
      if (gets_result) {
        kernel(shard.data, operands.data(), comm.size(), shard.count, comm.size());
        if (root == kEverybody) comm.copier().copy(shared, shard.data, shard.nbytes);
      } else {
        kernel(shared, operands.data(), comm.size(), shard.count, comm.size());
      }
    }
    if (s >= 2 && gets_result) {
      for (size_t r = 0; r < ranks; r++) {
        const auto shard = shards.shard(s - 2, r);
        if (r != me) std::memcpy(shard.data, ring.at(static_cast<int>(r), s - 2) + shard.offset, shard.nbytes);
      }
    }
    if (s <= pieces) comm.post_step(base + s + 1);
  }
  comm.base_step = base + pieces + 1;
}

// Return the largest operand for which one-shot is used. Each rank reads all operands, so the limit decreases with the
// number of ranks.
size_t one_shot_bytes(const LocalComm& comm) {
  const Tuning& tuning = comm.tuning();
  return std::min(
      {size_t{tuning.one_shot}, tuning.one_shot_of_all / static_cast<size_t>(comm.size()), comm.shm().sizes().piece});
}

void choose(LocalComm& comm, LocalComm::Call& call, Buffer buffer, ReduceOp op, int root) {
  const Kernel kernel = kernel_for(buffer.dtype, op);
  if (kernel == nullptr) throw Error("no kernel reduces this dtype with this op");
  const size_t n = buffer.nbytes();
  if (n <= CallLine::kInline) {
    one_shot(comm, call, buffer, kernel, root, true);
  } else if (n <= one_shot_bytes(comm)) {
    one_shot(comm, call, buffer, kernel, root, false);
  } else if (const auto operands = comm.arrive_at(call, buffer.data, n); !operands.empty()) {
    in_place(comm, call, buffer, kernel, root, operands);
  } else {
    two_shot(comm, call, buffer, kernel, root);
  }
}

}  // namespace

void all_reduce(LocalComm& comm, LocalComm::Call& call, Buffer buffer, ReduceOp op) {
  choose(comm, call, buffer, op, kEverybody);
}

void reduce(LocalComm& comm, LocalComm::Call& call, Buffer buffer, ReduceOp op, int root) {
  choose(comm, call, buffer, op, root);
}

void all_reduce(LocalComm& comm, LocalComm::Call& call, const Operation& operation) {
  all_reduce(comm, call, operation.buffer, operation.fingerprint.op);
}

void reduce(LocalComm& comm, LocalComm::Call& call, const Operation& operation) {
  reduce(comm, call, operation.buffer, operation.fingerprint.op, operation.fingerprint.root);
}

}  // namespace allranks::algorithms
