// A reduction between a few hosts: one rank of each host takes part, and each communicates with all others.
//
// The operand is divided into one shard per host. Each rank receives the operands of its own host's shard and reduces
// them in the order of the hosts. It sends the result to all ranks or to one. Each step moves one segment of each
// shard, so that a segment is reduced while the next segments are in transit. The caller drives the steps. In a large
// call on several levels, they interleave with the steps of the other levels.
//
// Cost: 2 (H-1)/H n bytes over each rank's network, for H hosts; two latencies.
#pragma once

#include <vector>

#include "channel/net.h"
#include "collective/call.h"
#include "collective/reduce.h"

namespace allranks {

class DirectReduction {
 public:
  // peers: one rank of each host, indexed by host. A kernel for dtype and op must exist. root: the host that receives
  // the result, in place of its operand; the operands of the other hosts stay unchanged. root < 0: all hosts receive
  // the result. ahead: the number of steps that are sent before the first of them is reduced.
  DirectReduction(Net& net, LocalCall& call, const std::vector<int>& peers, Buffer operand, ReduceOp op, int root,
                  size_t ahead = 1);

  size_t steps() const { return steps_; }
  size_t slots_bytes() const;  // memory for received operands
  size_t aside_bytes() const;  // memory for the result if it must not replace the operand
  void lay_out(std::byte* slots, std::byte* aside);

  // Call both for each step, in order. Step s must be reduced before step s + ahead + 1 is sent, because both use the
  // same slots. The caller must settle the lent bytes (Net::settle). Until then neither the operand nor the memory may
  // change.
  void send(size_t s);
  void reduce(size_t s);
  // Wait until all results have arrived. Call it after the last step.
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
  const bool stays_;  // the operand must stay unchanged
  size_t share_;      // elements of a shard
  size_t segment_;    // elements of a segment
  size_t steps_;
  size_t slots_of_host_;
  std::byte* slots_ = nullptr;
  std::byte* aside_ = nullptr;
  std::vector<uint64_t> tickets_;  // tickets of received operands for net.wait_received, by step and host
  std::vector<uint64_t> results_;  // tickets of the last results, by host
  std::vector<const void*> operands_;
};

}  // namespace allranks
