// The shared memory of a group: one segment per rank, mapped by every rank of the host.
//
// Words used here and in the algorithms:
//   call    one collective. Ranks number their calls 1, 2, 3, ... (wrapping). At its start every
//           rank posts its fingerprint in its call line and waits for everybody's (arrive).
//   step    one turn of the pipeline inside a large call; each rank counts the steps it has done.
//   ring    where a rank puts what others are to read, round and round (Comm::take). Everybody knows the
//           sizes of everybody's calls, so that nobody says where: positions are the same on all ranks. A
//           rank that has seen everybody arrive in call n-1 knows that everybody is done with call n-2,
//           and of call n-1 at most its last three pieces are unread: so what lies more than four
//           pieces back may be overwritten with no acknowledgement. The same holds of call lines.
//   pipe    a byte ring from this rank to one other: send and recv.
//   bell    a futex word with the count of those that sleep on it.
//
// Control lines are 128 bytes apart: x86 fetches lines in pairs.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../error.h"
#include "../types.h"

namespace allranks {

constexpr size_t kLine = 128;

struct alignas(kLine) Bell {
  std::atomic<uint32_t> word;
  std::atomic<uint32_t> sleepers;
};

struct alignas(kLine) CallLine {
  static constexpr size_t kInline = kLine - sizeof(uint64_t) - sizeof(Fingerprint);

  std::atomic<uint32_t> number;
  uint32_t of_group;  // the group's number of the call, where the group spans hosts and a call has several parts
  Fingerprint fingerprint;
  std::array<std::byte, kInline> payload;
};
static_assert(sizeof(CallLine) == kLine);

struct alignas(kLine) StepLine {
  std::atomic<uint32_t> done;
  uint32_t disagree;  // by the leader of a host: not 0: where in its ring everybody's fingerprints stand, plus 1
  std::atomic<uint32_t> begun;  // the group's number of the call that this rank is in, where it spans hosts
};

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

struct alignas(kLine) PipeControl {
  alignas(kLine) std::atomic<uint64_t> written;  // bytes, by the sender
  alignas(kLine) std::atomic<uint64_t> read;     // bytes, by the receiver
};

// What stands in a pipe before each message.
struct Frame {
  Fingerprint fingerprint;
  int32_t tag = 0;
  uint32_t lent = 0;  // to be answered, when it has been read, with a frame whose verb is recv
};

struct alignas(kLine) Header {
  uint64_t magic;
  uint32_t rank;
  uint32_t size;
  std::atomic<uint32_t> left;  // this rank has left the group: destroyed it, or exited
};

// Sizes in bytes. They decide the layout, so all ranks must agree; tests shrink them so that small
// tensors take every path.
struct Sizes {
  size_t piece = 128 << 10;  // the largest: a power of two
  size_t ring = 2 << 20;     // a multiple of it, at least 6
  size_t pipe = 256 << 10;
};

class Layout {
 public:
  Layout(int ranks, Sizes sizes) : ranks_(ranks), sizes_(sizes) {}

  const Sizes& sizes() const { return sizes_; }
  uint64_t magic() const;

  size_t header() const { return 0; }
  size_t gate() const { return kLine; }
  size_t bell() const { return 2 * kLine; }
  size_t step() const { return 3 * kLine; }
  size_t verdict() const { return 4 * kLine; }
  size_t call(uint32_t number) const { return (5 + number % 2) * kLine; }
  size_t note() const { return 7 * kLine; }
  size_t pipe_control(int to) const { return note() + sizeof(Note) + static_cast<size_t>(to) * sizeof(PipeControl); }
  size_t ring() const { return page(pipe_control(ranks_)); }
  size_t pipe(int to) const { return ring() + page(sizes_.ring) + static_cast<size_t>(to) * page(sizes_.pipe); }
  size_t bytes() const { return pipe(ranks_); }

 private:
  static size_t page(size_t n) { return (n + 4095) / 4096 * 4096; }

  int ranks_;
  Sizes sizes_;
};

}  // namespace allranks
