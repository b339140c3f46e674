#include "collective/chain.h"

#include <algorithm>
#include <array>

namespace allranks {

namespace {

constexpr size_t kMost = 128 << 10;  // maximum bytes of a segment
constexpr size_t kLeast = 16 << 10;  // minimum bytes of a segment
constexpr size_t kSegments = 16;     // number of segments of an operand between 16 * kLeast and 16 * kMost
constexpr size_t kWindow = 32;       // minimum number of segments for which there are slots

}  // namespace

Chain::Chain(Net& net, LocalCall& call, const std::vector<int>& peers, Buffer operand, ReduceOp op)
    : net_(net),
      call_(call),
      operand_(operand),
      ranks_(net.hosts().ranks()),
      hosts_(net.hosts().count()),
      here_(net.hosts().of(net.rank())),
      partials_(partials_of(operand.dtype)),
      partly_(kernel_for(partials_.dtype, partial_op(op))),
      finally_(kernel_for(partials_.dtype, op)) {
  if (here_ > 0) before_ = peers[static_cast<size_t>(here_) - 1];
  if (here_ + 1 < hosts_) after_ = peers[static_cast<size_t>(here_) + 1];
}

void Chain::add(size_t begin, size_t count, int host) {
  const size_t element = size_of(operand_.dtype);
  const size_t bytes = std::clamp(operand_.nbytes() / kSegments, kLeast, kMost);
  const size_t segment = std::max<size_t>(bytes / 64 * 64 / element, 1);
  for (size_t at = 0; at < count; at += segment) {
    segments_.push_back({.begin = begin + at, .count = std::min(segment, count - at), .host = host});
  }
}

// Lay out the memory: kAhead slots for received partial results, one slot for a converted operand, and window_ slots
// for outgoing partial results. The outgoing slots exist only if partial results have another type than the operand. An
// outgoing slot may be reused when the result of its segment has returned: this shows that the next host has read the
// slot.
void Chain::lay_out(std::vector<std::byte>& memory) {
  room_ = 0;
  for (const Segment& segment : segments_) room_ = std::max(room_, (partial_bytes(segment) + 63) / 64 * 64);
  const bool all_come_back = std::all_of(segments_.begin(), segments_.end(), [&](auto& s) { return comes_back(s); });
  window_ = std::max<size_t>(segments_.size(), 1);
  if (all_come_back) window_ = std::min(window_, std::max(kWindow, 4 * static_cast<size_t>(hosts_)));
  const bool converts = partials_.widen != nullptr && after_ >= 0;
  memory.resize(std::max(memory.size(), (kAhead + 1 + (converts ? window_ : 0)) * room_));
  slots_ = memory.data();
}

void Chain::await_partial(size_t s) {
  if (before_ >= 0 && s < segments_.size()) {
    partial_.push_back(net_.borrow(before_, slot(s), partial_bytes(segments_[s])));
  }
}

// Add the operand of this host to a received partial result, and forward it. The last host has the result.
void Chain::pass_on(size_t s) {
  Segment& segment = segments_[s];
  std::byte* result = own(segment);
  const void* mine = result;
  if (partials_.widen != nullptr) {
    std::byte* wide = slots_ + kAhead * room_;
    result = after_ >= 0 ? outgoing(s) : wide;
    partials_.widen(before_ >= 0 ? wide : result, mine, segment.count);
    mine = wide;
  }
  if (before_ >= 0) {
    const std::array<const void*, 2> operands{slot(s), mine};
    (after_ >= 0 ? partly_ : finally_)(result, operands.data(), 2, segment.count, ranks_);
    await_partial(s + kAhead);
  }
  if (after_ < 0) {
    if (partials_.narrow != nullptr) partials_.narrow(own(segment), result, segment.count);
    return pass_back(segment);
  }
  net_.lend(after_, result, partial_bytes(segment));
  // The result may overwrite the lent operand: it can arrive only after the next host has read the operand.
  if (comes_back(segment)) {
    segment.result = net_.borrow(after_, own(segment), segment.count * size_of(operand_.dtype));
  }
}

void Chain::pass_back(const Segment& segment) {
  if (segment.host < here_) net_.lend(before_, own(segment), segment.count * size_of(operand_.dtype));
}

bool Chain::may_pass_on(size_t s) const {
  return s < segments_.size() && (partials_.widen == nullptr || s < window_ + passed_back_);
}

void Chain::run(std::vector<std::byte>& memory) {
  lay_out(memory);
  for (size_t s = 0; s < kAhead; s++) await_partial(s);
  while (passed_back_ < segments_.size()) {
    if (passed_back_ < passed_on_ && !comes_back(segments_[passed_back_])) {
      passed_back_++;
      continue;
    }
    const bool on = may_pass_on(passed_on_);
    const bool back = passed_back_ < passed_on_;
    const Net::Awaited partial{on ? before_ : -1, on && before_ >= 0 ? partial_[passed_on_] : 0};
    const Net::Awaited result{back ? after_ : -1, back ? segments_[passed_back_].result : 0};
    const bool begins = on && before_ < 0;
    if (!begins) net_.wait_received(call_.patience, call_.about, partial, result);
    if (back && net_.has_come(after_, result.until)) pass_back(segments_[passed_back_++]);
    if (begins || (on && net_.has_come(before_, partial.until))) pass_on(passed_on_++);
  }
}

}  // namespace allranks
