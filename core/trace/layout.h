// Layout of the memory in which a process records its calls: one memfd per rank. The agent also holds it, so that the
// last calls can be read if the process is stopped or killed. A trace file has the same layout and more records.
// docs/decisions/093 has the reasons.
//
// Only the rank writes the memory, and it takes no lock to record a call. Other processes read it at any time, by the
// offsets in the header. src/allranks/_trace/reader.py also describes these structures, and a test compares both.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace allranks::trace {

constexpr std::array<char, 8> kMagic = {'a', 'l', 'l', 'r', 't', 'r', 'c', '\0'};
constexpr uint32_t kVersion = 1;
constexpr size_t kVerbs = 12;  // number of values of Verb; Verb::none stands for commands that a worker has executed

// Position and size of a table.
struct Table {
  uint64_t offset;
  uint32_t entry_bytes;
  uint32_t entries;
};

struct Header {
  std::array<char, 8> magic;  // written last, so that a reader that finds it also finds a complete header
  uint32_t version;
  int32_t pid;
  int32_t rank;  // in the world
  int32_t world_size;
  int64_t monotonic_ns;  // both clocks, read at the same time: readers convert times with them
  int64_t wall_ns;
  std::array<Table, 4> tables;  // groups, members, sites, records
  std::array<char, 64> host;
  alignas(64) std::atomic<uint64_t> records;  // number of records begun; only the newest are kept
  alignas(64) std::atomic<uint32_t> groups;   // used entries of the table
  std::atomic<uint32_t> members;              // used entries of the table
  uint32_t doing;  // on a worker: the site whose text names the operation in progress; 0: none
};
static_assert(sizeof(Header) == 320);

// Totals of all calls of one verb.
struct Totals {
  std::atomic<uint64_t> calls;
  std::atomic<uint64_t> bytes;
  std::atomic<uint64_t> ns;         // time inside calls
  std::atomic<uint64_t> waited_ns;  // of this, the time until all ranks had arrived
};

enum class GroupState : uint32_t { free, open, closed };

struct Group {
  std::array<char, 96> name;
  std::array<char, 16> engine;
  std::atomic<GroupState> state;
  int32_t rank;  // of this process in the group
  int32_t size;
  uint32_t first_member;         // index in the table of members; kNoMembers: the table was full
  std::atomic<uint32_t> number;  // number of the last collective that has begun
  uint32_t unused;
  std::atomic<uint64_t> compared;  // number of calls for which the last rank to arrive is known
  std::atomic<uint64_t> shared;    // number of calls that worked directly in the shared blocks of all ranks
  std::array<Totals, kVerbs> totals;
};
constexpr uint32_t kNoMembers = ~uint32_t{0};
static_assert(sizeof(Group) == 152 + 32 * kVerbs);

// How often a rank was the last to arrive, and how much later than the second-to-last rank in total.
struct Lateness {
  std::atomic<uint64_t> times;
  std::atomic<uint64_t> ns;
};
// A rank of a group.
struct Member {
  int32_t world_rank;
  int32_t unused;
  Lateness all;
  // The value of `all` at the last multiple of kWindow compared calls, and at the multiple before. The difference to
  // `all` is the recent lateness.
  Lateness at_window;
  Lateness at_window_before;
};
static_assert(sizeof(Member) == 56);
constexpr uint64_t kWindow = 512;

// A call site in the program, such as train.py:12 in step.
struct Site {
  std::atomic<uint32_t> hash;   // 0: free
  std::atomic<uint32_t> there;  // 1: the text is complete
  std::array<char, 120> text;   // the end of the text, if it is longer
};
static_assert(sizeof(Site) == 128);

struct Record {
  // Counted from 1; 0 while the record is being replaced. A reader accepts the other fields only if the index is
  // unchanged after it has read them.
  std::atomic<uint64_t> index;
  int64_t entered_ns;
  int64_t met_ns;       // when the last rank arrived; 0: not yet, or not known
  int64_t returned_ns;  // 0: not yet
  uint64_t count;       // elements
  uint32_t number;      // number of the collective in its group; for a message: the tag
  uint16_t group;
  uint16_t site;  // 0: not known
  int32_t peer;   // the root, or the other side of a message; < 0: none, or any
  int32_t last;   // the last rank to arrive, as a rank of the group; < 0: not known
  Verb verb;
  DType dtype;
  ReduceOp op;
  Purpose purpose;
  uint8_t outcome;  // 0: no failure; a Kind (base/error.h); kFailed: another failure
  std::atomic<uint8_t> flags;
  uint16_t unused;
};
static_assert(sizeof(Record) == 64);
constexpr uint8_t kFailed = 255;
constexpr uint8_t kAsync = 1;    // flag: the call is asynchronous
constexpr uint8_t kAwaited = 2;  // flag: the caller of an asynchronous call now waits, and has waited for a while

// Order the writes before this call ahead of the writes after it, for other processes that read the memory. gcc's
// thread sanitizer rejects fences. It checks a single process, so it detects the same races without them.
inline void order_writes() {
#ifndef __SANITIZE_THREAD__
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace allranks::trace
