// The communicator of the ranks of one host: the part of a group that the algorithms (algorithms/) access.
//
// Every collective begins with arrive(), in which the ranks compare their fingerprints. Each rank then writes its data
// for other ranks into chunks of its ring (take), and counts the steps of a large call. Many ranks synchronize in
// groups (levels.h). A group on one host needs only a LocalComm. A group that spans hosts has one LocalComm per host;
// inter_host_comm.h connects them.
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
  // place: the CPUs on which this rank may run, and their caches and nodes.
  explicit LocalComm(std::unique_ptr<Shm> shm, const Tuning& tuning = {}, const Place& place = this_place());
  LocalComm(const LocalComm&) = delete;

  // Rank and number of ranks within this host.
  int rank() const { return shm_->rank(); }
  int size() const { return shm_->size(); }

  using Call = LocalCall;

  // Return the number of the next call.
  uint32_t next() { return ++calls_; }

  // Post the fingerprint of this rank with a payload, and wait until all ranks have posted. The payload has up to
  // CallLine::kInline bytes; nbytes is the same on every rank. payload: nullptr if no rank reads it. Throws a mismatch
  // on every rank unless all fingerprints are equal.
  void arrive(Call& call, const void* payload = nullptr, size_t nbytes = 0);
  // Return the payload of a rank that has arrived. It stays valid until the call after the next one.
  const std::byte* payload(const Call& call, int rank, size_t nbytes) {
    return levels_ ? levels_->operand(call, rank, nbytes) : shm_->call_line(rank, call.number).payload.data();
  }
  // Same as arrive, but the leaders of groups combine the payloads. Returns the combined payload. nullptr: there are no
  // groups, so each rank must combine the payloads itself.
  const std::byte* arrive_and_combine(Call& call, const void* payload, size_t nbytes, const Combining& combining);

  // The steps of arrive, for InterHostComm. assemble posts and waits, and returns whether all fingerprints agree and
  // have no call sites to compare. The payloads are in the call lines.
  bool assemble(Call& call, const void* payload, size_t nbytes) { return meet(call, payload, nbytes, 0, nullptr); }
  std::vector<Fingerprint> fingerprints(const Call& call);
  // Return the mismatch between the fingerprints of all ranks, if there is one. The result is the same on every rank.
  std::optional<Error> judge(const Call& call, std::vector<Fingerprint> calls);

  // The next chunks of every rank's ring. All ranks must take the same chunks, because positions are never sent.
  struct Pieces {
    Shm* shm;
    uint64_t begin;
    size_t room;  // bytes per chunk
    bool small = false;

    std::byte* at(int rank, size_t piece = 0) const {
      const uint64_t position = begin + piece * room;
      return small ? shm->small_ring_at(rank, position) : shm->ring_at(rank, position);
    }
    // Offset of the first chunk from the start of a rank's rings.
    size_t offset() const { return static_cast<size_t>(at(0) - shm->in_rings(0, 0)); }
  };
  Pieces take(size_t bytes, size_t pieces = 1);

  // Return the call site of each rank, after a mismatch that every rank has detected. Throws Error.
  std::vector<std::string> exchange_notes(Call& call);

  // Same as arrive, for an operand at `data`. If the operands of all ranks are in the same shared block, returns their
  // addresses in this process, indexed by rank. Otherwise returns an empty vector.
  std::vector<std::byte*> arrive_at(Call& call, const void* data, size_t nbytes);
  // Wait until all ranks have finished a call in which they accessed the memory of other ranks. Without this wait a
  // rank could change its tensor while another rank reads it.
  void depart(Call& call);

  // The pipeline of a large call. Between arrive and the end of the call, all ranks do the same number of steps.
  // `base_step` is the count before the first step. Use post_step only for steps that all ranks wait for with
  // wait_step_of_all: only the last rank to post wakes the others.
  void post_step(uint32_t done);
  void wait_step_of_all(Call& call, uint32_t done);
  // For steps that some ranks wait for with wait_step_of or wait_step_of_each: every post wakes the waiting ranks.
  void post_step_to_any(uint32_t done);
  // Wait for a step of `rank`, which forwards data of `origin`. As long as `origin` is late, errors name `origin`.
  void wait_step_of(Call& call, int rank, uint32_t done, int origin);
  void wait_step_of(Call& call, int rank, uint32_t done) { wait_step_of(call, rank, done, rank); }
  void wait_step_of_each(Call& call, uint32_t done);

  // Return the last collective that each rank has begun, with its number in the group.
  std::vector<std::pair<uint32_t, Fingerprint>> last_calls();

  std::unique_ptr<SharedBlock> share(uint64_t number, size_t bytes, const std::vector<sys::Fd>& parts) {
    return std::make_unique<SharedBlock>(blocks_, number, rank(), bytes, parts);
  }
  // relaxed: a counter for statistics, which orders no other data.
  uint64_t shared_calls() const { return count_shared_.load(std::memory_order_relaxed); }

  Shm& shm() { return *shm_; }
  const Shm& shm() const { return *shm_; }
  Copier& copier() { return copier_; }
  uint32_t base_step = 0;

  // Tuning of the group. In the first call it is the default, because the table of rank 0 is not known yet.
  const Tuning& tuning() const { return tuning_; }
  bool has_levels() const { return levels_.has_value(); }
  // Return the groups in which the ranks of this host synchronize. Empty: there are no groups.
  std::vector<std::vector<int>> groups() const { return levels_ ? levels_->groups() : std::vector<std::vector<int>>{}; }
  // If a root has the data: the rank whose ring this rank reads, and whether this rank forwards the data to its group.
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
  bool knows_all_ = false;  // the topology and tuning of all ranks have been read
  std::optional<Levels> levels_;
  uint32_t calls_ = 0;
  uint64_t ring_position_ = 0;
  uint64_t small_position_ = 0;
  Swaps swaps_;
  std::shared_ptr<SharedBlocks> blocks_ = sys::make_owned<SharedBlocks>();  // shared, because blocks may outlive this
  Copier copier_;
  std::atomic<uint64_t> count_shared_ = 0;
};

}  // namespace allranks
