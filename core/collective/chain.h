// A reduction between many hosts: one rank of each host takes part, with two connections.
//
// The hosts form a chain in their order. The first host sends its operand to the second. Each further host adds its
// operand and forwards the partial result. The last host has the result, which returns along the same path. The data
// moves in segments, so that all connections are busy simultaneously, in both directions. Partial results are not
// rounded (reduce.h). The result therefore has the same bits as if one kernel had combined all operands.
//
// Cost: at most n bytes to each neighbor, and the time of two segments for each host.
#pragma once

#include <vector>

#include "channel/net.h"
#include "collective/call.h"
#include "collective/reduce.h"

namespace allranks {

class Chain {
 public:
  // peers: one rank of each host, indexed by host. A kernel for dtype and op must exist. The operand is overwritten
  // with results or partial results.
  Chain(Net& net, LocalCall& call, const std::vector<int>& peers, Buffer operand, ReduceOp op);

  // Add elements to reduce. Their results return from the last host to `host`, and to every host in between.
  void add(size_t begin, size_t count, int host);
  // Reduce all added elements. Returns when the results may be read. The caller must then settle the lent bytes
  // (Net::settle). Until then neither the operand nor `memory` may change.
  void run(std::vector<std::byte>& memory);

 private:
  static constexpr size_t kAhead = 4;  // segments that may arrive before they are needed

  struct Segment {
    size_t begin;
    size_t count;
    int host;
    uint64_t result = 0;  // ticket of the result, for net.wait_received
  };

  void lay_out(std::vector<std::byte>& memory);
  void await_partial(size_t s);
  void pass_on(size_t s);
  void pass_back(const Segment& segment);
  bool comes_back(const Segment& segment) const { return after_ >= 0 && segment.host <= here_; }
  bool may_pass_on(size_t s) const;
  std::byte* own(const Segment& segment) const { return operand_.bytes() + segment.begin * size_of(operand_.dtype); }
  std::byte* slot(size_t s) const { return slots_ + s % kAhead * room_; }
  std::byte* outgoing(size_t s) const { return slots_ + (kAhead + 1 + s % window_) * room_; }
  size_t partial_bytes(const Segment& segment) const { return segment.count * size_of(partials_.dtype); }

  Net& net_;
  LocalCall& call_;
  const Buffer operand_;
  const int ranks_;
  const int hosts_;
  int here_;
  int before_ = -1;
  int after_ = -1;
  const Partials partials_;
  const Kernel partly_;
  const Kernel finally_;
  std::vector<Segment> segments_;
  std::vector<uint64_t> partial_;  // by segment: ticket of the partial result, for net.wait_received

  std::byte* slots_ = nullptr;
  size_t room_ = 0;       // bytes per slot
  size_t window_ = 1;     // converted partial results that may be in transit
  size_t passed_on_ = 0;  // segments
  size_t passed_back_ = 0;
};

}  // namespace allranks
