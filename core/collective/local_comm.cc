#include "collective/local_comm.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

namespace allranks {

namespace {

constexpr size_t kFirstBytes =
    64 - offsetof(CallLine, payload);  // payload bytes in the same 64-byte cache line as the fingerprint
constexpr size_t kSmallPieces = 16;    // largest chunks that the small ring holds; half of them in the worst alignment
constexpr int64_t kNotesNs = 1'000'000'000;  // time for the ranks to write their call sites

// Return whether counter a has reached b. Counters wrap, so the sign of the difference decides.
bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

}  // namespace

LocalComm::LocalComm(std::unique_ptr<Shm> shm, const Tuning& tuning, const Place& place) : shm_(std::move(shm)) {
  shm_->introduce(place, tuning);
}

// Read the topology and tuning of all ranks. This is possible from the second call on: each rank writes them before its
// first call, in which every rank waits for all others.
void LocalComm::find_levels() {
  knows_all_ = true;
  tuning_ = shm_->tuning();
  std::vector<Place> places;
  for (int r = 0; r < size(); r++) places.push_back(shm_->place(r));
  const uint32_t from = is_crowded(places) ? tuning_.crowded_levels_from : tuning_.levels_from;
  if (static_cast<uint32_t>(size()) < std::max<uint32_t>(from, 3)) return;
  auto groups = near_ranks(places, std::clamp<size_t>(tuning_.group, 2, kGroup));
  if (groups.size() > 1) levels_.emplace(*shm_, groups);
}

bool LocalComm::meet(Call& call, const void* payload, size_t nbytes, size_t read, const Combining* combining) {
  shm_->check_verdict();
  if (!knows_all_ && call.number > 1) find_levels();
  CallLine& mine = shm_->call_line(rank(), call.number);
  mine.of_group = call.about.call;
  mine.fingerprint = call.about.fingerprint;
  mine.entered_ns = call.entered_ns;
  if (payload != nullptr && nbytes > 0) std::memcpy(mine.payload.data(), payload, nbytes);
  // Publishes the fingerprint, the payload and the data in the ring. seq_cst: pairs with Shm::ring, so that no sleeping
  // rank is missed.
  mine.number.store(call.number, std::memory_order_seq_cst);
  Arrived arrived;
  try {
    arrived = levels_ ? levels_->meet(call, read, combining) : meet_all(call);
  } catch (Error& error) {
    for (int p = 0; p < size(); p++) {
      // acquire is enough: this load is not followed by a sleep, so it does not pair with Shm::ring.
      if (shm_->call_line(p, call.number).number.load(std::memory_order_acquire) != call.number) {
        error.waiting_for.push_back(shm_->number(p));
      }
    }
    throw;
  }
  // All ranks have read the line of the previous call, so the next call may overwrite it. Prefetching takes the cache
  // line from the readers before the next call needs it.
  CallLine& next_line = shm_->call_line(rank(), call.number + 1);
  sys::prefetch_to_write(&next_line);
  if (nbytes > kFirstBytes) sys::prefetch_to_write(&next_line.payload[kFirstBytes]);
  if (!call.all_hosts) {
    call.arrival = {.met_ns = arrived.met_ns,
                    .late_ns = arrived.met_ns - arrived.before_last_ns,
                    .last = shm_->number(arrived.last)};
  }
  return arrived.agree;
}

// Synchronize without groups: every rank reads the call line of every rank.
Arrived LocalComm::meet_all(Call& call) {
  int r = 0;
  const auto missing = [&] {
    for (; r < size(); r++) {
      if (shm_->call_line(r, call.number).number.load(std::memory_order_seq_cst) != call.number) return shm_->number(r);
    }
    return -1;
  };
  if (missing() < 0) {
    Shm::ring(shm_->gate());  // only the last rank to arrive wakes the sleeping ranks
  } else {
    shm_->wait(shm_->gate(), call.patience, call.about, missing);
  }
  Arrived all;
  for (int p = 0; p < size(); p++) {
    const CallLine& line = shm_->call_line(p, call.number);
    all.add({.agree = line.fingerprint.agrees(call.about.fingerprint) && line.fingerprint.site == 0,
             .met_ns = line.entered_ns,
             .last = p});
  }
  return all;
}

std::vector<Fingerprint> LocalComm::fingerprints(const Call& call) {
  std::vector<Fingerprint> calls;
  for (int p = 0; p < size(); p++) calls.push_back(shm_->call_line(p, call.number).fingerprint);
  return calls;
}

std::optional<Error> LocalComm::judge(const Call& call, std::vector<Fingerprint> calls) {
  Failure failure = call.about;
  failure.kind = Kind::mismatch;
  const auto agrees = [&](const Fingerprint& other) { return other.agrees(calls.front()); };
  if (std::all_of(calls.begin(), calls.end(), agrees)) {
    failure.peer = swaps_.see(calls).first;
    if (failure.peer < 0) return {};
  }
  // Ranks with different calls have taken different chunks. Resetting makes the positions equal again on all ranks.
  ring_position_ = small_position_ = 0;
  return Error(failure, std::move(calls));
}

void LocalComm::arrive(Call& call, const void* payload, size_t nbytes) {
  if (!meet(call, payload, nbytes, nbytes, nullptr)) refuse_mismatch(call);
}

const std::byte* LocalComm::arrive_and_combine(Call& call, const void* payload, size_t nbytes,
                                               const Combining& combining) {
  const bool agree = meet(call, payload, nbytes, nbytes, &combining);
  if (!agree) refuse_mismatch(call);
  return levels_ && agree ? levels_->combined(call) : nullptr;
}

void LocalComm::refuse_mismatch(Call& call) {
  std::optional<Error> error = judge(call, fingerprints(call));
  if (!error) return;
  error->sites = exchange_notes(call);
  throw *error;
}

LocalComm::Pieces LocalComm::take(size_t bytes, size_t pieces) {
  // A chunk has a power of two as its size and alignment, so it never crosses the end of the ring.
  const size_t room = std::bit_ceil(std::max<size_t>(bytes, 64));
  const bool small = room * pieces <= shm_->sizes().small_ring / kSmallPieces;
  uint64_t& position = small ? small_position_ : ring_position_;
  const uint64_t begin = (position + room - 1) / room * room;
  position = begin + room * pieces;
  if (small) {
    shm_->reserve_small_ring();
    return {shm_.get(), begin, room, true};
  }
  shm_->reserve_ring(std::min<uint64_t>(ring_position_, shm_->sizes().ring));
  return {shm_.get(), begin, room};
}

// All ranks have detected the same mismatch and call this function, unless a rank dies before.
std::vector<std::string> LocalComm::exchange_notes(Call& call) {
  const std::string site = call.site.empty() ? call.patience.caller.where() : call.site;
  Note& mine = shm_->note(rank());
  size_t n = std::min(site.size(), mine.text.size() - 1);
  // Do not start in the middle of a UTF-8 character.
  while (n > 0 && (static_cast<unsigned char>(site[site.size() - n]) & 0xc0) == 0x80) n--;
  mine.number.store(0, std::memory_order_seq_cst);  // invalidate the note while the text is written
  std::copy_n(site.end() - static_cast<std::ptrdiff_t>(n), n, mine.text.begin());  // the end of a path is more specific
  mine.text[n] = '\0';
  mine.number.store(call.number, std::memory_order_seq_cst);
  Shm::ring(shm_->gate());

  std::vector<std::string> sites(static_cast<size_t>(size()));
  Patience patience{.caller = call.patience.caller, .timeout_ns = kNotesNs, .polling = {}, .final = false};
  int r = 0;
  const auto silent = [&] {
    for (; r < size(); r++) {
      if (shm_->note(r).number.load(std::memory_order_seq_cst) != call.number) return shm_->number(r);
    }
    return -1;
  };
  try {
    shm_->wait(shm_->gate(), patience, call.about, silent);
  } catch (const Error& error) {
    // A missing note does not prevent the report of the mismatch. A rank that has already reported it may have exited.
    if (!is_missing(error.failure.kind)) throw;
  }
  for (int p = 0; p < size(); p++) {
    const Note& note = shm_->note(p);
    if (note.number.load(std::memory_order_seq_cst) == call.number) sites[static_cast<size_t>(p)] = note.text.data();
  }
  return sites;
}

std::vector<std::byte*> LocalComm::arrive_at(Call& call, const void* data, size_t nbytes) {
  struct BlockOffset {
    uint64_t block;  // 0: private memory
    uint64_t offset;
  };
  const SharedBlock* block = blocks_->find(data, nbytes);
  BlockOffset mine{};
  if (block != nullptr) {
    mine = {block->number(), static_cast<uint64_t>(static_cast<const std::byte*>(data) - block->mine())};
  }
  arrive(call, &mine, sizeof mine);
  if (block == nullptr) return {};
  std::vector<std::byte*> addresses;
  for (int r = 0; r < size(); r++) {
    BlockOffset theirs;
    std::memcpy(&theirs, this->payload(call, r, sizeof theirs), sizeof theirs);
    if (theirs.block != mine.block) return {};
    addresses.push_back(block->data(r) + theirs.offset);
  }
  count_shared_.fetch_add(1, std::memory_order_relaxed);
  return addresses;
}

void LocalComm::depart(Call& call) {
  post_step(++base_step);
  wait_step_of_all(call, base_step);
}

bool LocalComm::all_at_step(uint32_t done) {
  for (int r = 0; r < size(); r++) {
    if (!reached(shm_->step_line(r).done.load(std::memory_order_seq_cst), done)) return false;
  }
  return true;
}

void LocalComm::post_step(uint32_t done) {
  if (levels_) return levels_->post_step(done);
  shm_->step_line(rank()).done.store(done, std::memory_order_seq_cst);
  if (all_at_step(done)) Shm::ring(shm_->gate());
}

void LocalComm::post_step_to_any(uint32_t done) {
  shm_->step_line(rank()).done.store(done, std::memory_order_seq_cst);
  Shm::ring(shm_->gate());
}

// A step is progress, so the timeout of the call starts again. Between hosts, moved bytes have the same effect.
void LocalComm::wait_step_of_all(Call& call, uint32_t done) {
  if (!levels_) return wait_step_of_each(call, done);
  levels_->wait_step(call, done);
  call.patience.deadline_ns = 0;
}

void LocalComm::wait_step_of_each(Call& call, uint32_t done) {
  int r = 0;
  shm_->wait(shm_->gate(), call.patience, call.about, [&] {
    for (; r < size(); r++) {
      if (!reached(shm_->step_line(r).done.load(std::memory_order_seq_cst), done)) return shm_->number(r);
    }
    return -1;
  });
  call.patience.deadline_ns = 0;
}

void LocalComm::wait_step_of(Call& call, int rank, uint32_t done, int origin) {
  const auto late = [&](int r) {
    return reached(shm_->step_line(r).done.load(std::memory_order_seq_cst), done) ? -1 : shm_->number(r);
  };
  const auto ready = [&] { return late(rank); };
  shm_->wait(shm_->gate(), call.patience, call.about, ready, [&] {
    const int first = ready() < 0 ? -1 : late(origin);
    return first >= 0 ? first : ready();
  });
  call.patience.deadline_ns = 0;
}

std::vector<std::pair<uint32_t, Fingerprint>> LocalComm::last_calls() {
  std::vector<std::pair<uint32_t, Fingerprint>> calls;
  for (int r = 0; r < size(); r++) {
    const CallLine& even = shm_->call_line(r, 0);
    const CallLine& odd = shm_->call_line(r, 1);
    // acquire: pairs with the store in meet(), so that the fingerprint of this number is visible. The result is a
    // snapshot: the rank may begin its next call at any time.
    const uint32_t e = even.number.load(std::memory_order_acquire);
    const uint32_t o = odd.number.load(std::memory_order_acquire);
    const CallLine& last = reached(e, o) ? even : odd;
    calls.emplace_back(last.of_group, last.fingerprint);
  }
  return calls;
}

}  // namespace allranks
