// The shared memory of a group: one segment per rank, mapped by every rank of the host.
//
// Words used here and in the algorithms:
//   call    one collective. Ranks number their calls 1, 2, 3, ... (wrapping). At its start every rank writes its
//           fingerprint into its call line and waits for those of all others (arrive).
//   step    one turn of the pipeline inside a large call. Each rank counts the steps it has done.
//   ring    where a rank writes what others are to read (LocalComm::take). Every rank knows the sizes of every call,
//           so positions are the same on all ranks and are never sent. When a rank has seen all others arrive in call
//           n-1, all are done with call n-2, and of call n-1 at most the last three pieces are unread. So what lies
//           more than four pieces back may be overwritten without an acknowledgement. The same holds for call lines.
//           Small pieces have a ring of their own: a group whose calls are small needs little memory.
//   pipe    a byte ring from this rank to one other, for messages.
//   bell    a futex word with the count of the threads that sleep on it.
//   group   ranks that are near each other, on a host with many. Their leader, the first, compares their call lines and
//           speaks for them: a rank then reads a few lines instead of one of every rank (local_comm.h).
//
// Control lines are 128 bytes apart: x86 fetches lines in pairs.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/error.h"
#include "base/types.h"
#include "channel/topology.h"

namespace allranks {

constexpr size_t kLine = 128;
constexpr size_t kGroup = 16;  // the most ranks of a group within a host

struct alignas(kLine) Bell {
  std::atomic<uint32_t> word;
  std::atomic<uint32_t> sleepers;
};

struct alignas(kLine) CallLine {
  static constexpr size_t kInline = kLine - 2 * sizeof(uint64_t) - sizeof(Fingerprint);

  std::atomic<uint32_t> number;
  uint32_t of_group;  // the group's number of the call, where the group spans hosts and a call has several parts
  Fingerprint fingerprint;
  int64_t entered_ns;  // when the rank came (CLOCK_MONOTONIC, which is one for a host)
  std::array<std::byte, kInline> payload;
};
static_assert(sizeof(CallLine) == kLine);
// A CPU has lines of 64 bytes: of a small call one of them travels, with everything.
static_assert(offsetof(CallLine, payload) <= 40);

// A value that one thread at a time writes and any reads (a sequence lock).
template <class T>
class SeqLocked {
 public:
  void store(const T& value) {
    // The version is odd while this writes: who reads a word of it then sees another version at the end.
    const uint32_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    const auto words = std::bit_cast<Words>(value);
    for (size_t i = 0; i < words.size(); i++) words_[i].store(words[i], std::memory_order_release);
    version_.store(version + 2, std::memory_order_release);
  }
  T load() const {
    Words words{};
    for (int tries = 0; tries < 1000; tries++) {  // its writer may have been killed in between
      const uint32_t version = version_.load(std::memory_order_acquire);
      for (size_t i = 0; i < words.size(); i++) words[i] = words_[i].load(std::memory_order_acquire);
      if (version % 2 == 0 && version_.load(std::memory_order_acquire) == version) break;
    }
    return std::bit_cast<T>(words);
  }

 private:
  using Words = std::array<uint64_t, sizeof(T) / sizeof(uint64_t)>;
  std::atomic<uint32_t> version_;
  std::array<std::atomic<uint64_t>, sizeof(T) / sizeof(uint64_t)> words_;
};

// The collective that a rank has begun last, where the group spans hosts.
class Begun {
 public:
  void store(uint32_t call, const Fingerprint& fingerprint) { value_.store({call, 0, fingerprint}); }
  uint32_t call() const { return value_.load().call; }
  std::pair<uint32_t, Fingerprint> load() const {
    const Call last = value_.load();
    return {last.call, last.fingerprint};
  }

 private:
  struct Call {
    uint32_t call;
    uint32_t unused;
    Fingerprint fingerprint;
  };
  SeqLocked<Call> value_;
};

// The message that a rank has been waiting for. Errors name it: they list which rank waits for which.
struct Waits {
  int32_t peer = -1;  // < 0: any rank
  int32_t tag = 0;
  Verb verb = Verb::none;  // none: for nothing
  std::array<uint8_t, 7> unused{};
  std::array<char, 112> site{};  // where in its program, or the end of that

  bool operator==(const Waits&) const = default;
};

struct alignas(kLine) WaitLine {
  SeqLocked<Waits> waits;
};

// When the last of several ranks came to a collective.
struct LastArrival {
  int64_t met_ns = 0;
  int64_t late_ns = 0;   // so much later than the last but one
  int64_t error_ns = 0;  // of met_ns, where it was read on another host's clock
  int32_t last = -1;     // which, as a rank of the group; -1: not known
  uint32_t unused = 0;
};

// What the leader of a group has found in the call lines of its ranks.
struct alignas(kLine) GroupLine {
  std::atomic<uint32_t> number;
  uint32_t agree;  // all fingerprints do, and there are no call sites to compare
  Fingerprint fingerprint;
  int64_t met_ns;
  int64_t before_last_ns;
  int32_t last;  // to come, as a rank of the host
  uint32_t unused;
};
static_assert(sizeof(GroupLine) == kLine);

// What a leader tells its group when all ranks of the host have come.
struct alignas(kLine) ReleaseLine {
  std::atomic<uint32_t> number;
  uint32_t agree;
  LastArrival arrival;
  std::array<std::byte, CallLine::kInline> payload;
};
static_assert(offsetof(ReleaseLine, payload) == 40);

// Steps that a leader has seen done.
struct alignas(kLine) GroupSteps {
  alignas(kLine) std::atomic<uint32_t> of_group;
  alignas(kLine) std::atomic<uint32_t> of_all;
};

struct alignas(kLine) StepLine {
  std::atomic<uint32_t> done;
  uint32_t disagree;  // by the leader of a host: not 0: where in its ring everybody's fingerprints stand, plus 1
  Begun begun;
  LastArrival arrival;  // by the leader of a host, of all hosts
};
static_assert(sizeof(StepLine) == kLine);

// Only the segment of rank 0 uses its gate and its verdict; they are the whole group's.
struct alignas(kLine) Verdict {
  std::atomic<uint32_t> state;  // 0: none, 1: being written, 2: there
  Failure failure;
};

// Where in its program a rank has made a call that does not match the others'.
struct alignas(kLine) Note {
  std::atomic<uint32_t> number;  // of the call
  std::array<char, 2 * kLine - sizeof(uint32_t)> text;
};

// What the leader of a host has received about a rank on another one. Of ranks here only the notes are used, which the
// leader sends for them. See net.h.
struct alignas(kLine) Far {
  Begun begun;
  std::atomic<uint32_t> presence;   // here, or what has become of it (shm.h)
  std::atomic<uint32_t> note_call;  // the group's number of the call that the note is about
  std::array<char, 2 * kLine - sizeof(uint32_t)> note;
  SeqLocked<Waits> waits;
};

struct alignas(kLine) PipeControl {
  alignas(kLine) std::atomic<uint64_t> written;  // bytes, by the sender
  alignas(kLine) std::atomic<uint64_t> read;     // bytes, by the receiver
  std::atomic<uint64_t> released;  // the same: of messages that have found their recv (cost in point_to_point.cc)
};

// What stands in a pipe before each message, and by itself (point_to_point.h).
struct Frame {
  enum class Kind : uint8_t {
    message,  // its payload follows
    offer,    // a message whose payload comes later; numbered from 0 by who sends
    accept,   // of offer `number`: there is a recv
    refuse,   // the same: its payload is not wanted
    body,     // of offer `number`, which has been accepted: the payload follows
    late,     // of offer `number`, for which there is credit now: the same
    credit,   // `number` bytes of messages have found their recv (between hosts)
    receipt,  // a lent payload has been read (between hosts)
  };

  uint64_t count = 0;   // message, offer, body, late: elements
  uint64_t number = 0;  // accept, refuse, body, late, credit
  int32_t tag = 0;
  DType dtype = DType::u8;
  Kind kind = Kind::message;
  uint8_t lent = 0;  // its payload is to be answered, when it has been read, with a receipt
  uint8_t unused = 0;
};
static_assert(sizeof(Frame) == 24);

// From which sizes on calls within a host go which way: `allranks tune` measures what is best on a machine.
struct Tuning {
  static constexpr uint32_t kNever = 1 << 30;

  uint32_t levels_from = 17;              // ranks that have a CPU each: small calls go by groups
  uint32_t crowded_levels_from = kNever;  // ranks that have not
  uint32_t group = 16;                    // the most ranks of a group, up to kGroup
  uint32_t one_shot = 128 << 10;          // bytes of an operand that every rank reads from every other
  uint32_t one_shot_of_all = 256 << 10;   // of all operands
};

// Between begun and gone a rank may still send its last status.
enum class Leaving : uint32_t { no, begun, gone };

struct alignas(kLine) Header {
  uint64_t magic;
  uint32_t rank;
  uint32_t size;
  std::atomic<Leaving> left;  // this rank is destroying the group, or has done so
  // Written before the rank's first call, and read after it. The tuning is that of rank 0.
  Place place;
  Tuning tuning;
};
static_assert(sizeof(Header) <= 2 * kLine);

// Sizes, in bytes but for the last. They decide the layout, so all ranks must agree; tests shrink them so that small
// tensors take every path.
struct Sizes {
  size_t piece = 128 << 10;      // the largest: a power of two
  size_t ring = 2 << 20;         // a multiple of it, at least 6
  size_t small_ring = 32 << 10;  // for pieces of up to a sixteenth of it: a power of two
  size_t pipe = 256 << 10;
  size_t ranks = 0;  // of the group, where it spans hosts
};

class Layout {
 public:
  Layout(int ranks, Sizes sizes) : ranks_(ranks), sizes_(sizes) {}

  const Sizes& sizes() const { return sizes_; }
  uint64_t magic() const;

  size_t header() const { return 0; }
  size_t gate() const { return 2 * kLine; }
  size_t group_gate() const { return 3 * kLine; }
  size_t bell() const { return 4 * kLine; }
  size_t step() const { return 5 * kLine; }
  size_t verdict() const { return 6 * kLine; }
  size_t call(uint32_t number) const { return (7 + number % 2) * kLine; }
  size_t note() const { return 9 * kLine; }
  size_t wait() const { return note() + sizeof(Note); }
  size_t pipe_control(int to) const {
    return wait() + sizeof(WaitLine) + static_cast<size_t>(to) * sizeof(PipeControl);
  }
  size_t ring() const { return page(pipe_control(ranks_)); }
  size_t small_ring() const { return ring() + page(sizes_.ring); }
  // Of a leader: group lines with the operands of the group behind each, release lines, steps.
  static constexpr size_t kGroupLine = sizeof(GroupLine) + kGroup * CallLine::kInline;
  size_t groups() const { return small_ring() + page(sizes_.small_ring); }
  size_t group_line(uint32_t number) const { return groups() + number % 2 * kGroupLine; }
  size_t release_line(uint32_t number) const { return groups() + 2 * kGroupLine + number % 2 * sizeof(ReleaseLine); }
  size_t group_steps() const { return groups() + 2 * (kGroupLine + sizeof(ReleaseLine)); }
  static constexpr size_t kGroupBytes = 2 * (kGroupLine + sizeof(ReleaseLine)) + sizeof(GroupSteps);
  size_t pipe(int to) const { return page(groups() + kGroupBytes) + static_cast<size_t>(to) * page(sizes_.pipe); }
  size_t far(int number) const { return pipe(ranks_) + static_cast<size_t>(number) * sizeof(Far); }
  // All but the rings and pipes, which are allocated when they are first written.
  struct Part {
    size_t begin;
    size_t bytes;
  };
  std::array<Part, 2> control(int rank) const { return {{{0, ring()}, {pipe(ranks_), bytes(rank) - pipe(ranks_)}}}; }
  // Only the segment of rank 0 has a table of the ranks elsewhere.
  size_t bytes(int rank) const { return rank == 0 ? far(static_cast<int>(sizes_.ranks)) : pipe(ranks_); }
  // Where a rank's segment begins, where one memory has all of them.
  size_t segment(int rank) const {
    return rank == 0 ? 0 : page(bytes(0)) + static_cast<size_t>(rank - 1) * page(pipe(ranks_));
  }

 private:
  static size_t page(size_t n) { return (n + 4095) / 4096 * 4096; }

  int ranks_;
  Sizes sizes_;
};

}  // namespace allranks
