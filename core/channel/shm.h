// The shared-memory channel: the mapped segments of all ranks of a group on one host, and the wait function that all
// ranks use. Verbs and reductions are in collective/.
//
// Failures. Shared memory does not report the death of a peer. A waiting rank therefore checks every 50 ms: the verdict
// (the failure that ended the group, if any), the liveness socket of each peer, its deadline, and its caller's signals.
// The first rank that detects a failure writes it into the verdict and wakes all other ranks. Every call of the group
// then fails immediately, with the same facts.
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
  unreported,  // here, but the leader of its host has left, so no rank reports its state (net.h)
};

// Interface for the ranks of the group on other hosts, as far as waiting needs it (net.h).
class RemoteRanks {
 public:
  virtual ~RemoteRanks() = default;
  // Return the state of a rank. left: no more data will arrive from it. Never returns unreported.
  virtual Presence presence(int rank) = 0;
  // Send the verdict to the other hosts.
  virtual void announce() = 0;
  // Return the rank that is late in this call. It differs from `awaited` if that rank forwards data of other ranks.
  virtual int blame(int awaited, uint32_t call) = 0;
  // Sleep until a message stream to another host is ready, at most for timeout_ms. Return whether one is.
  virtual bool wait_for_messages(int timeout_ms) = 0;
  // Have this rank's bell rung for messages from other hosts, too. Called before the rank sleeps for longer.
  virtual void watch_message_streams() = 0;
};

// Sockets connected to each other rank of the host, by rank on the host. No process writes into them, so the end of a
// socket shows that its process has terminated. Several groups may share the sockets (docs/decisions/079).
using Liveness = std::vector<std::shared_ptr<const sys::Fd>>;

class Shm {
 public:
  // Create the segment of `rank`. The caller sends the descriptor to the other ranks.
  static sys::Fd create_segment(int rank, int ranks, Sizes sizes);
  // Create one memory with the segments of all ranks.
  static sys::Fd create_segments(int ranks, Sizes sizes);

  // Addresses of the segments, by rank. Together they own the mappings.
  using Maps = std::vector<std::shared_ptr<std::byte>>;
  // Map one memory per rank, or one memory with all segments.
  static Maps map(int ranks, Sizes sizes, const std::vector<sys::Fd>& memories);

  // maps[r]: the segment of rank r. (Ranks that are threads of one process share the mappings, because the thread
  // sanitizer identifies memory by its address.) liveness[rank] is unused. numbers: the ranks' numbers in the group, if
  // it also has ranks on other hosts. `ready` below and failures use these numbers.
  Shm(int rank, Sizes sizes, Maps maps, Liveness liveness, std::vector<int> numbers = {});

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(maps_.size()); }
  int number(int rank) const { return numbers_[static_cast<size_t>(rank)]; }
  int local(int number) const { return locals_[static_cast<size_t>(number)]; }  // -1: on another host
  int ranks() const { return static_cast<int>(locals_.size()); }                // of the group, on all hosts
  void set_remote_ranks(RemoteRanks* remote_ranks, int ranks);
  const Sizes& sizes() const { return layout_.sizes(); }

  CallLine& call_line(int rank, uint32_t call) { return at<CallLine>(rank, layout_.call(call)); }
  SeqLocked<Waits>& waits(int rank) { return at<WaitLine>(rank, layout_.wait()).waits; }
  Note& note(int rank) { return at<Note>(rank, layout_.note()); }
  StepLine& step_line(int rank) { return at<StepLine>(rank, layout_.step()); }
  Far& far(int number) { return at<Far>(0, layout_.far(number)); }  // of a rank of the group, if it spans hosts
  // Return the socket of a rank, or nullptr after gone().
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
  // offset: from the beginning of the rank's rings.
  std::byte* in_rings(int rank, size_t offset) {
    return maps_[static_cast<size_t>(rank)].get() + layout_.ring() + offset;
  }
  PipeControl& pipe_control(int from, int to) { return at<PipeControl>(from, layout_.pipe_control(to)); }
  // Allocate the memory that this rank writes and other ranks read, when it is first needed (docs/decisions/077).
  // Throw std::bad_alloc.
  void reserve_ring(uint64_t end) {  // up to this position
    if (end > ring_reserved_) allocate_ring(end);
  }
  void reserve_small_ring() {
    if (!small_ring_reserved_) allocate_small_ring();
  }
  // Relaxed: if two threads allocate the same pipe, the second allocation has no effect.
  void reserve_pipe(int to) {
    if (!pipe_reserved_[static_cast<size_t>(to)].load(std::memory_order_relaxed)) allocate_pipe(to);
  }
  std::byte* pipe(int from, int to) { return maps_[static_cast<size_t>(from)].get() + layout_.pipe(to); }
  // Bells of collectives. All ranks use the gate of rank 0. If ranks meet by groups, a group rings the gate of its
  // leader, and the leader rings its group_gate.
  Bell& gate(int rank = 0) { return at<Bell>(rank, layout_.gate()); }
  Bell& group_gate(int leader) { return at<Bell>(leader, layout_.group_gate()); }
  Bell& bell(int rank) { return at<Bell>(rank, layout_.bell()); }  // rung by sends to and recvs from `rank`

  // Allocate the memory in which a leader publishes data for its group. It precedes every use of the lines below.
  // Throws std::bad_alloc.
  void reserve_groups();
  GroupLine& group_line(int leader, uint32_t call) { return at<GroupLine>(leader, layout_.group_line(call)); }
  std::byte* group_operands(int leader, uint32_t call) {
    return &at<std::byte>(leader, layout_.group_line(call) + sizeof(GroupLine));
  }
  ReleaseLine& release_line(int leader, uint32_t call) { return at<ReleaseLine>(leader, layout_.release_line(call)); }
  GroupSteps& group_steps(int leader) { return at<GroupSteps>(leader, layout_.group_steps()); }

  // Publish the place and tuning of this rank. Called before its first call.
  void introduce(const Place& place, const Tuning& tuning) {
    auto& header = at<Header>(rank_, layout_.header());
    header.place = place;
    header.tuning = tuning;
  }
  const Place& place(int rank) { return at<Header>(rank, layout_.header()).place; }
  const Tuning& tuning() { return at<Header>(0, layout_.header()).tuning; }

  static void ring(Bell& bell);

  // Result of ready() and awaited() below: any rank can end the wait.
  static constexpr int kAnyRank = 1 << 20;

  // Wait until ready() < 0. Before that, ready() returns the rank that the caller waits for. about: the current call,
  // for the failure. Throws Error.
  template <class Ready>
  void wait(Bell& bell, Patience& patience, const Failure& about, Ready&& ready) {
    if (ready() >= 0) wait_slowly(bell, patience, about, Asked(ready), Asked(ready));
  }
  // Variant for callers that need long to find the rank they wait for. ready() is polled continuously, and awaited()
  // only every 50 ms or on a failure. Both return a negative number when the wait is over.
  template <class Ready, class Awaited>
  void wait(Bell& bell, Patience& patience, const Failure& about, Ready&& ready, Awaited&& awaited) {
    if (ready() >= 0) wait_slowly(bell, patience, about, Asked(ready), Asked(awaited));
  }

  // End every present and future call of the group on every rank with this failure. If the group has already failed,
  // the earlier failure stays.
  void condemn(const Failure& failure);
  void check_verdict();  // throws if the group is condemned
  bool condemned();

  // Check for failures during any wait: the verdict, the peers, the deadline, the caller's signals. Throws Error.
  template <class Ready>
  void look_around(Patience& patience, const Failure& about, Ready&& ready, int64_t began_ns) {
    look_around(patience, about, Asked(ready), began_ns);
  }

  // Return the ranks that are known to be gone: by their sockets, from other hosts, or from the verdict.
  std::vector<int> lost();

  bool has_left(int rank) { return leaving(rank) != Leaving::no; }
  void leave();  // announces that this rank leaves the group deliberately; ends its blocked calls
  void gone();   // called last, when this rank sends no more data

 private:
  // Reference to a function that returns the rank that the caller waits for. It must not outlive the function.
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

  // Acquire pairs with the release in leave() and gone(): the data that the rank wrote before is visible.
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
  std::vector<int> numbers_;  // rank of the group, by rank on this host
  std::vector<int> locals_;   // rank on this host or -1, by rank of the group
  RemoteRanks* remote_ranks_ = nullptr;
  std::atomic<bool> closing_ = false;
  uint64_t ring_reserved_ = 0;
  bool small_ring_reserved_ = false;
  std::vector<std::atomic<bool>> pipe_reserved_;
};

}  // namespace allranks
