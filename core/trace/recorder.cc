#include "trace/recorder.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace allranks::trace {

namespace {

constexpr size_t kGroups = 128;
constexpr size_t kSites = 1024;
constexpr int64_t kSiteMostNs = 50'000'000;   // maximum time between two lookups of call sites
constexpr uint64_t kAllocatedAtOnce = 32768;  // records of a file, 2 MiB
constexpr uint64_t kSearchedForOpen = 2048;   // number of the newest records that are searched when a group is closed

int64_t clock_ns(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

std::array<Table, 4> layout(size_t records, size_t for_ranks) {
  const size_t members = std::bit_ceil(8 * for_ranks + 1024);
  std::array<Table, 4> tables = {{{0, sizeof(Group), kGroups},
                                  {0, sizeof(Member), static_cast<uint32_t>(members)},
                                  {0, sizeof(Site), kSites},
                                  {0, sizeof(Record), static_cast<uint32_t>(records)}}};
  uint64_t offset = sizeof(Header);
  for (Table& table : tables) {
    table.offset = offset;
    offset += (uint64_t{table.entry_bytes} * table.entries + 4095) / 4096 * 4096;
  }
  return tables;
}

// Copy the end of a text, which identifies it better than its beginning. The copy begins with a whole UTF-8 character.
template <size_t N>
void copy_end(std::array<char, N>& to, std::string_view text) {
  size_t n = std::min(text.size(), N - 1);
  while (n > 0 && (static_cast<unsigned char>(text[text.size() - n]) & 0xc0) == 0x80) n--;
  std::copy_n(text.end() - static_cast<std::ptrdiff_t>(n), n, to.begin());
  to[n] = '\0';
}

uint32_t hash(std::string_view text) {
  const uint64_t h = std::hash<std::string_view>()(text);
  return static_cast<uint32_t>(h ^ (h >> 32)) | 1U;
}

void copy(Lateness& to, const Lateness& from) {
  to.times.store(from.times.load(std::memory_order_relaxed), std::memory_order_relaxed);
  to.ns.store(from.ns.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

// Add to a counter that only one thread writes, so that no atomic addition is needed.
void add(std::atomic<uint64_t>& counter, uint64_t n) {
  counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
}

}  // namespace

size_t Memory::bytes(size_t records, size_t members) {
  const Table last = layout(records, members)[3];
  return last.offset + uint64_t{last.entry_bytes} * last.entries;
}

Memory::Memory(const sys::Fd& fd, size_t records, const Identity& identity, bool is_file)
    : mapping_(fd, bytes(records, identity.members)),
      tables_(layout(records, identity.members)),
      allocated_(is_file ? 0 : UINT64_MAX) {
  if (!std::has_single_bit(records)) throw Error("the number of records of a recorder must be a power of two");
  if (is_file) {
    file_ = sys::Fd(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
    const int refused =
        file_.get() < 0 ? errno : posix_fallocate(file_.get(), 0, static_cast<off_t>(tables_[3].offset));
    if (refused != 0) throw Error(std::string("cannot allocate the file of a trace: ") + std::strerror(refused));
  } else {
    // If memory is short, this throws (since Linux 5.14). Without it, a later write would raise SIGBUS.
    sys::allocate_mapped(mapping_.data(), bytes(records, identity.members));
    std::memset(mapping_.data(), 0, bytes(records, identity.members));  // it may have data of a terminated process
  }
  Header& head = header();
  head.version = kVersion;
  head.pid = getpid();
  head.rank = identity.rank;
  head.world_size = identity.world_size;
  head.monotonic_ns = clock_ns(CLOCK_MONOTONIC);
  head.wall_ns = clock_ns(CLOCK_REALTIME);
  head.tables = tables_;
  copy_end(head.host, identity.host);
  order_writes();
  head.magic = kMagic;
}

void Memory::trim() {
  if (file_.get() < 0 || forks_ != sys::forks()) return;  // a forked child has no mapping, and the parent uses the file
  // Each thread that has just loaded file_ may still write one more record.
  constexpr uint64_t kMore = 256;
  const uint64_t used = header().records.load(std::memory_order_relaxed) + kMore;
  if (used >= std::min<uint64_t>(tables_[3].entries, allocated_.load())) return;
  // If the call fails, the file is only longer than necessary.
  std::ignore = ftruncate(file_.get(), static_cast<off_t>(tables_[3].offset + used * sizeof(Record)));
}

bool Memory::allocate(uint64_t index) {
  const std::lock_guard lock(allocating_);
  uint64_t done = allocated_.load(std::memory_order_relaxed);
  while (done < index) {
    const auto begin = static_cast<off_t>(tables_[3].offset + done * sizeof(Record));
    const uint64_t n = std::min<uint64_t>(kAllocatedAtOnce, tables_[3].entries - done);
    const int refused = posix_fallocate(file_.get(), begin, static_cast<off_t>(n * sizeof(Record)));
    if (refused == EINTR) continue;
    if (refused != 0) return false;
    done += n;
    // Release pairs with next(), which writes records without the lock.
    allocated_.store(done == tables_[3].entries ? UINT64_MAX : done, std::memory_order_release);
    if (done == tables_[3].entries) break;
  }
  return true;
}

void Memory::end_calls(size_t group, int64_t returned_ns) const {
  const uint64_t last = std::min(header().records.load(), allocated_.load());  // on a full disk, not all exist
  const uint64_t kept = std::min<uint64_t>({last, tables_[3].entries, kSearchedForOpen});
  for (uint64_t index = last - kept + 1; index <= last; index++) {
    Record& record = at<Record>(3, (index - 1) & (tables_[3].entries - 1));
    if (record.index.load(std::memory_order_acquire) != index || record.group != group || record.returned_ns != 0) {
      continue;
    }
    record.outcome = static_cast<uint8_t>(Kind::closed);
    record.returned_ns = returned_ns;
  }
}

void Memory::copy_tables(const Memory& other) {
  const size_t from = tables_[0].offset;
  std::memcpy(mapping_.data() + from, other.mapping_.data() + from, tables_[3].offset - from);
  header().groups.store(other.header().groups.load());
  header().members.store(other.header().members.load());
}

size_t Recorder::add_group(std::string_view name, std::string_view engine, int rank, const std::vector<int>& ranks) {
  const std::lock_guard lock(lock_);
  Header& head = memory_->header();
  // Entry 0 always stays free. The calls of groups that have no entry are counted there.
  uint32_t number = head.groups.load();
  if (number == 0) number = 1;
  if (number >= memory_->entries(0)) {
    // The table is full: reuse the entry of a closed group.
    number = 0;
    for (uint32_t g = 1; g < memory_->entries(0) && number == 0; g++) {
      if (memory_->group(g).state.load() == GroupState::closed) number = g;
    }
    if (number == 0) return 0;
  } else {
    head.groups.store(number + 1);
  }
  Group& group = memory_->group(number);
  const bool reused = group.state.load() == GroupState::closed;
  const uint32_t room = reused && group.first_member != kNoMembers ? static_cast<uint32_t>(group.size) : 0;
  const uint32_t first = room >= ranks.size() ? group.first_member : head.members.load();
  group.state.store(GroupState::free);
  copy_end(group.name, name);
  copy_end(group.engine, engine);
  group.rank = rank;
  group.size = static_cast<int32_t>(ranks.size());
  group.number.store(0);
  group.compared.store(0);
  group.shared.store(0);
  for (Totals& t : group.totals) {
    for (auto* counter : {&t.calls, &t.bytes, &t.ns, &t.waited_ns}) counter->store(0);
  }
  group.first_member = kNoMembers;
  if (first + ranks.size() <= memory_->entries(1)) {
    group.first_member = first;
    for (size_t r = 0; r < ranks.size(); r++) {
      Member& member = memory_->member(first + r);
      member.world_rank = ranks[r];
      for (Lateness* l : {&member.all, &member.at_window, &member.at_window_before}) {
        l->times.store(0);
        l->ns.store(0);
      }
    }
    if (first == head.members.load()) head.members.store(first + static_cast<uint32_t>(ranks.size()));
  }
  group.state.store(GroupState::open);
  if (Memory* const file = file_.load()) file->copy_tables(*memory_);
  return number;
}

void Recorder::close_group(size_t group) {
  const std::lock_guard lock(lock_);
  if (group == 0) return;
  memory_->group(group).state.store(GroupState::closed);
  // No thread will record the result of an asynchronous call that was never waited for.
  for (Memory* const memory : {memory_.get(), file_.load()}) {
    if (memory != nullptr) memory->end_calls(group, sys::now_ns());
  }
}

uint16_t Recorder::site(std::string_view text) {
  if (text.empty()) return 0;
  const uint32_t wanted = hash(text);
  const uint32_t entries = memory_->entries(2);
  const auto find = [&](bool to_add) -> uint16_t {
    for (uint32_t i = 0; i < 16; i++) {
      const uint32_t slot = (wanted + i) % entries;
      if (slot == 0) continue;
      Site& site = memory_->site(slot);
      const uint32_t found = site.hash.load(std::memory_order_acquire);
      if (found == wanted && site.there.load(std::memory_order_acquire) != 0) return static_cast<uint16_t>(slot);
      if (found == 0 && to_add) {
        copy_end(site.text, text);
        site.hash.store(wanted, std::memory_order_release);
        site.there.store(1, std::memory_order_release);
        if (Memory* const file = file_.load()) file->copy_tables(*memory_);
        return static_cast<uint16_t>(slot);
      }
      if (found == 0) return 0;
    }
    return 0;
  };
  // First without the lock, for known sites. Then again with it, because another thread may have added the site.
  if (const uint16_t slot = find(false)) return slot;
  const std::lock_guard lock(lock_);
  return find(true);
}

uint16_t Recorder::ask_site(Caller& caller) {
  const int64_t began = sys::now_ns();
  const uint16_t number = site(caller.where());
  const int64_t ended = sys::now_ns();
  // Limited, because the first lookup of a file name takes long, but only once.
  site_due_ns_.store(ended + std::min(kSiteShare * (ended - began), kSiteMostNs), std::memory_order_relaxed);
  return number;
}

void Recorder::count_last(size_t group, int rank, int64_t late_ns) {
  Group& g = memory_->group(group);
  if (g.first_member == kNoMembers || rank < 0 || rank >= g.size) return;
  add(g.compared, 1);
  Lateness& late = memory_->member(g.first_member + static_cast<uint32_t>(rank)).all;
  add(late.times, 1);
  add(late.ns, static_cast<uint64_t>(std::max<int64_t>(late_ns, 0)));
  if (g.compared.load(std::memory_order_relaxed) % kWindow != 0) return;
  for (int r = 0; r < g.size; r++) {
    Member& member = memory_->member(g.first_member + static_cast<uint32_t>(r));
    copy(member.at_window_before, member.at_window);
    copy(member.at_window, member.all);
  }
}

void Recorder::record_to(std::unique_ptr<Memory> file) {
  const std::lock_guard lock(lock_);
  if (file) file->copy_tables(*memory_);
  // The tables are copied once more, because they have changed since the file was opened.
  if (Memory* const before = file_.exchange(file.get())) {
    before->copy_tables(*memory_);
    before->trim();
  }
  if (file) files_.push_back(std::move(file));
}

}  // namespace allranks::trace
