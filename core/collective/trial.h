// Measurement that selects the faster of two variants of an algorithm, if no rule can predict which one is faster.
//
// The first calls alternate between the variants. Each rank sends its duration of a call with its next call. All ranks
// choose by the slowest rank. They have the same numbers and therefore choose the same variant.
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
  // Return whether the ranks must exchange the duration of the last call in the next call.
  bool under_way() const { return calls_ <= kCalls; }
  // The value that this rank sends: nanoseconds per MiB.
  const uint64_t& duration() const { return duration_; }

  // Return the variant of this call, 0 or 1. durations: the values of all ranks, indexed by rank; empty after the
  // measurement has finished.
  size_t choose(const std::vector<uint64_t>& durations) {
    if (!under_way()) return chosen_;
    if (calls_ > 0) {
      uint64_t& best = best_[(calls_ - 1) % best_.size()];
      best = std::min(best, *std::ranges::max_element(durations));
    }
    chosen_ = calls_ < kCalls ? calls_ % best_.size() : best_[1] < best_[0] ? 1 : 0;
    calls_++;
    return chosen_;
  }

  void took(int64_t ns, size_t nbytes) {
    duration_ = static_cast<uint64_t>(std::max<int64_t>(ns, 0)) * 1024 / std::max<size_t>(nbytes >> 10, 1);
  }

 private:
  // Three calls of each variant. The best of the three counts; the median chose wrongly in five of six cases
  // (docs/decisions/123).
  static constexpr size_t kCalls = 6;

  size_t calls_ = 0;
  size_t chosen_ = 0;
  uint64_t duration_ = 0;
  std::array<uint64_t, 2> best_{std::numeric_limits<uint64_t>::max(), std::numeric_limits<uint64_t>::max()};
};

}  // namespace allranks
