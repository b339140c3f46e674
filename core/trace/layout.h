// The memory that a process records its calls in: one memfd per rank, which its agent also holds, so that the last
// calls can be read when the process is stopped or killed. A trace file has the same layout, and room for more calls.
//
// Written by the rank alone, without a lock. Read by other processes at any time, by the offsets in the header:
// src/allranks/_trace/reader.py is the other description of these structures, and a test compares both.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace allranks::trace {

constexpr std::array<char, 8> kMagic = {'a', 'l', 'l', 'r', 't', 'r', 'c', '\0'};
constexpr uint32_t kVersion = 1;
constexpr size_t kVerbs = 12;  // of Verb; none: commands that a worker has executed

// Where a table lies, and of what.
struct Table {
  uint64_t offset;
  uint32_t entry_bytes;
  uint32_t entries;
};

struct Header {
  std::array<char, 8> magic;  // written last
  uint32_t version;
  int32_t pid;
  int32_t rank;  // of the world
  int32_t world_size;
  int64_t monotonic_ns;  // both clocks, read at the same time
  int64_t wall_ns;
  std::array<Table, 4> tables;  // groups, members, sites, records
  std::array<char, 64> host;
  alignas(64) std::atomic<uint64_t> records;  // begun since the start; only the newest are kept
  alignas(64) std::atomic<uint32_t> groups;
  std::atomic<uint32_t> members;
  uint32_t doing;  // of a worker: the site whose text names the operation under way; 0: none
};
static_assert(sizeof(Header) == 320);

// What the calls of one verb took, all in all.
struct Totals {
  std::atomic<uint64_t> calls;
  std::atomic<uint64_t> bytes;
  std::atomic<uint64_t> ns;         // inside calls
  std::atomic<uint64_t> waited_ns;  // of these, until all ranks had come
};

enum class GroupState : uint32_t { free, open, closed };

struct Group {
  std::array<char, 96> name;
  std::array<char, 16> engine;
  std::atomic<GroupState> state;
  int32_t rank;  // of this process in the group
  int32_t size;
  uint32_t first_member;         // kNoMembers: there was no room
  std::atomic<uint32_t> number;  // of the last collective that has begun
  uint32_t unused;
  std::atomic<uint64_t> compared;  // calls of which it is known who came last
  std::atomic<uint64_t> shared;    // calls that worked in everybody's shared blocks
  std::array<Totals, kVerbs> totals;
};
constexpr uint32_t kNoMembers = ~uint32_t{0};
static_assert(sizeof(Group) == 152 + 32 * kVerbs);

// A rank of a group: how often it was the last to come, and by how much later than the last but one.
struct Lateness {
  std::atomic<uint64_t> times;
  std::atomic<uint64_t> ns;
};
struct Member {
  int32_t world_rank;
  int32_t unused;
  Lateness all;
  // As it was at the last multiple of kWindow calls, and at the one before: what has come since is recent.
  Lateness at_window;
  Lateness at_window_before;
};
static_assert(sizeof(Member) == 56);
constexpr uint64_t kWindow = 512;

// A line of the program, such as train.py:12 in step.
struct Site {
  std::atomic<uint32_t> hash;  // 0: free
  std::atomic<uint32_t> there;
  std::array<char, 120> text;  // its end, if it is longer
};
static_assert(sizeof(Site) == 128);

struct Record {
  std::atomic<uint64_t> index;  // from 1; 0 while the record is being replaced
  int64_t entered_ns;
  int64_t met_ns;       // when the last rank came; 0: not yet, or not known
  int64_t returned_ns;  // 0: not yet
  uint64_t count;       // elements
  uint32_t number;      // of the group's collectives; of a message: its tag
  uint16_t group;
  uint16_t site;  // 0: not known
  int32_t peer;   // the root, or the other side of a message; < 0: none, or any
  int32_t last;   // who came last, as a rank of the group; < 0: not known
  Verb verb;
  DType dtype;
  ReduceOp op;
  Purpose purpose;
  uint8_t outcome;  // a Kind (base/error.h), if it has failed; kFailed: otherwise
  std::atomic<uint8_t> flags;
  uint16_t unused;
};
static_assert(sizeof(Record) == 64);
constexpr uint8_t kFailed = 255;
constexpr uint8_t kAsync = 1;    // flag: the caller did not wait
constexpr uint8_t kAwaited = 2;  // flag: of an asynchronous call, that the caller now waits and has done so for a while

// Other processes see what was written before this call no later than what is written after it. gcc's thread sanitizer
// refuses fences. It looks at one process, so nothing that it can find is lost without them.
inline void order_writes() {
#ifndef __SANITIZE_THREAD__
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace allranks::trace
