// Records the calls of this process in memory that other processes can read (layout.h).
//
// Cost of a call: no lock and no allocation. No clock is read, because calls read it at their begin and end anyway. The
// call writes two cache lines that no other process writes. Finding a call site takes longer, some microseconds. The
// site of an asynchronous call is already known. The site of a blocking call is looked up only so often that lookups
// take one part in kSiteShare of the time.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/sys.h"
#include "base/types.h"
#include "base/waiting.h"
#include "trace/layout.h"

namespace allranks::trace {

constexpr int64_t kSiteShare = 1000;  // lookups of call sites take about 1 / kSiteShare of the time

struct Identity {
  int rank = 0;
  int world_size = 1;
  size_t members = 1;  // number of ranks for which the tables are sized
  std::string host;
};

// The tables of layout.h, mapped.
class Memory {
 public:
  static size_t bytes(size_t records, size_t members);

  // Create the tables in memory or in a file of size bytes(). The blocks of a file are allocated before they are
  // written. A full disk then ends the recording and not the process (SIGBUS). Throws Error.
  Memory(const sys::Fd& fd, size_t records, const Identity& identity, bool is_file);
  Memory(const Memory&) = delete;
  ~Memory() { trim(); }

  Header& header() const { return *reinterpret_cast<Header*>(mapping_.data()); }
  Group& group(size_t i) const { return at<Group>(0, i); }
  Member& member(size_t i) const { return at<Member>(1, i); }
  Site& site(size_t i) const { return at<Site>(2, i); }
  uint32_t entries(size_t table) const { return tables_[table].entries; }
  void copy_tables(const Memory& other);
  void end_calls(size_t group, int64_t returned_ns) const;  // marks the unfinished calls of a group as closed
  void trim();                                              // cuts a file to its used part

  // Return the next record and its index, or nullptr if the disk is full.
  std::pair<Record*, uint64_t> next() {
    // Relaxed: the index only has to be unique. The index in the record publishes its fields.
    const uint64_t index = header().records.fetch_add(1, std::memory_order_relaxed) + 1;
    if (index > allocated_.load(std::memory_order_acquire) && !allocate(index)) return {nullptr, 0};
    __builtin_prefetch(&at<Record>(3, index & (tables_[3].entries - 1)), 1);  // for the next call
    return {&at<Record>(3, (index - 1) & (tables_[3].entries - 1)), index};
  }

 private:
  template <class T>
  T& at(size_t table, size_t i) const {
    return reinterpret_cast<T*>(mapping_.data() + tables_[table].offset)[i];
  }
  bool allocate(uint64_t index);

  sys::Mapping mapping_;
  std::array<Table, 4> tables_{};
  std::atomic<uint64_t> allocated_;  // number of records whose blocks are allocated; UINT64_MAX: all
  std::mutex allocating_;
  sys::Fd file_;
  const uint32_t forks_ = sys::forks();
};

class Recorder {
 public:
  explicit Recorder(std::unique_ptr<Memory> memory) : memory_(std::move(memory)) {}

  // Return whether this is a forked child. The memory belongs to the parent, so a child may call no other function.
  bool forked() const { return forks_ != sys::forks(); }

  // A call in progress.
  struct Call {
    Record* record = nullptr;
    uint64_t index = 0;
    Record* in_file = nullptr;
    uint64_t index_in_file = 0;
  };

  // Add a group and return its number; 0 if the table is full. ranks: the ranks of the group, as ranks of the world.
  size_t add_group(std::string_view name, std::string_view engine, int rank, const std::vector<int>& ranks);
  void close_group(size_t group);
  Group& group(size_t group) const { return memory_->group(group); }

  // Return the address at which a worker stores the site of the operation that it executes.
  uint32_t* doing() const { return &memory_->header().doing; }

  // Return the number of a call site; 0 if the text is empty or the table is full.
  uint16_t site(std::string_view text);
  // Return the site of a blocking call that begins now, or 0 if no lookup is due. Relaxed: threads need not agree on
  // the time of the next lookup.
  uint16_t site_of(Caller& caller, int64_t now_ns) {
    return now_ns < site_due_ns_.load(std::memory_order_relaxed) ? uint16_t{0} : ask_site(caller);
  }

  struct Begin {
    size_t group;
    uint32_t number;
    const Fingerprint& fingerprint;
    int32_t peer;
    uint16_t site;
    bool async;
    int64_t entered_ns;
  };
  Call begin(const Begin& begin) {
    Call call;
    std::tie(call.record, call.index) = memory_->next();
    write(*call.record, call.index, begin);
    // Acquire pairs with record_to(), which has initialized the tables of the file.
    if (Memory* const file = file_.load(std::memory_order_acquire)) {
      std::tie(call.in_file, call.index_in_file) = file->next();
      if (call.in_file != nullptr) write(*call.in_file, call.index_in_file, begin);
    }
    return call;
  }
  // met_ns, last: arrival of the last rank, and its number; 0 and -1: not known.
  void end(const Call& call, int64_t returned_ns, int64_t met_ns, int last, uint8_t outcome) {
    if (forked()) return;  // a signal handler may have forked during the call
    write(call.record, call.index, returned_ns, met_ns, last, outcome);
    if (call.in_file != nullptr) write(call.in_file, call.index_in_file, returned_ns, met_ns, last, outcome);
  }
  // Set the site of a call in progress, if it is found after the begin of the call.
  void set_site(const Call& call, uint16_t site) {
    if (site == 0) return;
    call.record->site = site;
    if (call.in_file != nullptr) call.in_file->site = site;
  }

  // Consecutive commands that a worker has executed. They form one record, which is written only to the file: in
  // memory, the commands of a moment would replace all calls.
  struct Commands {
    size_t group;
    uint16_t site;  // names the command that took longest
    uint64_t count;
    int64_t entered_ns;
    int64_t returned_ns;
  };
  void add_commands(const Commands& commands) {
    Memory* const file = file_.load(std::memory_order_acquire);
    if (file == nullptr || forked()) return;
    const auto [record, index] = file->next();
    if (record == nullptr) return;
    const Fingerprint fingerprint{.verb = Verb::none, .count = commands.count};
    write(*record, index, {commands.group, 0, fingerprint, -1, commands.site, false, commands.entered_ns});
    write(record, index, commands.returned_ns, 0, -1, 0);
  }

  static void set_awaited(Record& record) { record.flags.fetch_or(kAwaited, std::memory_order_relaxed); }
  // Note that a wait with its own timeout has ended before the call. Otherwise it would be reported as a long wait.
  static void clear_awaited(Record& record) {
    record.flags.fetch_and(static_cast<uint8_t>(~kAwaited), std::memory_order_relaxed);
  }

  // Count that a rank was the last of a group to arrive, and by how much. Called by one thread at a time per group.
  void count_last(size_t group, int rank, int64_t late_ns);

  // Record all later calls in a file, too. nullptr: stop this.
  void record_to(std::unique_ptr<Memory> file);

 private:
  // Index 0 is written before the fields, and the new index after them. A reader that finds the same index before and
  // after it reads the fields therefore has the fields of one call.
  static void write(Record& record, uint64_t index, const Begin& begin) {
    record.index.store(0, std::memory_order_relaxed);
    order_writes();
    record.entered_ns = begin.entered_ns;
    record.met_ns = 0;
    record.returned_ns = 0;
    record.count = begin.fingerprint.count;
    record.number = begin.number;
    record.group = static_cast<uint16_t>(begin.group);
    record.site = begin.site;
    record.peer = begin.peer;
    record.last = -1;
    record.verb = begin.fingerprint.verb;
    record.dtype = begin.fingerprint.dtype;
    record.op = begin.fingerprint.op;
    record.purpose = begin.fingerprint.purpose;
    record.outcome = 0;
    record.flags.store(begin.async ? kAsync : 0, std::memory_order_relaxed);
    record.index.store(index, std::memory_order_release);
  }
  static void write(Record* record, uint64_t index, int64_t returned_ns, int64_t met_ns, int last, uint8_t outcome) {
    if (record->index.load(std::memory_order_relaxed) != index) return;  // later calls have replaced the record
    record->met_ns = met_ns;
    record->last = last;
    record->outcome = outcome;
    order_writes();  // a reader that finds returned_ns also finds the result
    record->returned_ns = returned_ns;
  }
  uint16_t ask_site(Caller& caller);

  std::unique_ptr<Memory> memory_;
  std::atomic<Memory*> file_ = nullptr;
  std::vector<std::unique_ptr<Memory>> files_;  // includes previous files, which calls in progress may still write
  std::atomic<int64_t> site_due_ns_ = 0;
  std::mutex lock_;  // protects additions to the tables
  const uint32_t forks_ = sys::forks();
};

}  // namespace allranks::trace
