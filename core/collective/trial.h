// Which of two ways to do the same is faster here, where that cannot be told beforehand.
//
// The first calls take the ways in turn. Each rank tells the others how long it took, along with its next call, and all
// choose by the slowest rank. So all have the same numbers, and choose the same.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace allranks {

class Trial {
 public:
  // Whether the next call's ranks are to tell each other what the last one took.
  bool under_way() const { return calls_ <= kCalls; }
  // What this rank tells: nanoseconds for a MiB.
  const uint64_t& told() const { return told_; }

  // What all have told, by rank; empty once it is over. Returns the way of this call: 0 or 1.
  size_t choose(const std::vector<uint64_t>& told) {
    if (!under_way()) return chosen_;
    if (calls_ > 0) {
      uint64_t& best = best_[(calls_ - 1) % best_.size()];
      best = std::min(best, *std::ranges::max_element(told));
    }
    chosen_ = calls_ < kCalls ? calls_ % best_.size() : best_[1] < best_[0] ? 1 : 0;
    calls_++;
    return chosen_;
  }

  void took(int64_t ns, size_t nbytes) {
    told_ = static_cast<uint64_t>(std::max<int64_t>(ns, 0)) * 1024 / std::max<size_t>(nbytes >> 10, 1);
  }

 private:
  static constexpr size_t kCalls = 6;

  size_t calls_ = 0;
  size_t chosen_ = 0;
  uint64_t told_ = 0;
  std::array<uint64_t, 2> best_{std::numeric_limits<uint64_t>::max(), std::numeric_limits<uint64_t>::max()};
};

}  // namespace allranks
