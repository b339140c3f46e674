#include "channel/shm.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <utility>

namespace allranks {

namespace {

constexpr int64_t kSliceNs = 50'000'000;  // interval of the checks for failures (shm.h)
constexpr int kMessagesMs = 2;            // limit of a poll: the bell, rung by ranks of this host, does not end it

// The duration of kYields yields shows which threads share this CPU (docs/decisions/132). Below kFreeNs: no other
// thread is ready to run. Below kBriefNs: other threads run only briefly, because they also wait or exchange messages.
// This rank then sleeps: as long as it is runnable, the scheduler may keep two communicating ranks on one CPU. Above:
// another thread computes.
constexpr int kYields = 8;
constexpr int64_t kFreeNs = 5'000;
constexpr int64_t kBriefNs = 100'000;

constexpr int kAllMapped = 16;  // ranks up to which each one maps all control pages of all

// Scope in which this thread counts as a sleeper of the bell. A destructor, because `ready` may throw.
class Sleeper {
 public:
  explicit Sleeper(Bell& bell) : bell_(bell) { bell_.sleepers.fetch_add(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  ~Sleeper() { bell_.sleepers.fetch_sub(1, std::memory_order_seq_cst); }

 private:
  Bell& bell_;
};

}  // namespace

// Hash of everything that determines the layout, so that ranks with different layouts detect it. Increase the version
// when a structure of the segment changes.
uint64_t Layout::magic() const {
  constexpr uint64_t version = 8;
  uint64_t h = 0x616c6c72616e6b73 ^ version;  // "allranks" in ASCII; the hash is FNV-1a over words
  for (const uint64_t x : {static_cast<uint64_t>(ranks_), uint64_t{sizes_.piece}, uint64_t{sizes_.ring},
                           uint64_t{sizes_.small_ring}, uint64_t{sizes_.pipe}, uint64_t{sizes_.ranks}}) {
    h = (h ^ x) * 0x100000001b3;
  }
  return h;
}

namespace {

// Initialize a new segment: allocate the parts that are used from the beginning, and write the header. The kernel fills
// the rest with zeros, which is the initial state of every line.
void initialise(const Layout& layout, int rank, int ranks, std::byte* segment, const std::function<void()>& allocate) {
  for (const auto& part : layout.control(rank)) {
    if (part.bytes > 0 && !sys::allocate_mapped(segment + part.begin, part.bytes)) allocate();
  }
  auto* header = new (segment + layout.header()) Header{};
  header->magic = layout.magic();
  header->rank = static_cast<uint32_t>(rank);
  header->size = static_cast<uint32_t>(ranks);
}

}  // namespace

sys::Fd Shm::create_segment(int rank, int ranks, Sizes sizes) {
  const Layout layout(ranks, sizes);
  sys::Fd fd = sys::sealed_memory("allranks", layout.bytes(rank));
  const sys::Mapping map(fd, layout.bytes(rank));
  initialise(layout, rank, ranks, map.data(), [&] { sys::allocate(fd, layout.bytes(rank)); });
  return fd;
}

sys::Fd Shm::create_segments(int ranks, Sizes sizes) {
  const Layout layout(ranks, sizes);
  const size_t bytes = layout.segment(ranks);
  sys::Fd fd = sys::sealed_memory("allranks", bytes);
  const sys::Mapping map(fd, bytes);
  for (int r = 0; r < ranks; r++) {
    initialise(layout, r, ranks, map.data() + layout.segment(r), [&] { sys::allocate(fd, bytes); });
  }
  return fd;
}

Shm::Maps Shm::map(int ranks, Sizes sizes, const std::vector<sys::Fd>& memories) {
  Maps maps;
  const Layout layout(ranks, sizes);
  const bool one = memories.size() == 1 && ranks > 1;
  if (!one && memories.size() != static_cast<size_t>(ranks)) throw Error("expected one segment per rank");
  const auto whole = one ? std::make_shared<sys::Mapping>(memories[0], layout.segment(ranks)) : nullptr;
  for (int r = 0; r < ranks; r++) {
    const auto owner = one ? whole : std::make_shared<sys::Mapping>(memories[static_cast<size_t>(r)], layout.bytes(r));
    maps.emplace_back(owner, owner->data() + (one ? layout.segment(r) : 0));
  }
  return maps;
}

Shm::Shm(int rank, Sizes sizes, Maps maps, Liveness liveness, std::vector<int> numbers)
    : rank_(rank),
      layout_(static_cast<int>(maps.size()), sizes),
      maps_(std::move(maps)),
      liveness_(std::move(liveness)),
      numbers_(std::move(numbers)),
      pipe_reserved_(maps_.size()) {
  if (numbers_.empty()) {
    numbers_.resize(maps_.size());
    std::iota(numbers_.begin(), numbers_.end(), 0);
  }
  set_remote_ranks(nullptr, size());
  const Sizes& given = layout_.sizes();
  if (!std::has_single_bit(given.piece) || given.piece < 64 || given.ring % given.piece != 0 ||
      given.ring < 6 * given.piece) {
    throw Error("the ring must hold at least 6 chunks. A chunk must be a power of two and at least 64 bytes");
  }
  if (!std::has_single_bit(given.small_ring) || given.small_ring < 16 * 64) {
    throw Error("the small ring must be a power of two and at least 1024 bytes");
  }
  for (int r = 0; r < size(); r++) {
    const auto& header = at<Header>(r, layout_.header());
    if (header.magic != layout_.magic() || header.rank != static_cast<uint32_t>(r)) {
      throw Error("the shared segment of rank " + std::to_string(r) +
                  " has a different layout. Install the same version of allranks for all ranks");
    }
    // Page faults in the first collectives would cost more than the collectives themselves. Among many ranks, the fault
    // at the header above is enough: it also maps the pages that follow, which their creator has allocated. Creating a
    // group of 64 ranks on 2 CPUs then takes 24 ms instead of 31 ms, and its first all_reduce takes no longer.
    if (r != rank_ && size() > kAllMapped) continue;
    for (const auto& part : layout_.control(r)) {
      if (part.bytes > 0) sys::allocate_mapped(&at<std::byte>(r, part.begin), part.bytes);
    }
  }
}

void Shm::set_remote_ranks(RemoteRanks* remote_ranks, int ranks) {
  remote_ranks_ = remote_ranks;
  locals_.assign(static_cast<size_t>(std::max(ranks, numbers_.back() + 1)), -1);
  for (int r = 0; r < size(); r++) locals_[static_cast<size_t>(number(r))] = r;
}

void Shm::ring(Bell& bell) {
  // Pairs with wait_slowly. The sleeper increments the count and then checks its condition once more. The caller of
  // ring() has stored the condition and then reads the count. Both sides are sequentially consistent, so at least one
  // of them sees the other's store, and no wake-up is lost.
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) {
    bell.word.fetch_add(1, std::memory_order_seq_cst);
    sys::futex_wake_all(bell.word);
  }
}

void Shm::wait_slowly(Bell& bell, Patience& patience, const Failure& about, Asked ready, Asked awaited) {
  const int64_t began = sys::now_ns();
  // Spinning, with the caller's locks held, detects the end of the wait soonest. It is useless if the awaited rank
  // needs this CPU. A yield costs little more on a free CPU, and otherwise gives the CPU to another thread.
  while (patience.polling.spin_ns > 0 && sys::now_ns() - began < patience.polling.spin_ns) {
    for (int i = 0; i < 8; i++) {
      sys::pause();
      if (ready() < 0) return;
    }
  }
  patience.caller.release();
  if (patience.deadline_ns == 0) patience.deadline_ns = began + patience.timeout_ns;
  const bool messages = remote_ranks_ != nullptr && &bell == &this->bell(rank_);
  const int64_t yield_ns = messages ? std::min(patience.polling.yield_ns, kStirredNs) : patience.polling.yield_ns;
  for (int64_t now = sys::now_ns(); now - began < yield_ns;) {
    for (int i = 0; i < kYields; i++) {
      sys::yield();
      if (ready() < 0) return;
    }
    const int64_t before = std::exchange(now, sys::now_ns());
    if (now - began >= kStirredNs && now - before > kFreeNs && now - before < kBriefNs) break;
  }
  int64_t looked = began;
  // Messages from other hosts ring no bell. A rank that waits for one therefore polls the streams itself, until no
  // message has arrived for kSliceNs.
  for (int64_t stirred = began; messages && sys::now_ns() - stirred < kSliceNs;) {
    const int missing = ready();
    if (missing < 0) return;
    if (missing != kAnyRank && local(missing) >= 0) break;
    // As in Net::wait: a rank that receives continuously does not sleep.
    const bool awake = sys::now_ns() - stirred < kStirredNs;
    if (remote_ranks_->wait_for_messages(awake ? 0 : kMessagesMs)) {
      stirred = sys::now_ns();
    } else if (awake) {
      sys::yield();
    }
    if (const int64_t now = sys::now_ns(); now - looked >= kSliceNs) {
      looked = now;
      look_around(patience, about, awaited, began);
    }
  }
  if (ready() < 0) return;
  for (;;) {
    if (messages) remote_ranks_->watch_message_streams();
    bool rung = true;
    bool ended = false;
    {
      const Sleeper asleep(bell);
      const uint32_t seen = bell.word.load(std::memory_order_seq_cst);
      // condemn() writes the verdict and then changes the word of every bell. This thread therefore sees the verdict
      // here, or futex_wait finds that the word differs from `seen` and returns.
      ended = condemned();
      if (!ended && ready() >= 0) rung = sys::futex_wait(bell.word, seen, kSliceNs);
    }
    if (ready() < 0) return;
    // The time is checked too, because a bell that rings continuously for other waits would prevent the checks.
    if (const int64_t now = sys::now_ns(); !rung || ended || now - looked >= kSliceNs) {
      looked = now;
      look_around(patience, about, awaited, began);
    }
  }
}

void Shm::look_around(Patience& patience, const Failure& about, Asked awaited, int64_t began_ns) {
  check_verdict();
  Failure failure = about;
  failure.reporter = number(rank_);
  if (closing_.load(std::memory_order_acquire)) {
    failure.kind = Kind::closed;
    failure.peer = number(rank_);
    throw Error(failure);  // without condemn(): the other ranks see that this rank has left
  }
  int gone = 0;
  for (int r = 0; r < ranks(); r++) {
    const Presence found = r == number(rank_) ? Presence::here : presence(r);
    if (found == Presence::here) continue;
    gone++;
    // The rank's last write may have ended the wait. Check again, now that it cannot write more.
    const int missing = awaited();
    if (missing < 0) return;
    // A rank that has left is a failure in two cases: it is the awaited rank, or any rank is awaited and all other
    // ranks have gone.
    if (found == Presence::left && missing != r && !(missing == kAnyRank && gone == ranks() - 1)) continue;
    // The first failure is reported. A rank that was lost is a better cause than one that left, perhaps because of it.
    if (failure.peer >= 0 && (found == Presence::left || failure.kind != Kind::left)) continue;
    failure.kind = found == Presence::left ? Kind::left : found == Presence::died ? Kind::died : Kind::unreachable;
    failure.peer = r;
  }
  const int64_t now = sys::now_ns();
  failure.seconds = static_cast<double>(now - began_ns) * 1e-9;
  if (failure.peer < 0) {
    if (patience.caller.interrupted()) {
      failure.kind = Kind::interrupted;
      failure.peer = number(rank_);
    } else if (now >= patience.deadline_ns) {
      failure.kind = Kind::timeout;
      failure.peer = awaited();
      if (failure.peer < 0) return;
      if (failure.peer == kAnyRank) {
        failure.peer = kAnyPeer;
      } else if (remote_ranks_ != nullptr) {
        failure.peer = remote_ranks_->blame(failure.peer, about.call);
      }
    } else {
      return;
    }
  }
  if (failure.kind == Kind::timeout && !patience.final) throw Error(failure);
  condemn(failure);
  if (failure.kind == Kind::interrupted) {
    // Not check_verdict(), which may throw an earlier failure: this caller must raise the exception of its signal.
    Error error(failure);
    error.signalled = true;
    throw error;
  }
  check_verdict();
}

Presence Shm::presence(int number) {
  const int r = local(number);
  if (r < 0) return remote_ranks_->presence(number);
  // Check the segment first: another group of the process may keep the socket open (docs/decisions/079).
  if (leaving(r) == Leaving::gone) return Presence::left;
  const auto socket = liveness(r);
  if (!socket || !sys::hung_up(socket->get())) return Presence::here;
  return has_left(r) ? Presence::left : Presence::died;
}

void Shm::condemn(const Failure& failure) {
  auto& verdict = at<Verdict>(0, layout_.verdict());
  // Only the first rank succeeds, so all ranks raise the same failure. Sequentially consistent for wait_slowly, whose
  // check of the state must not miss a verdict whose bell has already rung.
  uint32_t none = 0;
  if (verdict.state.compare_exchange_strong(none, 1, std::memory_order_seq_cst)) {
    verdict.failure = failure;
    verdict.state.store(2, std::memory_order_seq_cst);
    const auto wake = [](Bell& bell) {
      bell.word.fetch_add(1, std::memory_order_seq_cst);
      sys::futex_wake_all(bell.word);
    };
    for (int r = 0; r < size(); r++) {
      wake(gate(r));
      wake(group_gate(r));
      wake(bell(r));
    }
  }
  if (remote_ranks_ != nullptr) remote_ranks_->announce();
}

bool Shm::condemned() { return at<Verdict>(0, layout_.verdict()).state.load(std::memory_order_seq_cst) != 0; }

void Shm::check_verdict() {
  auto& verdict = at<Verdict>(0, layout_.verdict());
  // Acquire pairs with the store of state 2 in condemn(), which publishes the failure.
  const uint32_t state = verdict.state.load(std::memory_order_acquire);
  if (state == 0) return;
  Failure failure{.kind = Kind::died, .reporter = -1};
  // Writing the verdict takes nanoseconds. The loop is limited, because the writer may be killed during the write.
  for (int i = 0; i < 1'000'000 && verdict.state.load(std::memory_order_acquire) != 2; i++) sys::pause();
  if (verdict.state.load(std::memory_order_acquire) == 2) failure = verdict.failure;
  throw Error(failure);
}

std::vector<int> Shm::lost() {
  std::vector<bool> gone(static_cast<size_t>(ranks()));
  for (int r = 0; r < ranks(); r++) {
    gone[static_cast<size_t>(r)] = r != number(rank_) && presence(r) != Presence::here;
  }
  try {
    check_verdict();
  } catch (const Error& error) {
    const Failure& verdict = error.failure;
    const bool one = verdict.kind == Kind::died || verdict.kind == Kind::left || verdict.kind == Kind::unreachable;
    if (one && verdict.peer >= 0 && verdict.peer != number(rank_)) gone[static_cast<size_t>(verdict.peer)] = true;
  }
  std::vector<int> found;
  for (int r = 0; r < ranks(); r++) {
    if (gone[static_cast<size_t>(r)]) found.push_back(r);
  }
  return found;
}

void Shm::allocate_ring(uint64_t end) {
  constexpr uint64_t kAtOnce = 64 << 10;  // bytes, so that not every small piece costs a system call
  end = std::min<uint64_t>((end + kAtOnce - 1) / kAtOnce * kAtOnce, sizes().ring);
  if (end <= ring_reserved_) return;
  sys::allocate_mapped(ring_at(rank_, ring_reserved_), end - ring_reserved_);
  ring_reserved_ = end;
}

void Shm::allocate_small_ring() {
  sys::allocate_mapped(small_ring_at(rank_, 0), sizes().small_ring);
  small_ring_reserved_ = true;
}

void Shm::reserve_groups() { sys::allocate_mapped(&at<std::byte>(rank_, layout_.groups()), Layout::kGroupBytes); }

void Shm::allocate_pipe(int to) {
  sys::allocate_mapped(pipe(rank_, to), sizes().pipe);
  pipe_reserved_[static_cast<size_t>(to)].store(true, std::memory_order_relaxed);
}

void Shm::leave() {
  closing_.store(true, std::memory_order_release);
  at<Header>(rank_, layout_.header()).left.store(Leaving::begun, std::memory_order_release);
}

void Shm::gone() {
  at<Header>(rank_, layout_.header()).left.store(Leaving::gone, std::memory_order_release);
  const std::lock_guard lock(liveness_lock_);
  for (auto& socket : liveness_) socket.reset();
}

}  // namespace allranks
