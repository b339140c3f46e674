// The shared-memory channel: the mapped segments of all ranks of a group on one host, and the one
// way in which ranks wait for each other. Verbs and reductions are in collective/.
//
// Failures. Shared memory sends no reset, so a rank that waits looks, every 50 ms, at the verdict
// (has any rank given up?), at the liveness socket of each peer, at its deadline and at its
// caller's signals. The first rank that notices a failure writes it into the verdict and wakes
// all others: from then on every call of the group fails with the same facts, at once.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/sys.h"
#include "base/waiting.h"
#include "channel/lines.h"
#include "channel/segment.h"

namespace allranks {

enum class Presence : uint32_t {
  here,
  left,
  died,
  unreachable,
  unreported,  // here, but the leader of its host has left and reports nothing (net.h)
};

// The ranks of the group on other hosts, as far as waiting concerns them (net.h).
class RemoteRanks {
 public:
  virtual ~RemoteRanks() = default;
  // left: and nothing more will come from it. Never unreported.
  virtual Presence presence(int rank) = 0;
  // The group is condemned: sends them the verdict.
  virtual void announce() = 0;
  // Where `awaited` passes on what others send: the rank that is really late in this call.
  virtual int blame(int awaited, uint32_t call) = 0;
  // Sleeps until a message from another host can be moved, at most for some milliseconds. Whether one can.
  virtual bool wait_for_messages(int timeout_ms) = 0;
  // This rank is about to sleep for longer: its bell is to be rung for messages from other hosts, too.
  virtual void watch_message_streams() = 0;
};

// Sockets that are connected with each other rank of the host, by rank there. Their end shows that its process has
// died, as nobody writes into them. Several groups may use the same.
using Liveness = std::vector<std::shared_ptr<const sys::Fd>>;

class Shm {
 public:
  // A new segment for `rank` of `ranks`, to be handed to the others.
  static sys::Fd create_segment(int rank, int ranks, Sizes sizes);
  // One memory with the segments of all ranks.
  static sys::Fd create_segments(int ranks, Sizes sizes);

  // By rank; together they own the mappings.
  using Maps = std::vector<std::shared_ptr<std::byte>>;
  // Of a segment for each rank, or of one memory with all.
  static Maps map(int ranks, Sizes sizes, const std::vector<sys::Fd>& memories);

  // maps[r]: rank r's segment. (Ranks that are threads of one process share the mappings: the thread
  // sanitizer identifies memory by its address.) liveness[rank] is unused. numbers: the ranks' numbers in the group,
  // where it has ranks on other hosts too: these are what `ready` below and failures speak of.
  Shm(int rank, Sizes sizes, Maps maps, Liveness liveness, std::vector<int> numbers = {});

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(maps_.size()); }
  int number(int rank) const { return numbers_[static_cast<size_t>(rank)]; }
  int local(int number) const { return locals_[static_cast<size_t>(number)]; }  // -1: on another host
  int ranks() const { return static_cast<int>(locals_.size()); }                // of the group
  void set_remote_ranks(RemoteRanks* remote_ranks, int ranks);
  const Sizes& sizes() const { return layout_.sizes(); }

  CallLine& call_line(int rank, uint32_t call) { return at<CallLine>(rank, layout_.call(call)); }
  SeqLocked<Waits>& waits(int rank) { return at<WaitLine>(rank, layout_.wait()).waits; }
  Note& note(int rank) { return at<Note>(rank, layout_.note()); }
  StepLine& step_line(int rank) { return at<StepLine>(rank, layout_.step()); }
  Far& far(int number) { return at<Far>(0, layout_.far(number)); }  // of a rank of the group, where it spans hosts
  // nullptr when this rank is gone.
  std::shared_ptr<const sys::Fd> liveness(int rank) const {
    const std::lock_guard lock(liveness_lock_);
    return liveness_[static_cast<size_t>(rank)];
  }
  std::byte* ring_at(int rank, uint64_t position) {
    return maps_[static_cast<size_t>(rank)].get() + layout_.ring() + position % sizes().ring;
  }
  std::byte* small_ring_at(int rank, uint64_t position) {
    return maps_[static_cast<size_t>(rank)].get() + layout_.small_ring() + position % sizes().small_ring;
  }
  // By its distance from the beginning of the rank's rings.
  std::byte* in_rings(int rank, size_t offset) {
    return maps_[static_cast<size_t>(rank)].get() + layout_.ring() + offset;
  }
  PipeControl& pipe_control(int from, int to) { return at<PipeControl>(from, layout_.pipe_control(to)); }
  // This rank's memory for what others read, which is allocated when it is first needed. Throw std::bad_alloc.
  void reserve_ring(uint64_t end) {  // up to there
    if (end > ring_reserved_) allocate_ring(end);
  }
  void reserve_small_ring() {
    if (!small_ring_reserved_) allocate_small_ring();
  }
  void reserve_pipe(int to) {
    if (!pipe_reserved_[static_cast<size_t>(to)].load(std::memory_order_relaxed)) allocate_pipe(to);
  }
  std::byte* pipe(int from, int to) { return maps_[static_cast<size_t>(from)].get() + layout_.pipe(to); }
  // Rung by collectives: rank 0's for all ranks; a leader's by its group, and its group's by the leader.
  Bell& gate(int rank = 0) { return at<Bell>(rank, layout_.gate()); }
  Bell& group_gate(int leader) { return at<Bell>(leader, layout_.group_gate()); }
  Bell& bell(int rank) { return at<Bell>(rank, layout_.bell()); }  // rung by sends to and recvs from `rank`

  // What a leader publishes for its group, once it has reserved the memory. Throws std::bad_alloc.
  void reserve_groups();
  GroupLine& group_line(int leader, uint32_t call) { return at<GroupLine>(leader, layout_.group_line(call)); }
  std::byte* group_operands(int leader, uint32_t call) {
    return &at<std::byte>(leader, layout_.group_line(call) + sizeof(GroupLine));
  }
  ReleaseLine& release_line(int leader, uint32_t call) { return at<ReleaseLine>(leader, layout_.release_line(call)); }
  GroupSteps& group_steps(int leader) { return at<GroupSteps>(leader, layout_.group_steps()); }

  // What ranks tell of themselves before their first call.
  void introduce(const Place& place, const Tuning& tuning) {
    auto& header = at<Header>(rank_, layout_.header());
    header.place = place;
    header.tuning = tuning;
  }
  const Place& place(int rank) { return at<Header>(rank, layout_.header()).place; }
  const Tuning& tuning() { return at<Header>(0, layout_.header()).tuning; }

  static void ring(Bell& bell);

  // Stands for "whoever comes first" where a rank that is waited for is named.
  static constexpr int kAnyRank = 1 << 20;

  // Returns when ready() < 0. Until then ready() names the rank that is waited for. `about` says
  // what the caller is doing, for the failure. Throws Error.
  template <class Ready>
  void wait(Bell& bell, Patience& patience, const Failure& about, Ready&& ready) {
    if (ready() >= 0) wait_slowly(bell, patience, about, Asked(ready), Asked(ready));
  }
  // Where it takes long to find whom one waits for: ready() is asked all the time, awaited() now and then. Both are
  // negative when nobody is waited for any more.
  template <class Ready, class Awaited>
  void wait(Bell& bell, Patience& patience, const Failure& about, Ready&& ready, Awaited&& awaited) {
    if (ready() >= 0) wait_slowly(bell, patience, about, Asked(ready), Asked(awaited));
  }

  // Ends every present and future call of the group, on every rank, with this failure (or with the
  // earlier one, if there is one).
  void condemn(const Failure& failure);
  void check_verdict();  // throws if the group is condemned
  bool condemned();

  // What a rank does now and then while it waits, for whatever reason: see whether the group has failed, and whom
  // it waits for. Throws Error.
  template <class Ready>
  void look_around(Patience& patience, const Failure& about, Ready&& ready, int64_t began_ns) {
    look_around(patience, about, Asked(ready), began_ns);
  }

  // The ranks of the group that are known here to be gone: by their sockets, by other hosts, by the verdict.
  std::vector<int> lost();

  bool has_left(int rank) { return leaving(rank) != Leaving::no; }
  void leave();  // notifies the others that this rank leaves on purpose; ends this rank's blocked calls
  void gone();   // at the end, when nothing more comes from this rank

 private:
  // A function that says which rank is waited for.
  class Asked {
   public:
    template <class Ready>
    explicit Asked(Ready& ready)
        : call_([](const void* r) { return (*static_cast<const Ready*>(r))(); }), ready_(&ready) {}
    int operator()() const { return call_(ready_); }

   private:
    int (*call_)(const void*);
    const void* ready_;
  };

  template <class T>
  T& at(int rank, size_t offset) {
    std::byte* memory = maps_[static_cast<size_t>(rank)].get() + offset;
    lines::touch(rank, memory);
    return *reinterpret_cast<T*>(memory);
  }
  void wait_slowly(Bell& bell, Patience& patience, const Failure& about, Asked ready, Asked awaited);
  void look_around(Patience& patience, const Failure& about, Asked awaited, int64_t began_ns);

  Leaving leaving(int rank) { return at<Header>(rank, layout_.header()).left.load(std::memory_order_acquire); }
  Presence presence(int number);
  void allocate_ring(uint64_t end);
  void allocate_small_ring();
  void allocate_pipe(int to);

  int rank_;
  Layout layout_;
  Maps maps_;
  mutable std::mutex liveness_lock_;
  Liveness liveness_;
  std::vector<int> numbers_;  // by rank on this host
  std::vector<int> locals_;   // by rank of the group
  RemoteRanks* remote_ranks_ = nullptr;
  std::atomic<bool> closing_ = false;
  uint64_t ring_reserved_ = 0;
  bool small_ring_reserved_ = false;
  std::vector<std::atomic<bool>> pipe_reserved_;
};

}  // namespace allranks
