// The verbs between many hosts. A connection from each rank to every host would be too many connections.
//
// Reductions use a chain of the hosts (chain.h), and all_gather uses a ring of the hosts. A rank communicates only with
// its counterparts on the previous and the next host. gather and scatter use a binomial tree of the hosts. The leader
// of a host communicates with the leaders of the hosts at a distance of 2^k.
#include <algorithm>
#include <cstring>

#include "collective/algorithms/algorithms.h"
#include "collective/algorithms/moves.h"
#include "collective/chain.h"
#include "collective/inter_host_comm.h"

namespace allranks {

namespace {

constexpr size_t kSlab = 16 << 20;      // bytes copied to scratch memory per slab; the chain is idle between slabs
constexpr size_t kSegment = 128 << 10;  // bytes of a segment in the ring of hosts

}  // namespace

void InterHostComm::across_chain(LocalComm::Call& call, const std::vector<int>& peers, Buffer operand, ReduceOp op,
                                 int root) {
  const bool stays = root >= 0 && root != here();
  const size_t slab = root < 0 ? operand.count : kSlab / size_of(operand.dtype);
  for (size_t begin = 0; begin < operand.count; begin += slab) {
    Buffer part{operand.bytes() + begin * size_of(operand.dtype), std::min(slab, operand.count - begin), operand.dtype};
    if (stays) {
      std::byte* aside = scratch(0, part.nbytes());
      std::memcpy(aside, part.data, part.nbytes());
      part.data = aside;
    }
    Chain chain(net_, call, peers, part, op);
    chain.add(0, part.count, std::max(root, 0));
    chain.run(scratch_memory(1));
    settle(call);
  }
}

// Hosts are numbered from the host of the root. The parent of host t is t without its lowest set bit.
InterHostComm::Branch InterHostComm::branch_of(int root) const {
  const int count = hosts_.count();
  const int first = hosts_.of(root);
  const int turn = (here() - first + count) % count;
  const int span = turn == 0 ? count : turn & -turn;  // maximum number of hosts in the subtree of this host
  const auto host_at = [&](int t) { return (first + t) % count; };
  const auto relay_of = [&](int t) { return t == 0 ? root : hosts_.leader(host_at(t)); };
  Branch branch{.relay = relay_of(turn), .parent = turn == 0 ? -1 : relay_of(turn - span), .below = {}};
  for (int begin = 1; begin < span && turn + begin < count; begin *= 2) {
    for (int t = turn + begin; t < std::min(turn + 2 * begin, count); t++) {
      for (const int r : hosts_.on(host_at(t))) branch.below.push_back({.rank = r, .by = relay_of(turn + begin)});
    }
  }
  return branch;
}

// Run in slabs of every rank's operand. Each leader forwards the operands of its host and of its subtree to its parent.
void InterHostComm::gather_up_tree(LocalComm::Call& call, Buffer in, const Pieces& outs, int root) {
  const size_t n = in.nbytes();
  const Branch branch = branch_of(root);
  const bool relays = me() == branch.relay;
  const size_t slab = std::max<size_t>(64, kSlab / ranks());
  for (size_t begin = 0; begin < n; begin += slab) {
    const size_t part = std::min(slab, n - begin);
    Pieces mine;  // operands of the ranks of this host, if they are forwarded
    if (branch.parent >= 0) {
      std::byte* memory = relays ? scratch(2, ranks_of_host() * part) : nullptr;
      for (size_t p = 0; relays && p < ranks_of_host(); p++) mine.push_back(memory + p * part);
      const Buffer given{in.bytes() + begin, part, DType::u8};
      if (local_comm_.size() > 1) {
        algorithms::gather(local_comm_, next(call), given, mine, 0);
      } else {
        mine.front() = given.bytes();
      }
    }
    if (!relays) continue;
    for (const std::byte* piece : mine) net_.lend(branch.parent, piece, part);
    std::byte* coming = branch.parent < 0 ? nullptr : scratch(3, branch.below.size() * part);
    std::vector<uint64_t> tickets;
    for (const auto& [rank, by] : branch.below) {
      std::byte* to = coming != nullptr ? coming + tickets.size() * part : outs[static_cast<size_t>(rank)] + begin;
      tickets.push_back(net_.borrow(by, to, part));
    }
    for (size_t i = 0; i < tickets.size() && coming != nullptr; i++) {
      net_.wait_received(call.patience, call.about, branch.below[i].by, tickets[i]);
      net_.lend(branch.parent, coming + i * part, part);
    }
    settle(call);
  }
}

// Run in slabs, in the opposite direction: each leader receives the data of its host and of its subtree.
void InterHostComm::scatter_down_tree(LocalComm::Call& call, const Pieces& ins, Buffer out, int root) {
  const size_t n = out.nbytes();
  const Branch branch = branch_of(root);
  const bool relays = me() == branch.relay;
  const size_t slab = std::max<size_t>(64, kSlab / ranks());
  for (size_t begin = 0; begin < n; begin += slab) {
    const size_t part = std::min(slab, n - begin);
    const Buffer got{out.bytes() + begin, part, DType::u8};
    Pieces mine;  // data for the ranks of this host
    if (relays && branch.parent < 0) {
      for (const auto& [rank, by] : branch.below) net_.lend(by, ins[static_cast<size_t>(rank)] + begin, part);
    } else if (relays) {
      std::byte* memory = scratch(2, ranks_of_host() * part);
      for (size_t p = 0; p < ranks_of_host(); p++) {
        mine.push_back(local_comm_.size() == 1 ? got.bytes() : memory + p * part);
        net_.borrow(branch.parent, mine.back(), part);
      }
      std::byte* coming = scratch(3, branch.below.size() * part);
      std::vector<uint64_t> tickets;
      for (size_t i = 0; i < branch.below.size(); i++) {
        tickets.push_back(net_.borrow(branch.parent, coming + i * part, part));
      }
      for (size_t i = 0; i < branch.below.size(); i++) {
        net_.wait_received(call.patience, call.about, branch.parent, tickets[i]);
        net_.lend(branch.below[i].by, coming + i * part, part);
      }
    }
    if (relays) settle(call);
    if (branch.parent >= 0 && local_comm_.size() > 1) {
      algorithms::scatter(local_comm_, next(call), mine, got, 0);
    }
  }
}

// For each host h, the ranks of this host reduce the operands for the ranks of h, one per local rank. The chains of the
// local ranks then reduce the results further.
void InterHostComm::reduce_scatter_over_chains(LocalComm::Call& call, const Pieces& ins, Buffer out, ReduceOp op) {
  const auto hosts = static_cast<size_t>(hosts_.count());
  const size_t element = size_of(out.dtype);
  const size_t slab = std::max<size_t>(64, kSlab / ranks()) / element;
  for (size_t begin = 0; begin < out.count; begin += slab) {
    const size_t count = std::min(slab, out.count - begin);
    const size_t bytes = count * element;
    std::byte* reduced = scratch(2, hosts * bytes);
    for (int h = 0; h < hosts_.count(); h++) {
      Pieces pieces;
      for (const int r : hosts_.on(h)) pieces.push_back(ins[static_cast<size_t>(r)] + begin * element);
      std::byte* result = reduced + static_cast<size_t>(h) * bytes;
      if (pieces.size() == 1) {
        std::memcpy(result, pieces.front(), bytes);
      } else {
        algorithms::reduce_scatter(local_comm_, next(call), pieces, {result, count, out.dtype}, partial_op(op));
      }
    }
    Chain chain(net_, call, counterparts(), {reduced, hosts * count, out.dtype}, op);
    for (size_t h = 0; h < hosts; h++) chain.add(h * count, count, static_cast<int>(h));
    chain.run(scratch_memory(1));
    settle(call);
    algorithms::move_bytes(out.bytes() + begin * element, reduced + static_cast<size_t>(here()) * bytes, bytes);
  }
}

// Variant for hosts with different numbers of ranks: only the leaders take part in a chain.
void InterHostComm::reduce_scatter_by_leaders(LocalComm::Call& call, const Pieces& ins, Buffer out, ReduceOp op) {
  const size_t element = size_of(out.dtype);
  const size_t slab = std::max<size_t>(64, kSlab / ranks()) / element;
  const bool leads = place() == 0;
  for (size_t begin = 0; begin < out.count; begin += slab) {
    const size_t count = std::min(slab, out.count - begin);
    const size_t bytes = count * element;
    std::byte* reduced = leads ? scratch(2, ranks() * bytes) : nullptr;
    Pieces here_pieces;
    for (size_t r = 0; r < ranks(); r++) {
      std::byte* piece = ins[r] + begin * element;
      if (leads) {
        std::memcpy(reduced + r * bytes, piece, bytes);
        piece = reduced + r * bytes;
        if (hosts_.of(static_cast<int>(r)) == here()) here_pieces.push_back(piece);
      }
      if (local_comm_.size() > 1) {
        algorithms::reduce(local_comm_, next(call), {piece, count, out.dtype}, partial_op(op), 0);
      }
    }
    if (leads) {
      Chain chain(net_, call, leaders(), {reduced, ranks() * count, out.dtype}, op);
      for (size_t r = 0; r < ranks(); r++) chain.add(r * count, count, hosts_.of(static_cast<int>(r)));
      chain.run(scratch_memory(1));
      settle(call);
    }
    const Buffer result{out.bytes() + begin * element, count, out.dtype};
    if (local_comm_.size() > 1) {
      algorithms::scatter(local_comm_, next(call), here_pieces, result, 0);
    } else {
      algorithms::move_bytes(result.bytes(), here_pieces.front(), bytes);
    }
  }
}

// The operands of each host travel around the ring in `lanes` lanes, the smallest number of ranks of any host. The rank
// of a lane forwards the data that it receives.
void InterHostComm::all_gather_around(LocalComm::Call& call, Buffer in, const Pieces& outs) {
  size_t lanes = ranks_of_host();
  for (int h = 0; h < hosts_.count(); h++) lanes = std::min(lanes, hosts_.on(h).size());
  if (local_comm_.size() > 1) {
    algorithms::all_gather(local_comm_, next(call), in, of_local_ranks(outs));
  } else {
    algorithms::move_bytes(outs[static_cast<size_t>(me())], in.bytes(), in.nbytes());
  }
  if (static_cast<size_t>(place()) < lanes) pass_around(call, outs, in.nbytes(), lanes);
  if (local_comm_.size() > 1) spread(call, outs, in.nbytes(), lanes);
}

void InterHostComm::pass_around(LocalComm::Call& call, const Pieces& outs, size_t n, size_t lanes) {
  const int count = hosts_.count();
  const auto lane = static_cast<size_t>(place());
  const int before = hosts_.on((here() - 1 + count) % count)[lane];
  const int after = hosts_.on((here() + 1) % count)[lane];
  struct Segment {
    std::byte* data;
    size_t nbytes;
    uint64_t ticket;
  };
  std::vector<Segment> coming;  // received segments that must be forwarded
  for (int turn = 0; turn < count; turn++) {
    const auto& there = hosts_.on((here() - turn + count) % count);
    for (size_t p = lane; p < there.size(); p += lanes) {
      std::byte* piece = outs[static_cast<size_t>(there[p])];
      for (size_t at = 0; at < n; at += kSegment) {
        const size_t part = std::min(kSegment, n - at);
        if (turn == 0) {
          net_.lend(after, piece + at, part);
          continue;
        }
        const uint64_t ticket = net_.borrow(before, piece + at, part);
        if (turn < count - 1) coming.push_back({piece + at, part, ticket});
      }
    }
  }
  for (const Segment& segment : coming) {
    net_.wait_received(call.patience, call.about, before, segment.ticket);
    net_.lend(after, segment.data, segment.nbytes);
  }
  settle(call);
}

}  // namespace allranks
