// Records the calls of this process in memory that others can read (layout.h).
//
// Cost of a call: no lock, no allocation, and no reading of the clock, as calls read it at their begin and end anyway;
// it writes two cache lines that nobody else writes. To find a call's site takes longer. It is looked up for
// asynchronous calls, whose site is known, and for some blocking ones, as often as that takes kSiteShare of the time.
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

constexpr int64_t kSiteShare = 1000;  // one part in so many

struct Identity {
  int rank = 0;
  int world_size = 1;
  size_t members = 1;  // for how many ranks the tables are laid out
  std::string host;
};

// The tables of layout.h, mapped.
class Memory {
 public:
  static size_t bytes(size_t records, size_t members);

  // New tables, in memory or a file of that size. In a file, room is allocated as it is needed: a full disk ends the
  // recording, and not the process. Throws Error.
  Memory(const sys::Fd& fd, size_t records, const Identity& identity, bool is_file);
  Memory(const Memory&) = delete;
  ~Memory() { trim(); }

  Header& header() const { return *reinterpret_cast<Header*>(mapping_.data()); }
  Group& group(size_t i) const { return at<Group>(0, i); }
  Member& member(size_t i) const { return at<Member>(1, i); }
  Site& site(size_t i) const { return at<Site>(2, i); }
  uint32_t entries(size_t table) const { return tables_[table].entries; }
  void copy_tables(const Memory& other);
  void end_calls(size_t group, int64_t returned_ns) const;  // that are under way, of a group that has been left
  void trim();                                              // a file, to what has been used

  // The place of the next record, and its index. nullptr: the disk is full.
  std::pair<Record*, uint64_t> next() {
    const uint64_t index = header().records.fetch_add(1, std::memory_order_relaxed) + 1;
    if (index > allocated_.load(std::memory_order_acquire) && !allocate(index)) return {nullptr, 0};
    __builtin_prefetch(&at<Record>(3, index & (tables_[3].entries - 1)), 1);  // of the next call
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
  std::atomic<uint64_t> allocated_;  // records
  std::mutex allocating_;
  sys::Fd file_;
  const uint32_t forks_ = sys::forks();
};

class Recorder {
 public:
  explicit Recorder(std::unique_ptr<Memory> memory) : memory_(std::move(memory)) {}

  // In a forked child, which may only ask for this: the memory is the parent's.
  bool forked() const { return forks_ != sys::forks(); }

  // A call under way.
  struct Call {
    Record* record = nullptr;
    uint64_t index = 0;
    Record* in_file = nullptr;
    uint64_t index_in_file = 0;
  };

  // ranks: of the group, as ranks of the world.
  size_t add_group(std::string_view name, std::string_view engine, int rank, const std::vector<int>& ranks);
  void close_group(size_t group);
  Group& group(size_t group) const { return memory_->group(group); }

  // Where a worker notes what it executes: the number of a site.
  uint32_t* doing() const { return &memory_->header().doing; }

  // The number of a line of the program.
  uint16_t site(std::string_view text);
  // The same of a blocking call that begins now; 0 where its turn has not come.
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
    if (Memory* const file = file_.load(std::memory_order_acquire)) {
      std::tie(call.in_file, call.index_in_file) = file->next();
      if (call.in_file != nullptr) write(*call.in_file, call.index_in_file, begin);
    }
    return call;
  }
  // met_ns: when the last rank came, `last`; 0 and -1: not known.
  void end(const Call& call, int64_t returned_ns, int64_t met_ns, int last, uint8_t outcome) {
    if (forked()) return;  // within the call: a signal's handler may do that
    write(call.record, call.index, returned_ns, met_ns, last, outcome);
    if (call.in_file != nullptr) write(call.in_file, call.index_in_file, returned_ns, met_ns, last, outcome);
  }
  // Of a call that may take long, when its site has been found.
  void set_site(const Call& call, uint16_t site) {
    if (site == 0) return;
    call.record->site = site;
    if (call.in_file != nullptr) call.in_file->site = site;
  }

  // What a worker has executed: commands that follow each other, as one record of the file. It is not in memory, where
  // a moment of them would replace all calls.
  struct Commands {
    size_t group;
    uint16_t site;  // names the one that took longest
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

  // Counts that a rank of a group came last, by that much. By one thread at a time for each group.
  void count_last(size_t group, int rank, int64_t late_ns);

  // From now on all calls are recorded in a file, too; nullptr: no longer.
  void record_to(std::unique_ptr<Memory> file);

 private:
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
    if (record->index.load(std::memory_order_relaxed) != index) return;  // so many calls later
    record->met_ns = met_ns;
    record->last = last;
    record->outcome = outcome;
    order_writes();
    record->returned_ns = returned_ns;
  }
  uint16_t ask_site(Caller& caller);

  std::unique_ptr<Memory> memory_;
  std::atomic<Memory*> file_ = nullptr;
  std::vector<std::unique_ptr<Memory>> files_;  // also those of before, which calls under way may still write
  std::atomic<int64_t> site_due_ns_ = 0;
  std::mutex lock_;  // of tables that grow
  const uint32_t forks_ = sys::forks();
};

}  // namespace allranks::trace
