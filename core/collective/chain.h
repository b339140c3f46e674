// A reduction between one rank of each of many hosts, with two connections for each.
//
// The hosts stand in a chain, in their order. What the first has goes to the second, which adds its own and passes the
// partial result on; the last has the result, which comes back the same way. All goes in segments, so that all
// connections are busy at once, in both directions. Partial results are not rounded (reduce.h): the result has the same
// bits as if one kernel had taken all operands.
//
// Cost: n bytes to each neighbour at most, and two segments' time for each host.
#pragma once

#include <vector>

#include "channel/net.h"
#include "collective/call.h"
#include "collective/reduce.h"

namespace allranks {

class Chain {
 public:
  // peers: by host, one of each. There is a kernel for the operation. The operand is overwritten, with results or with
  // partial ones.
  Chain(Net& net, LocalCall& call, const std::vector<int>& peers, Buffer operand, ReduceOp op);

  // Elements that are to be reduced. Their results come to all hosts from the last to this one.
  void add(size_t begin, size_t count, int host);
  // Reduces all that was added. Returns when they may be used; what was lent is still to be settled, and until then
  // neither operand nor memory may change.
  void run(std::vector<std::byte>& memory);

 private:
  static constexpr size_t kAhead = 4;  // segments that may come before they are needed

  struct Segment {
    size_t begin;
    size_t count;
    int host;
    uint64_t result = 0;  // what net.wait_received takes
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
  std::vector<uint64_t> partial_;  // by segment: what net.wait_received takes

  std::byte* slots_ = nullptr;
  size_t room_ = 0;       // bytes of each
  size_t window_ = 1;     // partial results of another type that may be on their way
  size_t passed_on_ = 0;  // segments
  size_t passed_back_ = 0;
};

}  // namespace allranks
