#include "collective/inter_host_comm.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>

#include "collective/algorithms/algorithms.h"
#include "collective/algorithms/moves.h"

namespace allranks {

namespace {

constexpr size_t kInExchange = 256 << 10;  // maximum bytes of all contributions in an exchange
constexpr size_t kAlong = 1 << 10;         // maximum bytes that a rank adds to the sizes of its all_to_all
constexpr size_t kAlongAlone = 16 << 10;   // the same limit if every rank is alone on its host
constexpr size_t kKept = 16 << 20;         // maximum bytes of a scratch memory that is kept between calls

size_t aligned(size_t nbytes) { return (nbytes + 63) / 64 * 64; }

// The collective streams of this rank, for one call.
class StreamsOfCall final : public LeaderStreams {
 public:
  StreamsOfCall(Net& net, LocalComm::Call& call) : net_(net), call_(call) {}
  void send(int host, const void* data, size_t nbytes) override { net_.send(leader(host), data, nbytes); }
  uint64_t receive(int host, void* data, size_t nbytes) override { return net_.receive(leader(host), data, nbytes); }
  void wait_received(int host, uint64_t until) override {
    net_.wait_received(call_.patience, call_.about, leader(host), until);
  }
  void flush() override { net_.flush(call_.patience, call_.about); }
  ClockOffset::Estimate clock_of(int host) override { return net_.clock_of(host, call_.entered_ns); }

 private:
  int leader(int host) const { return net_.hosts().leader(host); }

  Net& net_;
  LocalComm::Call& call_;
};

}  // namespace

void InterHostComm::run(LocalComm::Call& call, const Operation& operation) {
  net_.publish_call(call.about.call, operation.fingerprint);
  try {
    dispatch(call, operation);
  } catch (Error& error) {
    net_.clear();  // queued entries point to the caller's memory, which may be freed after the throw
    if (!call.all_hosts) call.arrival = {};
    if (error.failure.kind == Kind::timeout) error.waiting_for = net_.behind(call.about.call);
    throw;
  } catch (const sys::Forked&) {
    throw;
  } catch (...) {
    net_.clear();
    throw;
  }
  for (auto& part : scratch_) {
    if (part.capacity() > kKept) part = {};
  }
}

void InterHostComm::dispatch(LocalComm::Call& call, const Operation& operation) {
  const Fingerprint& f = operation.fingerprint;
  switch (f.verb) {
    case Verb::all_reduce:
      return all_reduce(call, operation.buffer, f.op);
    case Verb::broadcast:
      return broadcast(call, operation.buffer, f.root);
    case Verb::barrier:
      exchange(call, nullptr, {.nbytes = [](int) { return size_t{0}; }});
      return;
    case Verb::reduce:
      return reduce(call, operation.buffer, f.op, f.root);
    case Verb::all_gather:
      return all_gather(call, operation.buffer, operation.outs);
    case Verb::gather:
      return gather(call, operation.buffer, operation.outs, f.root);
    case Verb::scatter:
      return scatter(call, operation.ins, operation.buffer, f.root);
    case Verb::reduce_scatter:
      return reduce_scatter(call, operation.ins, operation.buffer, f.op);
    case Verb::all_to_all:
      return all_to_all(call, operation);
    case Verb::none:
    case Verb::send:
    case Verb::recv:
      throw Error("not a collective");
  }
}

// --- the exchange at the beginning of a call ---

bool InterHostComm::has_room(size_t total) const {
  const size_t ring = local_comm_.shm().sizes().ring;
  const size_t room = std::bit_ceil(total + 64 * static_cast<size_t>(hosts_.count()));  // upper bound for distribute()
  return room <= ring / 2 && ring % room == 0;
}

bool InterHostComm::fits(size_t total) const { return total <= kInExchange && has_room(total); }

// State of one exchange. Its phases are assemble, exchange_between_leaders and distribute.
struct InterHostComm::Exchange {
  LocalComm::Call& call;
  const void* mine;
  const Contribution& contribution;
  const bool alone;    // this rank is alone on its host
  const bool in_line;  // the operands of this host are in the call lines of its ranks
  bool agree;          // all fingerprints seen so far are equal, and there are no call sites to compare
  Bytes gathered;
  LocalComm::Pieces operands{};
  std::vector<Fingerprint> all{};  // fingerprints of all ranks; empty if they agree
};

InterHostComm::Bytes InterHostComm::exchange(LocalComm::Call& call, const void* mine,
                                             const Contribution& contribution) {
  size_t most = 0;
  for (const int r : local_ranks()) most = std::max(most, contribution.nbytes(r));
  Exchange e{.call = call,
             .mine = mine,
             .contribution = contribution,
             .alone = local_comm_.size() == 1,
             .in_line = most <= CallLine::kInline,
             .agree = call.about.fingerprint.site == 0,
             .gathered = Bytes(static_cast<size_t>(hosts_.count()))};
  if (!e.alone) {
    assemble(e, most);
  } else if (!call.all_hosts) {
    call.arrival = {.met_ns = call.entered_ns, .late_ns = call.entered_ns, .last = me()};
  }
  if (place() == 0) exchange_between_leaders(e);
  if (!e.alone) distribute(e);
  if (!e.all.empty()) {
    if (const auto error = local_comm_.judge(call, std::move(e.all))) disagree(call, *error);
  }
  // The call sites are compared once. The remaining steps of the call on this host must not compare them again.
  call.about.fingerprint.site = 0;
  return std::move(e.gathered);
}

size_t InterHostComm::bytes_of_host(const Contribution& contribution, int host) const {
  if (contribution.kernel != nullptr) return contribution.nbytes(hosts_.leader(host));
  size_t nbytes = 0;
  for (const int r : hosts_.on(host)) nbytes += contribution.nbytes(r);
  return nbytes;
}

const std::byte* InterHostComm::operand_of(const Exchange& e, int place) const {
  if (e.alone) return static_cast<const std::byte*>(e.mine);
  return e.in_line ? local_comm_.shm().call_line(place, e.call.number).payload.data() : e.operands.at(place);
}

// Compare the fingerprints of this host, and write this rank's operand to memory that the leader reads.
void InterHostComm::assemble(Exchange& e, size_t most) {
  const size_t own = e.contribution.nbytes(me());
  next(e.call);
  if (!e.in_line) {
    e.operands = local_comm_.take(most);
    local_comm_.copier().copy(e.operands.at(place()), static_cast<const std::byte*>(e.mine), own);
  }
  e.agree = local_comm_.assemble(e.call, e.mine, e.in_line ? own : 0);
}

// Write the message of this host into outgoing_.
LeaderMessage InterHostComm::write_message(const Exchange& e) {
  const Fingerprint& own = e.call.about.fingerprint;
  Opening opening{.call = e.call.about.call,
                  .each = 0,
                  .nbytes = bytes_of_host(e.contribution, here()),
                  .fingerprint = own,
                  .arrival = e.call.arrival};
  std::vector<Fingerprint> local;
  if (!e.agree) {
    local = e.alone ? std::vector{own} : local_comm_.fingerprints(e.call);
    opening.each = static_cast<uint32_t>(local.size());
    // A rank with a different call has contributed different data, so the message contains no contribution.
    if (!std::all_of(local.begin(), local.end(), [&](const auto& f) { return f.agrees(own); })) opening.nbytes = 0;
  }
  const size_t head = opening.head_bytes();
  outgoing_.resize(head + (e.alone ? 0 : opening.nbytes));
  std::memcpy(outgoing_.data(), &opening, sizeof opening);
  if (!local.empty()) std::memcpy(outgoing_.data() + sizeof opening, local.data(), head - sizeof opening);
  if (e.alone) return {outgoing_.data(), static_cast<const std::byte*>(e.mine)};
  std::byte* const body = outgoing_.data() + head;
  if (opening.nbytes > 0 && e.contribution.kernel != nullptr) {
    std::vector<const void*> operands;
    for (int p = 0; p < local_comm_.size(); p++) operands.push_back(operand_of(e, p));
    e.contribution.kernel(body, operands.data(), local_comm_.size(), e.contribution.count, local_comm_.size());
  } else if (opening.nbytes > 0) {
    std::byte* at = body;
    for (int p = 0; p < local_comm_.size(); p++) {
      const size_t n = e.contribution.nbytes(local_ranks()[static_cast<size_t>(p)]);
      if (n > 0) std::memcpy(at, operand_of(e, p), n);
      at += n;
    }
  }
  return {outgoing_.data(), body};
}

void InterHostComm::exchange_between_leaders(Exchange& e) {
  const LeaderMessage own = write_message(e);
  StreamsOfCall streams(net_, e.call);
  const std::vector<LeaderMessage> messages = leaders_.run(streams, own, e.contribution.into);
  for (size_t h = 0; h < messages.size(); h++) {
    const Opening opening = Opening::of(messages[h].head);
    e.gathered[h] = messages[h].body;
    e.agree = e.agree && opening.each == 0 && opening.fingerprint.agrees(e.call.about.fingerprint);
  }
  if (!e.call.all_hosts) {
    e.call.arrival = last_of(messages);
    e.call.all_hosts = true;
  }
  if (e.agree) return;
  e.all.resize(ranks());
  for (int h = 0; h < hosts_.count(); h++) {
    const std::byte* head = messages[static_cast<size_t>(h)].head;
    const Opening opening = Opening::of(head);
    for (const int r : hosts_.on(h)) {
      Fingerprint& f = e.all[static_cast<size_t>(r)];
      f = opening.fingerprint;
      if (opening.each == 0) continue;
      std::memcpy(&f, head + sizeof opening + static_cast<size_t>(hosts_.place(r)) * sizeof f, sizeof f);
    }
  }
}

// Distribute the received contributions within the host: the leader writes them into its ring.
void InterHostComm::distribute(Exchange& e) {
  const Fingerprint& own = e.call.about.fingerprint;
  size_t total = 0;
  for (int h = 0; h < hosts_.count(); h++) total += aligned(bytes_of_host(e.contribution, h));
  const auto results = local_comm_.take(total);
  StepLine& step = local_comm_.shm().step_line(0);
  const size_t listed = ranks() * sizeof(Fingerprint);
  local_comm_.base_step++;
  if (place() == 0) {
    if (std::all_of(e.all.begin(), e.all.end(), [&](const auto& f) { return f.agrees(own); })) {
      std::byte* at = results.at(0);
      for (int h = 0; h < hosts_.count(); h++) {
        const size_t n = bytes_of_host(e.contribution, h);
        if (n > 0) std::memcpy(at, e.gathered[static_cast<size_t>(h)], n);
        at += aligned(n);
      }
    }
    step.arrival = e.call.arrival;
    step.disagree = 0;
    if (!e.all.empty()) {
      const auto list = local_comm_.take(listed);
      std::memcpy(list.at(0), e.all.data(), listed);
      step.disagree = static_cast<uint32_t>(list.offset()) + 1;
    }
    local_comm_.post_step_to_any(local_comm_.base_step);
  } else {
    local_comm_.wait_step_of(e.call, 0, local_comm_.base_step);
    if (!e.call.all_hosts) e.call.arrival = step.arrival;
    e.call.all_hosts = true;
    if (step.disagree != 0) {
      local_comm_.take(listed);
      e.all.resize(ranks());
      std::memcpy(e.all.data(), local_comm_.shm().in_rings(0, step.disagree - 1), listed);
    }
  }
  const std::byte* at = results.at(0);
  for (int h = 0; h < hosts_.count(); h++) {
    e.gathered[static_cast<size_t>(h)] = at;
    at += aligned(bytes_of_host(e.contribution, h));
  }
}

// --- the sizes of an all_to_all ---

InterHostComm::Bytes InterHostComm::compare_sizes(LocalComm::Call& call, const Operation& operation) {
  const auto& in_bytes = operation.in_bytes;
  const auto& out_bytes = operation.out_bytes;
  // Record of a rank: the sizes that it sends to each rank, the sizes that it expects, and its data if that is small.
  const size_t row = 2 * ranks() * sizeof(uint64_t);
  Bytes along(ranks());
  if (!fits(row * ranks())) {
    compare_sizes_of_many(call, operation);
    return along;
  }
  // If hosts have several ranks, all records must have the same length.
  const bool alone = hosts_.count() == hosts_.ranks();
  const size_t most = alone ? kAlongAlone : fits((row + kAlong) * ranks()) ? kAlong : 0;
  const size_t total = std::accumulate(in_bytes.begin(), in_bytes.end(), size_t{0});
  const size_t length = row + (alone ? (total <= most ? total : 0) : most);
  std::byte* record = scratch(3, length);
  std::byte* at = record;
  for (const auto& sizes : {in_bytes, out_bytes}) {
    for (const uint64_t size : sizes) {
      std::memcpy(at, &size, sizeof size);
      at += sizeof size;
    }
  }
  for (size_t r = 0; r < ranks() && total <= most; r++) {
    algorithms::move_bytes(at, operation.ins[r], in_bytes[r]);
    at += in_bytes[r];
  }
  const auto gathered = exchange(call, record, {.nbytes = [length](int) { return length; }});
  const auto record_of = [&](int rank) {
    return gathered[static_cast<size_t>(hosts_.of(rank))] + static_cast<size_t>(hosts_.place(rank)) * length;
  };
  const auto size = [&](int rank, size_t column) {
    uint64_t value;
    std::memcpy(&value, record_of(rank) + column * sizeof value, sizeof value);
    return value;
  };
  for (int from = 0; from < hosts_.ranks(); from++) {
    size_t before = 0;  // bytes for the ranks before this rank, in the record of `from`
    size_t all = 0;
    for (int to = 0; to < hosts_.ranks(); to++) {
      const uint64_t sent = size(from, static_cast<size_t>(to));
      const uint64_t expected = size(to, ranks() + static_cast<size_t>(from));
      if (sent != expected) refuse_sizes(call, from, to, sent, expected);
      if (to == me()) before = all;
      all += sent;
    }
    if (all <= most) along[static_cast<size_t>(from)] = record_of(from) + row + before;
  }
  return along;
}

// Return the sizes that each rank sends to this rank, given the sizes that this rank sends. The leaders exchange them.
std::vector<uint64_t> InterHostComm::transpose_sizes(LocalComm::Call& call, const std::vector<size_t>& sizes) {
  std::vector<uint64_t> row(sizes.begin(), sizes.end());
  std::vector<uint64_t> column(ranks());
  const size_t line = ranks() * sizeof(uint64_t);
  const Buffer gives{row.data(), line, DType::u8};
  const Buffer gets{column.data(), line, DType::u8};
  if (place() != 0) {
    algorithms::gather(local_comm_, next(call), gives, {}, 0);
    algorithms::scatter(local_comm_, next(call), {}, gets, 0);
    return column;
  }
  if (local_comm_.size() == 1) return transpose_between_leaders(call, {std::move(row)})[0];
  Table rows(local_ranks().size(), std::vector<uint64_t>(ranks()));
  const auto pieces = [](Table& lines) {
    Pieces all;
    for (auto& l : lines) all.push_back(reinterpret_cast<std::byte*>(l.data()));
    return all;
  };
  algorithms::gather(local_comm_, next(call), gives, pieces(rows), 0);
  Table columns = transpose_between_leaders(call, rows);
  algorithms::scatter(local_comm_, next(call), pieces(columns), gets, 0);
  return column;
}

// Return, for each rank of this host, the sizes that each rank sends to it. rows: the sizes that each rank of this host
// sends.
InterHostComm::Table InterHostComm::transpose_between_leaders(LocalComm::Call& call, const Table& rows) {
  const auto count = static_cast<size_t>(hosts_.count());
  Table out(count);
  Table in(count);
  for (int h = 0; h < hosts_.count(); h++) {
    const auto i = static_cast<size_t>(h);
    for (const auto& theirs : rows) {
      for (const int r : hosts_.on(h)) out[i].push_back(theirs[static_cast<size_t>(r)]);
    }
    in[i].resize(hosts_.on(h).size() * rows.size());
    if (h == here()) {
      in[i] = out[i];
      continue;
    }
    net_.send(hosts_.leader(h), out[i].data(), out[i].size() * sizeof(uint64_t));
    net_.receive(hosts_.leader(h), in[i].data(), in[i].size() * sizeof(uint64_t));
  }
  flush(call);
  Table columns(rows.size(), std::vector<uint64_t>(ranks()));
  for (int r = 0; r < hosts_.ranks(); r++) {
    const auto& from = in[static_cast<size_t>(hosts_.of(r))];
    for (size_t p = 0; p < rows.size(); p++) {
      columns[p][static_cast<size_t>(r)] = from[static_cast<size_t>(hosts_.place(r)) * rows.size() + p];
    }
  }
  return columns;
}

// Variant for too many sizes to exchange all of them. The leaders exchange the sizes between their hosts, and every
// rank compares the sizes sent to it. A second exchange reports the result of each rank.
//
// Cost: two exchanges, and for each pair of hosts as many numbers as the product of their numbers of ranks.
void InterHostComm::compare_sizes_of_many(LocalComm::Call& call, const Operation& operation) {
  exchange(call, nullptr, {.nbytes = [](int) { return size_t{0}; }});
  const std::vector<uint64_t> column = transpose_sizes(call, operation.in_bytes);
  // The first mismatch: the sender, the size sent and the size expected. No mismatch: the sender is ranks().
  std::array<uint64_t, 3> found{ranks(), 0, 0};
  for (size_t from = ranks(); from-- > 0;) {
    if (column[from] != operation.out_bytes[from]) found = {from, column[from], operation.out_bytes[from]};
  }
  const auto gathered = exchange(call, found.data(), {.nbytes = [](int) { return sizeof found; }});
  std::array<uint64_t, 3> worst{ranks(), 0, 0};
  int to = 0;
  for (int r = 0; r < hosts_.ranks(); r++) {
    std::array<uint64_t, 3> theirs;
    std::memcpy(theirs.data(),
                gathered[static_cast<size_t>(hosts_.of(r))] + static_cast<size_t>(hosts_.place(r)) * sizeof theirs,
                sizeof theirs);
    if (theirs[0] >= worst[0]) continue;
    worst = theirs;
    to = r;
  }
  if (worst[0] < ranks()) refuse_sizes(call, static_cast<int>(worst[0]), to, worst[1], worst[2]);
}

void InterHostComm::refuse_sizes(LocalComm::Call& call, int from, int to, uint64_t sent, uint64_t expected) {
  Failure failure = call.about;
  failure.kind = Kind::mismatch;
  failure.peer = from;
  Error error(failure);
  error.text = "rank " + std::to_string(from) + " sends " + std::to_string(sent) + " bytes to rank " +
               std::to_string(to) + ", which expects " + std::to_string(expected);
  disagree(call, error);
}

void InterHostComm::disagree(LocalComm::Call& call, Error error) {
  const auto here = local_comm_.exchange_notes(call);
  error.sites = net_.exchange_notes(call.about, call.patience.caller, here);
  for (size_t p = 0; p < here.size(); p++) error.sites[static_cast<size_t>(local_ranks()[p])] = here[p];
  throw Error(error);
}

}  // namespace allranks
