// A reduction between one rank of each of a few hosts, each of which speaks to all others.
//
// The operand is cut into a shard for each host. Each rank gets all others' operands of its own host's shard, reduces
// them in the order of the hosts, and gives the result to all, or to one. It goes in steps of one segment of each
// shard, so that a segment is reduced while the next are on their way. The caller drives the steps: those of a large
// call on several levels interleave with what is done on the other levels.
//
// Cost: 2 (H-1)/H n bytes over each rank's network, for the H hosts; two latencies.
#pragma once

#include <vector>

#include "channel/net.h"
#include "collective/call.h"
#include "collective/reduce.h"

namespace allranks {

class DirectReduction {
 public:
  // peers: by host, one of each. There is a kernel for the operation. root < 0: all get the result, in place of their
  // operand; else only that host's, and the others' operands stay as they are. ahead: the steps that are sent before
  // the first of them is reduced.
  DirectReduction(Net& net, LocalCall& call, const std::vector<int>& peers, Buffer operand, ReduceOp op, int root,
                  size_t ahead = 1);

  size_t steps() const { return steps_; }
  size_t slots_bytes() const;  // of memory for what comes
  size_t aside_bytes() const;  // of memory for a result that is not to be in place of the operand
  void lay_out(std::byte* slots, std::byte* aside);

  // Each in order; step s is reduced before step s + ahead + 1 is sent. What is lent is still to be settled by the
  // caller; until then neither the operand nor the memory may change.
  void send(size_t s);
  void reduce(size_t s);
  // All results are there. After the last step.
  void wait_results();

 private:
  size_t offset(size_t host, size_t s) const;
  size_t elements(size_t host, size_t s) const;
  size_t bytes(size_t host, size_t s) const { return elements(host, s) * element_; }
  std::byte* place(size_t host, size_t s) const { return operand_.bytes() + offset(host, s) * element_; }
  std::byte* slot(size_t host, size_t s) const;
  std::byte* result(size_t s) const { return stays_ ? aside_ + s * segment_ * element_ : place(here_, s); }
  uint64_t& ticket(size_t host, size_t s) { return tickets_[s % slots_of_host_ * peers_.size() + host]; }
  bool gets(size_t host) const { return root_ < 0 || root_ == static_cast<int>(host); }

  Net& net_;
  LocalCall& call_;
  const std::vector<int> peers_;
  const Buffer operand_;
  const Kernel kernel_;
  const int root_;
  const size_t here_;
  const size_t element_;
  const bool stays_;  // the operand
  size_t share_;      // elements of a shard
  size_t segment_;    // elements
  size_t steps_;
  size_t slots_of_host_;
  std::byte* slots_ = nullptr;
  std::byte* aside_ = nullptr;
  std::vector<uint64_t> tickets_;  // what net.wait_received takes: of operands, by step and host
  std::vector<uint64_t> results_;  // of the last results, by host
  std::vector<const void*> operands_;
};

}  // namespace allranks
