#include "collective/direct_reduction.h"

#include <algorithm>

namespace allranks {

namespace {

constexpr size_t kSegment = 256 << 10;  // bytes that a host reduces while the next bytes are in transit

}  // namespace

DirectReduction::DirectReduction(Net& net, LocalCall& call, const std::vector<int>& peers, Buffer operand, ReduceOp op,
                                 int root, size_t ahead)
    : net_(net),
      call_(call),
      peers_(peers),
      operand_(operand),
      kernel_(kernel_for(operand.dtype, op)),
      root_(root),
      here_(static_cast<size_t>(net.hosts().of(net.rank()))),
      element_(size_of(operand.dtype)),
      stays_(root >= 0 && root != static_cast<int>(here_)),
      results_(peers.size()),
      operands_(peers.size()) {
  const size_t line = 64 / element_;
  share_ = ((operand.count + peers.size() - 1) / peers.size() + line - 1) / line * line;
  segment_ = kSegment / element_;
  steps_ = (std::min(share_, operand.count) + segment_ - 1) / segment_;
  slots_of_host_ = std::min(ahead + 1, std::max<size_t>(steps_, 1));
  tickets_.resize(slots_of_host_ * peers.size());
}

size_t DirectReduction::slots_bytes() const { return slots_of_host_ * peers_.size() * segment_ * element_; }

size_t DirectReduction::aside_bytes() const { return stays_ ? share_ * element_ : 0; }

void DirectReduction::lay_out(std::byte* slots, std::byte* aside) {
  slots_ = slots;
  aside_ = aside;
}

size_t DirectReduction::offset(size_t host, size_t s) const {
  return std::min(host * share_, operand_.count) + s * segment_;
}

size_t DirectReduction::elements(size_t host, size_t s) const {
  const size_t end = std::min((host + 1) * share_, operand_.count);
  return end > offset(host, s) ? std::min(segment_, end - offset(host, s)) : 0;
}

std::byte* DirectReduction::slot(size_t host, size_t s) const {
  return slots_ + (s % slots_of_host_ * peers_.size() + host) * segment_ * element_;
}

void DirectReduction::send(size_t s) {
  for (size_t h = 0; h < peers_.size(); h++) {
    if (h == here_) continue;
    net_.lend(peers_[h], place(h, s), bytes(h, s));
    ticket(h, s) = net_.borrow(peers_[h], slot(h, s), bytes(here_, s));
  }
}

void DirectReduction::reduce(size_t s) {
  for (size_t h = 0; h < peers_.size(); h++) {
    operands_[h] = h == here_ ? place(h, s) : slot(h, s);
    if (h != here_) net_.wait_received(call_.patience, call_.about, peers_[h], ticket(h, s));
  }
  if (elements(here_, s) > 0) {
    kernel_(result(s), operands_.data(), static_cast<int>(peers_.size()), elements(here_, s), net_.hosts().ranks());
  }
  for (size_t h = 0; h < peers_.size(); h++) {
    if (h == here_) continue;
    if (gets(h)) net_.lend(peers_[h], result(s), bytes(here_, s));
    if (gets(here_)) results_[h] = net_.borrow(peers_[h], place(h, s), bytes(h, s));
  }
}

void DirectReduction::wait_results() {
  for (size_t h = 0; h < peers_.size(); h++) {
    if (h != here_) net_.wait_received(call_.patience, call_.about, peers_[h], results_[h]);
  }
}

}  // namespace allranks
