// The shared memory of a group: one segment per rank, mapped by every rank of the host.
//
// Terms used here and in the algorithms:
//   call    one collective. Ranks number their calls 1, 2, 3, ... (wrapping). At the start of a call every rank writes
//           its fingerprint into its call line. It then waits for the fingerprints of all other ranks (arrive).
//   step    one iteration of the pipeline inside a large call. Each rank counts the steps it has completed.
//   piece   the unit in which a rank writes into a ring.
//   ring    the buffer into which a rank writes data that other ranks read (LocalComm::take). Every rank knows the
//           sizes of every call, so positions are equal on all ranks and are never sent. If a rank has seen all others
//           arrive in call n-1, all ranks have finished call n-2. Of call n-1 at most the last three pieces are unread.
//           Data more than four pieces back may therefore be overwritten without an acknowledgement. The same holds
//           for call lines. Small pieces have a separate ring, so that a group with only small calls needs little
//           memory (docs/decisions/107).
//   pipe    a byte ring from this rank to one other rank, for messages.
//   bell    a futex word and the number of threads that sleep on it. To ring it is to wake them all.
//   group   here: ranks of one host that are near each other, if the host has many ranks. The first rank of a group is
//           its leader. It compares the call lines of its group and publishes the result. Every rank then reads a few
//           lines instead of one line of every rank (levels.h, docs/decisions/109).
//
// Control lines are 128 bytes apart, because x86 fetches lines of 64 bytes in pairs.
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
  uint32_t of_group;  // the process group's number of the call. It differs if the group spans hosts: one call then
                      // consists of several calls on each host
  Fingerprint fingerprint;
  int64_t entered_ns;  // when the rank arrived (CLOCK_MONOTONIC, which the ranks of a host share)
  std::array<std::byte, kInline> payload;
};
static_assert(sizeof(CallLine) == kLine);
// A cache line has 64 bytes. For a small call a single line is transferred, which contains the header and the operand.
static_assert(offsetof(CallLine, payload) <= 40);

// Sequence lock: a value that one thread at a time writes and any number of threads read.
template <class T>
class SeqLocked {
 public:
  void store(const T& value) {
    // The version is odd during the write. The words are stored after it, with release. A reader that loads a new word
    // therefore finds a changed version afterwards and retries.
    const uint32_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    const auto words = std::bit_cast<Words>(value);
    for (size_t i = 0; i < words.size(); i++) words_[i].store(words[i], std::memory_order_release);
    version_.store(version + 2, std::memory_order_release);
  }
  T load() const {
    Words words{};
    // Limited, because the writer may have been killed during a write. The result may then be inconsistent.
    for (int tries = 0; tries < 1000; tries++) {
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

// The last collective that a rank has begun, if the process group spans hosts.
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

// The message that a rank has been waiting for, published when the wait becomes long (docs/decisions/076). Errors use
// it to list which rank waits for which.
struct Waits {
  int32_t peer = -1;  // < 0: any rank
  int32_t tag = 0;
  Verb verb = Verb::none;  // none: the rank does not wait
  std::array<uint8_t, 7> unused{};
  std::array<char, 112> site{};  // the call site; if it is too long, its end

  bool operator==(const Waits&) const = default;
};

struct alignas(kLine) WaitLine {
  SeqLocked<Waits> waits;
};

// The arrival of the last of several ranks at a collective.
struct LastArrival {
  int64_t met_ns = 0;
  int64_t late_ns = 0;   // met_ns minus the arrival of the second-to-last rank
  int64_t error_ns = 0;  // uncertainty of met_ns, if it was measured with another host's clock
  int32_t last = -1;     // the last rank, as a rank of the process group; -1: not known
  uint32_t unused = 0;
};

// Summary of the call lines of a group, written by its leader.
struct alignas(kLine) GroupLine {
  std::atomic<uint32_t> number;
  uint32_t agree;  // 1: all fingerprints are equal, and no call sites have to be compared
  Fingerprint fingerprint;
  int64_t met_ns;
  int64_t before_last_ns;  // arrival of the second-to-last rank
  int32_t last;            // the last rank to arrive, as a rank of the host
  uint32_t unused;
};
static_assert(sizeof(GroupLine) == kLine);

// Result of a call, which a leader publishes for its group when all ranks of the host have arrived.
struct alignas(kLine) ReleaseLine {
  std::atomic<uint32_t> number;
  uint32_t agree;
  LastArrival arrival;
  std::array<std::byte, CallLine::kInline> payload;
};
static_assert(offsetof(ReleaseLine, payload) == 40);

// Numbers of the steps that a leader has seen completed, by its group and by all ranks of the host.
struct alignas(kLine) GroupSteps {
  alignas(kLine) std::atomic<uint32_t> of_group;
  alignas(kLine) std::atomic<uint32_t> of_all;
};

struct alignas(kLine) StepLine {
  std::atomic<uint32_t> done;
  uint32_t disagree;  // written by the leader of a host: 0, or 1 + the offset of all ranks' fingerprints in its rings,
                      // if the ranks have to compare them
  Begun begun;
  LastArrival arrival;  // written by the leader of a host, for all hosts
};
static_assert(sizeof(StepLine) == kLine);

// The failure that has ended the process group. Only the verdict in the segment of rank 0 is used.
struct alignas(kLine) Verdict {
  std::atomic<uint32_t> state;  // 0: none, 1: being written, 2: complete
  Failure failure;
};

// The call site of a rank's call that does not match the calls of other ranks.
struct alignas(kLine) Note {
  std::atomic<uint32_t> number;  // of the call
  std::array<char, 2 * kLine - sizeof(uint32_t)> text;
};

// State of a rank on another host, as the leader of this host has received it. For ranks of this host only the notes
// are used, which the leader sends for them. See net.h.
struct alignas(kLine) Far {
  Begun begun;
  std::atomic<uint32_t> presence;   // a Presence (shm.h)
  std::atomic<uint32_t> note_call;  // the process group's number of the call that the note belongs to
  std::array<char, 2 * kLine - sizeof(uint32_t)> note;
  SeqLocked<Waits> waits;
};

struct alignas(kLine) PipeControl {
  alignas(kLine) std::atomic<uint64_t> written;  // bytes, by the sender
  alignas(kLine) std::atomic<uint64_t> read;     // bytes, by the receiver
  std::atomic<uint64_t> released;  // bytes, by the receiver: cost of matched messages (cost() in point_to_point.cc)
};

// Header in a pipe or message stream: before each message, and alone for control (point_to_point.h).
struct Frame {
  enum class Kind : uint8_t {
    message,  // a message; its payload follows
    offer,    // a message whose payload is sent later; the sender numbers its offers from 0
    accept,   // a recv matches offer `number`
    refuse,   // the receiver refuses the payload of offer `number`
    body,     // offer `number` has been accepted; its payload follows
    late,     // enough credit for offer `number` is available again; its payload follows
    credit,   // `number` bytes of messages have been matched with recvs (between hosts)
    receipt,  // a lent payload has been read (between hosts)
  };

  uint64_t count = 0;   // message, offer, body, late: elements
  uint64_t number = 0;  // accept, refuse, body, late, credit
  int32_t tag = 0;
  DType dtype = DType::u8;
  Kind kind = Kind::message;
  uint8_t lent = 0;  // 1: the receiver must send a receipt when it has read the payload
  uint8_t unused = 0;
};
static_assert(sizeof(Frame) == 24);

// Thresholds that select the algorithms of calls within a host. `allranks tune` measures the best ones for a machine.
struct Tuning {
  static constexpr uint32_t kNever = 1 << 30;

  uint32_t levels_from = 17;              // minimum number of ranks with a CPU each for small calls by groups
  uint32_t crowded_levels_from = kNever;  // the same minimum, if there are fewer CPUs than ranks
  uint32_t group = 16;                    // maximum number of ranks of a group, up to kGroup
  uint32_t one_shot = 128 << 10;          // maximum bytes of an operand that every rank reads from every other
  uint32_t one_shot_of_all = 256 << 10;   // maximum bytes of all these operands
};

// Progress of a rank that leaves the group. Between begun and gone it may still send its last status.
enum class Leaving : uint32_t { no, begun, gone };

struct alignas(kLine) Header {
  uint64_t magic;
  uint32_t rank;
  uint32_t size;
  std::atomic<Leaving> left;  // whether this rank is destroying the group, or has done so
  // Written before the rank's first call and read after it, so no atomic is needed. All ranks use the tuning of rank 0.
  Place place;
  Tuning tuning;
};
static_assert(sizeof(Header) <= 2 * kLine);

// Sizes in bytes, except `ranks`. They determine the layout, so all ranks must use the same sizes. Tests shrink them,
// so that small tensors exercise every path. docs/decisions/017 has the measurements.
struct Sizes {
  size_t piece = 128 << 10;      // of the largest piece; a power of two
  size_t ring = 2 << 20;         // a multiple of the piece size, at least 6 pieces
  size_t small_ring = 32 << 10;  // for pieces of up to a sixteenth of its size; a power of two
  size_t pipe = 256 << 10;
  size_t ranks = 0;  // number of ranks of the process group, if it spans hosts
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
  // Used by leaders: group lines (each followed by the operands of the group), release lines, steps.
  static constexpr size_t kGroupLine = sizeof(GroupLine) + kGroup * CallLine::kInline;
  size_t groups() const { return small_ring() + page(sizes_.small_ring); }
  size_t group_line(uint32_t number) const { return groups() + number % 2 * kGroupLine; }
  size_t release_line(uint32_t number) const { return groups() + 2 * kGroupLine + number % 2 * sizeof(ReleaseLine); }
  size_t group_steps() const { return groups() + 2 * (kGroupLine + sizeof(ReleaseLine)); }
  static constexpr size_t kGroupBytes = 2 * (kGroupLine + sizeof(ReleaseLine)) + sizeof(GroupSteps);
  size_t pipe(int to) const { return page(groups() + kGroupBytes) + static_cast<size_t>(to) * page(sizes_.pipe); }
  size_t far(int number) const { return pipe(ranks_) + static_cast<size_t>(number) * sizeof(Far); }
  // The parts outside of the rings and pipes, which are allocated when they are first written.
  struct Part {
    size_t begin;
    size_t bytes;
  };
  std::array<Part, 2> control(int rank) const { return {{{0, ring()}, {pipe(ranks_), bytes(rank) - pipe(ranks_)}}}; }
  // Only the segment of rank 0 has a table of the ranks on other hosts.
  size_t bytes(int rank) const { return rank == 0 ? far(static_cast<int>(sizes_.ranks)) : pipe(ranks_); }
  // Offset of a rank's segment, if one memory holds all segments.
  size_t segment(int rank) const {
    return rank == 0 ? 0 : page(bytes(0)) + static_cast<size_t>(rank - 1) * page(pipe(ranks_));
  }

 private:
  static size_t page(size_t n) { return (n + 4095) / 4096 * 4096; }

  int ranks_;
  Sizes sizes_;
};

}  // namespace allranks
