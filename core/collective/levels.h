// Synchronization of many ranks of one host, in groups of ranks that share a cache or a node.
//
// The first rank of a group is its leader. It waits for its group, then for the other leaders, and then releases its
// group. In each call a rank reads one line. A leader reads one line per rank of its group and one per group. Without
// groups every rank reads the line of every rank. Leaders combine small operands, in the order of the ranks. The result
// therefore has the same bits as without groups.
//
// Cost: three latencies, one of them between groups. P ranks in G groups together read at most P + 2 G G lines; without
// groups P P.
#pragma once

#include <vector>

#include "channel/shm.h"
#include "collective/call.h"

namespace allranks {

class Levels {
 public:
  // groups: the ranks of each group. They result from the exchanged topology, so they are identical on all ranks.
  // Throws std::bad_alloc.
  Levels(Shm& shm, const std::vector<std::vector<int>>& groups);

  const std::vector<std::vector<int>>& groups() const { return groups_; }

  // Wait until all ranks have arrived. The call line of this rank must be written before. nbytes: bytes of each rank's
  // operand in its call line; 0 if no other rank reads it. Returns the summary of all ranks. Throws Error.
  Arrived meet(LocalCall& call, size_t nbytes, const Combining* combining);
  // Return the address of a rank's operand, and of the combined operands. Both stay valid until the call after the next
  // one.
  const std::byte* operand(const LocalCall& call, int rank, size_t nbytes) const;
  const std::byte* combined(const LocalCall& call) const;

  // If all ranks read data of a root: the rank that this rank reads from, and whether this rank forwards the data to
  // its group.
  int source(int root) const { return leads() || leader_of(root) == leader_ ? root : leader_; }
  bool relays(int root) const { return leads() && leader_of(root) != leader_ && group_.size() > 1; }

  // Post a step, and wait until all ranks have posted it.
  void post_step(uint32_t done);
  void wait_step(LocalCall& call, uint32_t done);

 private:
  bool leads() const { return leader_ == shm_.rank(); }
  int leader_of(int rank) const { return where_[static_cast<size_t>(rank)].leader; }
  void lead(LocalCall& call, size_t nbytes, const Combining* combining);
  Arrived gather_group(const LocalCall& call, size_t nbytes);
  // Return the first of `ranks` that is still missing in a call or step, as a rank of the group; -1: none. `next` is
  // the index at which the search continues, so a rank that has arrived is not checked again.
  template <class Ranks, class IsThere>
  int missing(const Ranks& ranks, size_t& next, IsThere&& is_there) const;
  bool is_at_step(int rank, uint32_t done) const;

  struct Where {
    int leader;
    size_t index;  // position in the group
  };

  Shm& shm_;
  const std::vector<std::vector<int>> groups_;
  std::vector<int> group_;    // the group of this rank
  std::vector<int> leaders_;  // the leaders of all groups
  std::vector<Where> where_;  // by rank
  std::vector<int> all_;
  int leader_ = 0;
  std::vector<const void*> operands_;
};

}  // namespace allranks
