// The verbs of a group that spans hosts. Each verb consists of an exchange (inter_host_comm.h), algorithms within one
// host (algorithms/), and transfers between ranks of different hosts. Small calls need only the exchange.
//
// "Even hosts" below means that all hosts have the same number of ranks.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>

#include "collective/algorithms/algorithms.h"
#include "collective/algorithms/moves.h"
#include "collective/direct_reduction.h"
#include "collective/inter_host_comm.h"

namespace allranks {

namespace {

constexpr size_t kSegment = 256 << 10;  // bytes that a host forwards while the next bytes are in transit
constexpr size_t kWhole = 32 << 10;     // up to this size, every host receives all data of a reduce_scatter
constexpr size_t kSlab = 4 << 20;       // bytes copied to scratch memory per slab
// Bytes per slab of a broadcast over lanes; after each slab, the ranks of a host exchange their shares. Slabs of 1 MB
// had 0.6 times the speed between 4 hosts (docs/decisions/114).
constexpr size_t kRelayed = 4 << 20;
// Bytes from which all ranks of a host take part in a broadcast or reduce. Below, this is slower: each slab costs one
// more synchronization of the ranks of each host (docs/decisions/114).
constexpr size_t kLanes = 4 << 20;
// Bytes per slab of an all_reduce with overlapping levels. 2 and 8 MB made no measurable difference
// (docs/decisions/123).
constexpr size_t kStaged = 4 << 20;

Kernel kernel_of(DType dtype, ReduceOp op) {
  const Kernel kernel = kernel_for(dtype, op);
  if (kernel == nullptr) throw Error("no kernel reduces this dtype with this op");
  return kernel;
}

}  // namespace

// --- shared helpers ---

std::vector<int> InterHostComm::leaders() const {
  std::vector<int> ranks;
  for (int h = 0; h < hosts_.count(); h++) ranks.push_back(hosts_.leader(h));
  return ranks;
}

std::vector<int> InterHostComm::counterparts() const {
  std::vector<int> ranks;
  for (int h = 0; h < hosts_.count(); h++) ranks.push_back(counterpart(h));
  return ranks;
}

InterHostComm::Pieces InterHostComm::of_local_ranks(const Pieces& all) const {
  Pieces pieces;
  for (const int r : local_ranks()) pieces.push_back(all[static_cast<size_t>(r)]);
  return pieces;
}

std::vector<std::byte>& InterHostComm::scratch_memory(size_t index) {
  if (scratch_.size() <= index) scratch_.resize(index + 1);
  return scratch_[index];
}

std::byte* InterHostComm::scratch(size_t index, size_t nbytes) {
  auto& memory = scratch_memory(index);
  if (memory.size() < nbytes) memory.resize(nbytes);
  return memory.data();
}

void InterHostComm::across(LocalComm::Call& call, const std::vector<int>& peers, Buffer operand, ReduceOp op,
                           int root) {
  if (has_chains()) return across_chain(call, peers, operand, op, root);
  constexpr size_t kAhead = 1;
  DirectReduction reduction(net_, call, peers, operand, op, root, kAhead);
  reduction.lay_out(scratch(1, reduction.slots_bytes()), scratch(0, reduction.aside_bytes()));
  for (size_t s = 0; s < reduction.steps() + kAhead; s++) {
    if (s < reduction.steps()) reduction.send(s);
    if (s >= kAhead) reduction.reduce(s - kAhead);
  }
  settle(call);
}

// --- the verbs; the header comments of the files in algorithms/ define their results ---

// Small: every rank reduces the contributions of the hosts. Large, even hosts: reduce-scatter on each host, reduction
// of each rank's shard with its counterparts, all-gather on each host. A Trial selects the faster variant. From 8 MB
// on, the alternative is to overlap the levels; below 8 MB, that only the leaders communicate. Large, other hosts: only
// the leaders communicate. Above 8 hosts, large calls use chains and rings (inter_host_chains.cc).
//
// Cost: half a round trip; large: two more round trips, and 2 (H-1)/H n bytes over each host's network.
void InterHostComm::all_reduce(LocalComm::Call& call, Buffer buffer, ReduceOp op) {
  const size_t n = buffer.nbytes();
  const Kernel kernel = kernel_of(buffer.dtype, op);
  const Kernel partly = kernel_of(buffer.dtype, partial_op(op));
  if (fits(n * static_cast<size_t>(hosts_.count()))) {
    const auto gathered = exchange(call, buffer.data, {[n](int) { return n; }, partly, buffer.count});
    std::vector<const void*> operands(gathered.begin(), gathered.end());
    kernel(buffer.data, operands.data(), hosts_.count(), buffer.count, hosts_.ranks());
    return;
  }
  if (has_lanes() && !has_chains()) {
    constexpr std::array kBelow{Way::lanes, Way::leaders};
    constexpr std::array kFrom{Way::stages, Way::lanes};
    Trial& trial = trials_[std::min<size_t>(std::bit_width(n), trials_.size() - 1)];
    const Way way = (n < 2 * kStaged ? kBelow : kFrom)[choose_way(call, trial)];
    const int64_t began = sys::now_ns();
    all_reduce_on_levels(call, buffer, op, way);
    return trial.took(sys::now_ns() - began, n);
  }
  exchange(call, nullptr, {.nbytes = [](int) { return size_t{0}; }});
  if (local_comm_.size() == 1 && hosts_.even()) return across(call, leaders(), buffer, op, -1);
  all_reduce_on_levels(call, buffer, op, hosts_.even() ? Way::lanes : Way::leaders);
}

// Run the exchange of a call that has two variants. Returns the variant, which is the same on all ranks. During the
// trial, the exchange contains the duration of the previous call.
size_t InterHostComm::choose_way(LocalComm::Call& call, Trial& trial) {
  const size_t length = trial.under_way() ? sizeof trial.duration() : 0;
  const auto gathered = exchange(call, &trial.duration(), {.nbytes = [length](int) { return length; }});
  std::vector<uint64_t> durations(length > 0 ? ranks() : 0);
  for (size_t r = 0; r < durations.size(); r++) {
    const int rank = static_cast<int>(r);
    const std::byte* of_host = gathered[static_cast<size_t>(hosts_.of(rank))];
    std::memcpy(&durations[r], of_host + static_cast<size_t>(hosts_.place(rank)) * length, length);
  }
  return trial.choose(durations);
}

void InterHostComm::all_reduce_on_levels(LocalComm::Call& call, Buffer buffer, ReduceOp op, Way way) {
  const auto local_size = static_cast<size_t>(local_comm_.size());
  const size_t element = size_of(buffer.dtype);
  const size_t share = way == Way::leaders ? 0 : buffer.count / local_size;
  if (way == Way::stages) {
    all_reduce_in_stages(call, {buffer.data, share * local_size, buffer.dtype}, op);
  } else if (share > 0) {
    Pieces shards;
    for (size_t p = 0; p < local_size; p++) shards.push_back(buffer.bytes() + p * share * element);
    const Buffer mine{shards[static_cast<size_t>(place())], share, buffer.dtype};
    algorithms::reduce_scatter(local_comm_, next(call), shards, mine, partial_op(op));
    across(call, counterparts(), mine, op, -1);
    algorithms::all_gather(local_comm_, next(call), mine, shards);
  }
  // The rest that cannot be divided evenly among the ranks: the leaders reduce it.
  const Buffer rest{buffer.bytes() + share * local_size * element, buffer.count - share * local_size, buffer.dtype};
  if (rest.count == 0) return;
  if (local_size > 1) algorithms::reduce(local_comm_, next(call), rest, partial_op(op), 0);
  if (place() == 0) across(call, leaders(), rest, op, -1);
  if (local_size > 1) algorithms::broadcast(local_comm_, next(call), rest, 0);
}

// Run in slabs: while one slab is reduced on each host, the previous slab is on the network, and the slab before that
// returns.
//
// While a rank synchronizes with the other ranks of its host, it moves no data between hosts. Before that, it therefore
// passes to the kernel as much queued data as the kernel accepts. It also waits until the kernel has all data that was
// queued in the previous turn. Without this wait, two hosts could wait for each other: the other host needs this data
// to reach the same turn.
void InterHostComm::all_reduce_in_stages(LocalComm::Call& call, Buffer buffer, ReduceOp op) {
  const size_t element = size_of(buffer.dtype);
  const size_t lanes = ranks_of_host();
  const size_t slab = std::max<size_t>(kStaged / element / lanes / 64 * 64, 64) * lanes;
  const size_t slabs = algorithms::steps_for(buffer.count, slab);
  const auto shares_of = [&](size_t k) {
    const size_t share = std::min(slab, buffer.count - k * slab) / lanes;
    Pieces shares;
    for (size_t p = 0; p < lanes; p++) shares.push_back(buffer.bytes() + (k * slab + p * share) * element);
    return std::pair{shares, Buffer{shares[static_cast<size_t>(place())], share, buffer.dtype}};
  };
  const std::vector<int> peers = counterparts();
  constexpr size_t kUnderWay = 3;  // slabs in progress: one on each level
  std::array<std::optional<DirectReduction>, kUnderWay> between;
  std::vector<uint64_t> queued;  // by host: bytes queued for its peer at the end of the previous turn
  for (size_t k = 0; k < slabs + 2; k++) {
    if (k < slabs) {
      const auto [shares, mine] = shares_of(k);
      algorithms::reduce_scatter(local_comm_, next(call), shares, mine, partial_op(op));
      // ahead = mine.count: all steps are sent before the first is reduced. Two slot memories are enough, because slab
      // k - 2 was reduced in turn k - 1.
      auto& reduction = between[k % kUnderWay].emplace(net_, call, peers, mine, op, -1, mine.count);
      reduction.lay_out(scratch(k % 2, reduction.slots_bytes()), nullptr);
      for (size_t s = 0; s < reduction.steps(); s++) reduction.send(s);
    }
    if (k >= 1 && k <= slabs) {
      auto& reduction = *between[(k - 1) % kUnderWay];
      for (size_t s = 0; s < reduction.steps(); s++) reduction.reduce(s);
    }
    if (!queued.empty()) {
      for (const int peer : peers) {
        if (peer != me()) net_.wait_sent(call.patience, call.about, peer, queued[static_cast<size_t>(hosts_.of(peer))]);
      }
    }
    net_.advance();
    if (k >= 2) {
      between[(k - 2) % kUnderWay]->wait_results();
      const auto [shares, mine] = shares_of(k - 2);
      algorithms::all_gather(local_comm_, next(call), mine, shares);
    }
    net_.advance();
    queued.clear();
    for (const int peer : peers) queued.push_back(net_.queued(peer));
  }
  settle(call);
}

// Small: as all_reduce. Large, even hosts: in slabs. Each rank reduces its share with its counterparts, and the ranks
// of the root's host send their shares to the root. Large, other hosts: one rank of each host communicates, the leader
// or the root. It copies each slab to scratch memory, because operands of non-root ranks must stay unchanged.
//
// Cost: large: (H-1)/H n bytes out of each other host, and n bytes into the root's host.
void InterHostComm::reduce(LocalComm::Call& call, Buffer buffer, ReduceOp op, int root) {
  const size_t n = buffer.nbytes();
  const Kernel kernel = kernel_of(buffer.dtype, op);
  const Kernel partly = kernel_of(buffer.dtype, partial_op(op));
  if (fits(n * static_cast<size_t>(hosts_.count()))) {
    const auto gathered = exchange(call, buffer.data, {[n](int) { return n; }, partly, buffer.count});
    if (me() != root) return;
    std::vector<const void*> operands(gathered.begin(), gathered.end());
    kernel(buffer.data, operands.data(), hosts_.count(), buffer.count, hosts_.ranks());
    return;
  }
  exchange(call, nullptr, {.nbytes = [](int) { return size_t{0}; }});
  const size_t element = size_of(buffer.dtype);
  const size_t dealt = has_lanes() && n >= kLanes ? buffer.count / ranks_of_host() * ranks_of_host() : 0;
  if (dealt > 0) reduce_over_lanes(call, {buffer.data, dealt, buffer.dtype}, op, root);
  const Buffer rest{buffer.bytes() + dealt * element, buffer.count - dealt, buffer.dtype};
  if (rest.count > 0) reduce_by_leaders(call, rest, op, root);
}

void InterHostComm::reduce_over_lanes(LocalComm::Call& call, Buffer buffer, ReduceOp op, int root) {
  const size_t element = size_of(buffer.dtype);
  const size_t lanes = ranks_of_host();
  const size_t slab = std::max<size_t>(kSlab / element / lanes, 1) * lanes;
  for (size_t begin = 0; begin < buffer.count; begin += slab) {
    const size_t share = std::min(slab, buffer.count - begin) / lanes;
    Pieces shares;
    for (size_t p = 0; p < lanes; p++) shares.push_back(buffer.bytes() + (begin + p * share) * element);
    const Buffer mine{scratch(2, share * element), share, buffer.dtype};
    algorithms::reduce_scatter(local_comm_, next(call), shares, mine, partial_op(op));
    across(call, counterparts(), mine, op, hosts_.of(root));
    if (here() != hosts_.of(root)) continue;
    algorithms::gather(local_comm_, next(call), mine, me() == root ? shares : Pieces{}, hosts_.place(root));
  }
}

void InterHostComm::reduce_by_leaders(LocalComm::Call& call, Buffer buffer, ReduceOp op, int root) {
  auto peers = leaders();
  peers[static_cast<size_t>(hosts_.of(root))] = root;
  const int collector = peers[static_cast<size_t>(here())];
  const size_t element = size_of(buffer.dtype);
  // The slab size must be the same on all hosts, because they must divide the exchanged data equally.
  const size_t slab = hosts_.count() == hosts_.ranks() ? buffer.count : kSlab / element;
  for (size_t begin = 0; begin < buffer.count; begin += slab) {
    Buffer part{buffer.bytes() + begin * element, std::min(slab, buffer.count - begin), buffer.dtype};
    if (local_comm_.size() > 1) {
      if (me() == collector && me() != root) {
        std::byte* aside = scratch(2, part.nbytes());
        std::memcpy(aside, part.data, part.nbytes());
        part.data = aside;
      }
      algorithms::reduce(local_comm_, next(call), part, partial_op(op), hosts_.place(collector));
    }
    if (me() == collector) across(call, peers, part, op, hosts_.of(root));
  }
}

// Small: in the exchange. Large: from host to host. Each host forwards data while it receives more, so that no host
// sends the data more than once. Within a host, the data moves through shared memory. Even hosts: each rank forwards
// its share of every slab. The rest that cannot be divided evenly is part of the exchange.
//
// Cost: large: n bytes over each host's network, and the time of one segment per host.
void InterHostComm::broadcast(LocalComm::Call& call, Buffer buffer, int root) {
  const size_t n = buffer.nbytes();
  if (fits(n)) {
    const auto gathered = exchange(call, buffer.data,
                                   {.nbytes = [=](int r) { return r == root ? n : size_t{0}; },
                                    .into = [&](int h) { return h == hosts_.of(root) ? buffer.bytes() : nullptr; }});
    if (me() != root) algorithms::move_bytes(buffer.bytes(), gathered[static_cast<size_t>(hosts_.of(root))], n);
    return;
  }
  const size_t lanes = has_lanes() ? ranks_of_host() : 1;
  const size_t rest = n % (lanes * kLine);
  if (lanes == 1 || n < kLanes || !fits(rest)) {
    exchange(call, nullptr, {.nbytes = [](int) { return size_t{0}; }});
    return broadcast_by_relays(call, buffer, root);
  }
  std::byte* end = buffer.bytes() + n - rest;
  const auto gathered = exchange(call, end, {.nbytes = [=](int r) { return r == root ? rest : size_t{0}; }});
  if (me() != root) algorithms::move_bytes(end, gathered[static_cast<size_t>(hosts_.of(root))], rest);
  broadcast_over_lanes(call, {buffer.data, n - rest, DType::u8}, root);
}

// Return the hosts before and after this host, in the chain that starts at host `first`; -1: none.
std::pair<int, int> InterHostComm::chain_from(int first) const {
  const int count = hosts_.count();
  const int turn = (here() - first + count) % count;
  return {turn == 0 ? -1 : (here() - 1 + count) % count, turn == count - 1 ? -1 : (here() + 1) % count};
}

// The size of the buffer must be a multiple of kLine times the number of lanes.
void InterHostComm::broadcast_over_lanes(LocalComm::Call& call, Buffer buffer, int root) {
  const auto [before, after] = chain_from(hosts_.of(root));
  const size_t n = buffer.nbytes();
  const size_t lanes = ranks_of_host();
  const size_t slab = kRelayed / (lanes * kLine) * lanes * kLine;
  const auto share_of = [&](size_t begin) { return std::min(slab, n - begin) / lanes; };
  const auto mine = [&](size_t begin) {
    return buffer.bytes() + begin + static_cast<size_t>(place()) * share_of(begin);
  };
  std::vector<uint64_t> tickets;
  for (size_t begin = 0; begin < n && before >= 0; begin += slab) {
    for (size_t at = 0; at < share_of(begin); at += kSegment) {
      const size_t part = std::min(kSegment, share_of(begin) - at);
      tickets.push_back(net_.borrow(counterpart(before), mine(begin) + at, part));
    }
  }
  size_t come = 0;
  for (size_t begin = 0; begin < n; begin += slab) {
    const size_t share = share_of(begin);
    const Buffer whole{buffer.bytes() + begin, share * lanes, DType::u8};
    if (before < 0) algorithms::broadcast(local_comm_, next(call), whole, hosts_.place(root));
    for (size_t at = 0; at < share; at += kSegment) {
      if (before >= 0) {
        net_.wait_received(call.patience, call.about, counterpart(before), tickets[come++]);
      }
      if (after >= 0) net_.lend(counterpart(after), mine(begin) + at, std::min(kSegment, share - at));
    }
    if (before < 0) continue;
    Pieces shares;
    for (size_t p = 0; p < lanes; p++) shares.push_back(whole.bytes() + p * share);
    algorithms::all_gather(local_comm_, next(call), {mine(begin), share, DType::u8}, shares);
  }
  settle(call);
}

void InterHostComm::broadcast_by_relays(LocalComm::Call& call, Buffer buffer, int root) {
  const size_t n = buffer.nbytes();
  const int first = hosts_.of(root);
  const auto [host_before, host_after] = chain_from(first);
  const auto peer_on = [&](int host) { return host < 0 ? -1 : host == first ? root : hosts_.leader(host); };
  const int before = peer_on(host_before);
  const int after = peer_on(host_after);
  const int relay = peer_on(here());
  std::vector<uint64_t> tickets;
  if (me() == relay && before >= 0) {
    for (size_t at = 0; at < n; at += kSegment) {
      tickets.push_back(net_.borrow(before, buffer.bytes() + at, std::min(kSegment, n - at)));
    }
  }
  for (size_t begin = 0; begin < n; begin += kSlab) {
    const size_t end = std::min(n, begin + kSlab);
    for (size_t at = begin; me() == relay && at < end; at += kSegment) {
      if (before >= 0) net_.wait_received(call.patience, call.about, before, tickets[at / kSegment]);
      if (after >= 0) net_.lend(after, buffer.bytes() + at, std::min(kSegment, n - at));
    }
    if (local_comm_.size() > 1) {
      algorithms::broadcast(local_comm_, next(call), {buffer.bytes() + begin, end - begin, DType::u8},
                            hosts_.place(relay));
    }
  }
  settle(call);
}

// Small: in the exchange. Large: each rank sends its operand to one rank of every other host. That rank distributes it
// within its host through shared memory.
//
// Cost: large: (P - ranks of the host) n bytes over each host's network.
void InterHostComm::all_gather(LocalComm::Call& call, Buffer in, const Pieces& outs) {
  const size_t n = in.nbytes();
  bool overlaps = false;  // received data would overwrite the operand before it has been sent
  for (size_t r = 0; r < outs.size(); r++) {
    const bool in_place = r == static_cast<size_t>(me()) && outs[r] == in.bytes();
    overlaps = overlaps || (!in_place && algorithms::intersect(outs[r], n, in.bytes(), n));
  }
  if (fits(n * ranks())) {
    const bool direct = !outs.empty() && !overlaps && hosts_.count() == hosts_.ranks();
    const auto into = [&](int h) { return direct ? outs[static_cast<size_t>(hosts_.leader(h))] : nullptr; };
    const auto gathered = exchange(call, in.data, {.nbytes = [n](int) { return n; }, .into = into});
    // Must run before any other output is written, because `in` may overlap the output of another rank.
    if (!outs.empty()) algorithms::move_bytes(outs[static_cast<size_t>(me())], in.bytes(), n);
    for (size_t r = 0; r < outs.size(); r++) {
      const int rank = static_cast<int>(r);
      if (rank == me()) continue;
      const std::byte* from =
          gathered[static_cast<size_t>(hosts_.of(rank))] + static_cast<size_t>(hosts_.place(rank)) * n;
      algorithms::move_bytes(outs[r], from, n);
    }
    return;
  }
  exchange(call, nullptr, {.nbytes = [](int) { return size_t{0}; }});
  if (overlaps) {
    std::byte* aside = scratch(2, n);
    std::memcpy(aside, in.data, n);
    in.data = aside;
  }
  if (has_chains()) return all_gather_around(call, in, outs);
  const auto local_size = static_cast<size_t>(local_comm_.size());
  for (int h = 0; h < hosts_.count(); h++) {
    if (h == here()) continue;
    const auto& there = hosts_.on(h);
    net_.lend(there[static_cast<size_t>(place()) % there.size()], in.data, n);
    for (size_t p = static_cast<size_t>(place()); p < there.size(); p += local_size) {
      net_.borrow(there[p], outs[static_cast<size_t>(there[p])], n);
    }
  }
  if (local_size == 1) {
    algorithms::move_bytes(outs[static_cast<size_t>(me())], in.bytes(), n);
    return settle(call);
  }
  algorithms::all_gather(local_comm_, next(call), in, of_local_ranks(outs));
  settle(call);
  spread(call, outs, n, local_size);
}

// Distribute the data received from other hosts to all ranks of this host. Local rank q % lanes has received the data
// of local rank q of another host.
void InterHostComm::spread(LocalComm::Call& call, const Pieces& outs, size_t n, size_t lanes) {
  for (int h = 0; h < hosts_.count(); h++) {
    if (h == here()) continue;
    const auto& there = hosts_.on(h);
    for (size_t begin = 0; begin < there.size(); begin += lanes) {
      const size_t some = std::min(lanes, there.size() - begin);
      Pieces pieces;
      for (size_t p = 0; p < some; p++) pieces.push_back(outs[static_cast<size_t>(there[begin + p])]);
      if (some == ranks_of_host()) {
        algorithms::all_gather(local_comm_, next(call), {pieces[static_cast<size_t>(place())], n, DType::u8}, pieces);
        continue;
      }
      for (size_t p = 0; p < some; p++) {
        algorithms::broadcast(local_comm_, next(call), {pieces[p], n, DType::u8}, static_cast<int>(p));
      }
    }
  }
}

// Small: as all_gather. Large: every rank of another host sends directly to the root. The ranks of the root's host use
// shared memory. Above 8 hosts, the leaders forward the data of further hosts (inter_host_chains.cc).
//
// Cost: large: n bytes per rank of another host into the root's host.
void InterHostComm::gather(LocalComm::Call& call, Buffer in, const Pieces& outs, int root) {
  const size_t n = in.nbytes();
  if (fits(n * ranks())) return all_gather(call, in, outs);
  exchange(call, nullptr, {.nbytes = [](int) { return size_t{0}; }});
  if (hosts_.of(root) != here()) {
    if (has_chains()) return gather_up_tree(call, in, outs, root);
    net_.lend(root, in.data, n);
    return settle(call);
  }
  if (me() == root) {
    // The operand of the root may overlap the output of another rank, so move it before any output is written.
    algorithms::move_bytes(outs[static_cast<size_t>(me())], in.bytes(), n);
    in.data = outs[static_cast<size_t>(me())];
    for (size_t r = 0; r < outs.size() && !has_chains(); r++) {
      if (hosts_.of(static_cast<int>(r)) != here()) net_.borrow(static_cast<int>(r), outs[r], n);
    }
  }
  if (local_comm_.size() > 1) {
    algorithms::gather(local_comm_, next(call), in, me() == root ? of_local_ranks(outs) : Pieces{}, hosts_.place(root));
  }
  if (has_chains() && me() == root) return gather_up_tree(call, in, outs, root);
  settle(call);
}

// Small: in the exchange. Large: the root sends directly to every rank of another host. The ranks of its own host use
// shared memory. Above 8 hosts, the leaders forward the data for further hosts (inter_host_chains.cc).
//
// Cost: large: n bytes per rank of another host out of the root's host.
void InterHostComm::scatter(LocalComm::Call& call, const Pieces& ins, Buffer out, int root) {
  const size_t n = out.nbytes();
  if (fits(n * ranks())) {
    const std::byte* mine = nullptr;
    if (me() == root) {
      std::byte* packed = scratch(2, n * ranks());
      for (size_t r = 0; r < ranks(); r++) algorithms::move_bytes(packed + r * n, ins[r], n);
      mine = packed;
    }
    const size_t all = n * ranks();
    const auto gathered = exchange(call, mine, {.nbytes = [=](int r) { return r == root ? all : size_t{0}; }});
    algorithms::move_bytes(out.bytes(), gathered[static_cast<size_t>(hosts_.of(root))] + static_cast<size_t>(me()) * n,
                           n);
    return;
  }
  exchange(call, nullptr, {.nbytes = [](int) { return size_t{0}; }});
  if (hosts_.of(root) != here()) {
    if (has_chains()) return scatter_down_tree(call, ins, out, root);
    net_.borrow(root, out.data, n);
    return settle(call);
  }
  if (me() == root && has_chains()) {
    scatter_down_tree(call, ins, out, root);
  } else if (me() == root) {
    for (size_t r = 0; r < ins.size(); r++) {
      if (hosts_.of(static_cast<int>(r)) != here()) net_.lend(static_cast<int>(r), ins[r], n);
    }
    settle(call);  // before `out` is written, because it may overlap an input that other hosts still read
  }
  if (local_comm_.size() > 1) {
    algorithms::scatter(local_comm_, next(call), me() == root ? of_local_ranks(ins) : Pieces{}, out,
                        hosts_.place(root));
  } else {
    algorithms::move_bytes(out.bytes(), ins[static_cast<size_t>(me())], n);
  }
}

// Small: in the exchange. Large: in slabs. For each other host, the ranks of this host reduce the operands for its
// ranks, one result per local rank, and send the results there.
//
// Cost: large: (P - ranks of the host) n bytes over each host's network.
void InterHostComm::reduce_scatter(LocalComm::Call& call, const Pieces& ins, Buffer out, ReduceOp op) {
  const size_t n = out.nbytes();
  const Kernel kernel = kernel_of(out.dtype, op);
  const Kernel partly = kernel_of(out.dtype, partial_op(op));
  const auto hosts = static_cast<size_t>(hosts_.count());
  std::vector<const void*> operands(hosts);
  if (n * ranks() * hosts <= kWhole && has_room(n * ranks() * hosts)) {
    std::byte* packed = scratch(2, n * ranks());
    for (size_t r = 0; r < ranks(); r++) algorithms::move_bytes(packed + r * n, ins[r], n);
    const size_t all = n * ranks();
    const auto gathered = exchange(call, packed, {[all](int) { return all; }, partly, out.count * ranks()});
    for (size_t h = 0; h < hosts; h++) operands[h] = gathered[h] + static_cast<size_t>(me()) * n;
    kernel(out.data, operands.data(), hosts_.count(), out.count, hosts_.ranks());
    return;
  }
  exchange(call, nullptr, {.nbytes = [](int) { return size_t{0}; }});
  if (has_chains())
    return hosts_.even() ? reduce_scatter_over_chains(call, ins, out, op)
                         : reduce_scatter_by_leaders(call, ins, out, op);
  const auto local_size = static_cast<size_t>(local_comm_.size());
  const auto at = static_cast<size_t>(place());
  const size_t element = size_of(out.dtype);
  const size_t slab = std::max<size_t>(64, kSlab / ranks()) / element;
  for (size_t begin = 0; begin < out.count; begin += slab) {
    const size_t count = std::min(slab, out.count - begin);
    const size_t bytes = count * element;
    size_t used = 2;
    const auto piece = [&](int r) { return ins[static_cast<size_t>(r)] + begin * element; };
    // Reduce the operands for the ranks of[first], of[first + 1], ...: one result on each local rank.
    const auto reduced = [&](const std::vector<int>& of, size_t first) -> const std::byte* {
      if (local_size == 1) return piece(of[first]);
      Pieces pieces;
      for (size_t p = 0; p < local_size; p++) pieces.push_back(piece(of[std::min(first + p, of.size() - 1)]));
      const Buffer result{scratch(used++, bytes), count, out.dtype};
      algorithms::reduce_scatter(local_comm_, next(call), pieces, result, partial_op(op));
      return static_cast<const std::byte*>(result.data);
    };
    for (int h = 0; h < hosts_.count(); h++) {
      const auto& there = hosts_.on(h);
      if (h == here()) {
        operands[static_cast<size_t>(h)] = reduced(there, 0);
        continue;
      }
      for (size_t first = 0; first < there.size(); first += local_size) {
        const std::byte* mine = reduced(there, first);
        if (first + at < there.size()) net_.lend(there[first + at], mine, bytes);
      }
      std::byte* theirs = scratch(used++, bytes);
      operands[static_cast<size_t>(h)] = theirs;
      net_.borrow(there[at % there.size()], theirs, bytes);
    }
    settle(call);
    kernel(out.bytes() + begin * element, operands.data(), hosts_.count(), count, hosts_.ranks());
  }
}

// Compare the sizes (inter_host_comm.cc). Then each rank sends directly to every rank of another host, and uses shared
// memory within its host. Cost: the bytes for other hosts, over the network.
void InterHostComm::all_to_all(LocalComm::Call& call, const Operation& operation) {
  const auto& [ins, outs] = std::tie(operation.ins, operation.outs);
  const auto& [in_bytes, out_bytes] = std::tie(operation.in_bytes, operation.out_bytes);
  const auto own = static_cast<size_t>(me());
  const Bytes along = compare_sizes(call, operation);
  Pieces from = ins;
  const auto overlap = [&] {
    for (size_t a = 0; a < ranks(); a++) {
      for (size_t b = 0; b < ranks(); b++) {
        if (algorithms::intersect(outs[a], out_bytes[a], ins[b], in_bytes[b]) && !(a == own && b == own)) return true;
      }
    }
    return false;
  };
  if (along[own] == nullptr && overlap()) {
    // Received data would overwrite inputs that have not been sent yet.
    std::byte* aside = scratch(2, std::accumulate(in_bytes.begin(), in_bytes.end(), size_t{0}));
    for (size_t r = 0; r < ranks(); r++) {
      algorithms::move_bytes(aside, ins[r], in_bytes[r]);
      from[r] = aside;
      aside += in_bytes[r];
    }
  }
  std::vector<size_t> sent_here;
  std::vector<size_t> got_here;
  bool all_along_here = true;
  for (size_t r = 0; r < ranks(); r++) {
    const int rank = static_cast<int>(r);
    const bool sends = along[own] == nullptr;
    const bool gets = along[r] == nullptr;
    if (!gets) algorithms::move_bytes(outs[r], along[r], out_bytes[r]);
    if (hosts_.of(rank) == here()) {
      sent_here.push_back(sends ? in_bytes[r] : 0);
      got_here.push_back(gets ? out_bytes[r] : 0);
      all_along_here = all_along_here && !gets;
      continue;
    }
    if (sends) net_.lend(rank, from[r], in_bytes[r]);
    if (gets) net_.borrow(rank, outs[r], out_bytes[r]);
  }
  if (local_comm_.size() == 1) {
    if (along[own] == nullptr) algorithms::move_bytes(outs[own], from[own], in_bytes[own]);
  } else if (!all_along_here) {
    algorithms::all_to_all(local_comm_, next(call), of_local_ranks(from), sent_here, of_local_ranks(outs), got_here);
  }
  settle(call);
}

}  // namespace allranks
