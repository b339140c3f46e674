// How the ranks of a host meet where they are many: by groups of ranks that are near each other.
//
// The first rank of a group is its leader. It waits for its group, then for the other leaders, and then releases its
// group. So a call costs a rank the reading of one line, and a leader that of as many as its group has ranks and the
// host has groups; without groups it costs every rank the reading of every rank's line. Leaders combine small operands,
// all in the order of ranks: the bits are those that every rank would have found by itself.
//
// Cost: three latencies, of which one is between groups. P ranks in G groups read P + 2 G G lines or fewer, all
// together; without groups P P.
#pragma once

#include <vector>

#include "channel/shm.h"
#include "collective/call.h"

namespace allranks {

class Levels {
 public:
  // What the ranks of a host have told of themselves decides; it is the same on all of them. Throws std::bad_alloc.
  Levels(Shm& shm, const std::vector<std::vector<int>>& groups);

  const std::vector<std::vector<int>>& groups() const { return groups_; }

  // This rank's line is written: waits for all others. nbytes: of each rank's operand in its line, if others read it.
  // Returns what all have brought. Throws Error.
  Arrived meet(LocalCall& call, size_t nbytes, const Combining* combining);
  // Where a rank's operand stands, and what the leaders have made of all; until the next call but one.
  const std::byte* operand(const LocalCall& call, int rank, size_t nbytes) const;
  const std::byte* combined(const LocalCall& call) const;

  // Where one rank has what all are to read: from whom this one reads it, and whether it passes it on to its group.
  int source(int root) const { return leads() || leader_of(root) == leader_ ? root : leader_; }
  bool relays(int root) const { return leads() && leader_of(root) != leader_ && group_.size() > 1; }

  // A step that every rank posts, and then waits for.
  void post_step(uint32_t done);
  void wait_step(LocalCall& call, uint32_t done);

 private:
  bool leads() const { return leader_ == shm_.rank(); }
  int leader_of(int rank) const { return where_[static_cast<size_t>(rank)].leader; }
  void lead(LocalCall& call, size_t nbytes, const Combining* combining);
  Arrived gather_group(const LocalCall& call, size_t nbytes);
  // Whom of these ranks, or of all, a call or step still waits for; -1: for nobody.
  template <class Ranks, class IsThere>
  int missing(const Ranks& ranks, size_t& next, IsThere&& is_there) const;
  bool is_at_step(int rank, uint32_t done) const;

  struct Where {
    int leader;
    size_t index;  // in the group
  };

  Shm& shm_;
  const std::vector<std::vector<int>> groups_;
  std::vector<int> group_;    // of this rank
  std::vector<int> leaders_;  // of all groups
  std::vector<Where> where_;  // by rank
  std::vector<int> all_;
  int leader_ = 0;
  std::vector<const void*> operands_;
};

}  // namespace allranks
