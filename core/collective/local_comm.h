// The communicator of the ranks that share this host: what the algorithms (algorithms/) see of a group.
//
// Every collective begins with arrive(), where the ranks compare what they call. Each rank then writes what others
// are to read into pieces of its ring (take), and counts the steps of a large call. Where the ranks are many they meet
// by groups (levels.h). A group on one host needs nothing else. A group that spans hosts has one LocalComm per host;
// inter_host_comm.h joins them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/types.h"
#include "base/waiting.h"
#include "channel/copier.h"
#include "channel/shm.h"
#include "channel/topology.h"
#include "collective/call.h"
#include "collective/levels.h"
#include "collective/shared.h"
#include "collective/swaps.h"

namespace allranks {

class LocalComm {
 public:
  // place: where this rank may run.
  explicit LocalComm(std::unique_ptr<Shm> shm, const Tuning& tuning = {}, const Place& place = this_place());
  LocalComm(const LocalComm&) = delete;

  // Among the ranks of this host.
  int rank() const { return shm_->rank(); }
  int size() const { return shm_->size(); }

  using Call = LocalCall;

  // The number of the next call.
  uint32_t next() { return ++calls_; }

  // Posts this rank's fingerprint, with up to CallLine::kInline bytes of payload, as many on every rank, and waits
  // for everybody's. Throws a mismatch, on every rank, unless all are equal. payload: nullptr where nobody reads it.
  void arrive(Call& call, const void* payload = nullptr, size_t nbytes = 0);
  // The payload of a rank that has arrived, until the next call but one.
  const std::byte* payload(const Call& call, int rank, size_t nbytes) {
    return levels_ ? levels_->operand(call, rank, nbytes) : shm_->call_line(rank, call.number).payload.data();
  }
  // The same, where `combining` makes of all payloads what every rank needs. Returns that; nullptr: each rank is to do
  // so itself.
  const std::byte* arrive_and_combine(Call& call, const void* payload, size_t nbytes, const Combining& combining);

  // The parts of arrive. Posts and waits; returns whether all fingerprints agree (and have no call sites
  // to compare). The payloads stand in the call lines.
  bool assemble(Call& call, const void* payload, size_t nbytes) { return meet(call, payload, nbytes, 0, nullptr); }
  std::vector<Fingerprint> fingerprints(const Call& call);
  // What is wrong with these, of all ranks; the same on every rank.
  std::optional<Error> judge(const Call& call, std::vector<Fingerprint> calls);

  // The next pieces of every rank's ring. Every rank of a call takes the same.
  struct Pieces {
    Shm* shm;
    uint64_t begin;
    size_t room;  // bytes of each
    bool small = false;

    std::byte* at(int rank, size_t piece = 0) const {
      const uint64_t position = begin + piece * room;
      return small ? shm->small_ring_at(rank, position) : shm->ring_at(rank, position);
    }
    // Of the first piece, in a rank's rings.
    size_t offset() const { return static_cast<size_t>(at(0) - shm->in_rings(0, 0)); }
  };
  Pieces take(size_t bytes, size_t pieces = 1);

  // After a mismatch that every rank has found: where each rank's call stands.
  std::vector<std::string> exchange_notes(Call& call);

  // As arrive, for an operand of which this rank's part is `data`. If every rank's lies in the same
  // shared block: the address of each rank's, by rank, as seen from here. Else empty.
  std::vector<std::byte*> arrive_at(Call& call, const void* data, size_t nbytes);
  // The end of a call whose ranks have worked in each other's memory.
  void depart(Call& call);

  // The pipeline of a large call. Between arrive and the end of the call all ranks do the same
  // number of steps; `base_step` is the count before the first. What all ranks post, all of them wait for.
  void post_step(uint32_t done);
  void wait_step_of_all(Call& call, uint32_t done);
  // Where ranks wait for one, or one for all.
  void post_step_to_any(uint32_t done);
  // origin: of what that rank passes on, which is named as long as it is the one that is late.
  void wait_step_of(Call& call, int rank, uint32_t done, int origin);
  void wait_step_of(Call& call, int rank, uint32_t done) { wait_step_of(call, rank, done, rank); }
  void wait_step_of_each(Call& call, uint32_t done);

  // The last collective that each rank has begun: the group's number of it.
  std::vector<std::pair<uint32_t, Fingerprint>> last_calls();

  std::unique_ptr<SharedBlock> share(uint64_t number, size_t bytes, const std::vector<sys::Fd>& parts) {
    return std::make_unique<SharedBlock>(blocks_, number, rank(), bytes, parts);
  }
  uint64_t shared_calls() const { return count_shared_.load(std::memory_order_relaxed); }

  Shm& shm() { return *shm_; }
  const Shm& shm() const { return *shm_; }
  Copier& copier() { return copier_; }
  uint32_t base_step = 0;

  // Of the group; in its first call the default, as nobody knows yet what the others have.
  const Tuning& tuning() const { return tuning_; }
  bool has_levels() const { return levels_.has_value(); }
  // By which the ranks of this host meet; none: all meet all.
  std::vector<std::vector<int>> groups() const { return levels_ ? levels_->groups() : std::vector<std::vector<int>>{}; }
  // Whose pieces this rank reads where one has the data, and whether it passes them on to its group.
  int source(int root) const { return levels_ ? levels_->source(root) : root; }
  bool relays(int root) const { return levels_ && levels_->relays(root); }

 private:
  bool all_at_step(uint32_t done);
  void find_levels();
  bool meet(Call& call, const void* payload, size_t nbytes, size_t read, const Combining* combining);
  Arrived meet_all(Call& call);
  void refuse_mismatch(Call& call);

  std::unique_ptr<Shm> shm_;
  Tuning tuning_;
  bool knows_all_ = false;  // what the others have told of themselves
  std::optional<Levels> levels_;
  uint32_t calls_ = 0;
  uint64_t ring_position_ = 0;
  uint64_t small_position_ = 0;
  Swaps swaps_;
  std::shared_ptr<SharedBlocks> blocks_ = sys::make_owned<SharedBlocks>();  // outlived by blocks
  Copier copier_;
  std::atomic<uint64_t> count_shared_ = 0;
};

}  // namespace allranks
