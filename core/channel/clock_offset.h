// Offset of another host's clock: how far it is ahead of this host's clock. Both are CLOCK_MONOTONIC, which counts from
// the boot of the host.
//
// Every round trip gives bounds. A ping is sent here at s, the other host reads its clock at t, and the answer arrives
// here at r. The offset is then between t - r and t - s. The bounds of all round trips are intersected. Earlier bounds
// widen with time, because clocks drift. The error is therefore known: half the sum of the shortest delays in each
// direction. The idea is that of Marzullo's algorithm (1984), which NTP uses to select servers.
#pragma once

#include <algorithm>
#include <cstdint>

namespace allranks {

class ClockOffset {
 public:
  static constexpr int64_t kUnknownNs = INT64_MAX / 8;
  static constexpr int64_t kLatestNs = INT64_MAX / 8;  // a larger time is invalid; sums of valid times do not overflow

  struct Estimate {
    int64_t ns;  // how far the other clock is ahead
    int64_t error_ns;
  };

  // Add a round trip: sent here, time of the other host, received here.
  void add(int64_t sent_ns, int64_t theirs_ns, int64_t received_ns) {
    int64_t low = theirs_ns - received_ns;
    int64_t high = theirs_ns - sent_ns;
    if (measured_ns_ != 0) {
      const int64_t drift = drift_until(received_ns);
      low = std::max(low, low_ns_ - drift);
      high = std::min(high, high_ns_ + drift);
      // No intersection: a host was suspended, or its clock drifts more than kDrift. Discard the earlier bounds.
      if (low > high) {
        low = theirs_ns - received_ns;
        high = theirs_ns - sent_ns;
      }
    }
    low_ns_ = low;
    high_ns_ = high;
    measured_ns_ = received_ns;
  }

  Estimate at(int64_t now_ns) const {
    if (measured_ns_ == 0) return {0, kUnknownNs};
    return {low_ns_ + (high_ns_ - low_ns_) / 2, (high_ns_ - low_ns_) / 2 + drift_until(now_ns)};
  }

 private:
  static constexpr int64_t kDrift = 20'000;  // 1 / drift: 50 ppm, for two clocks that NTP or a crystal controls

  int64_t drift_until(int64_t now_ns) const { return std::max<int64_t>(now_ns - measured_ns_, 0) / kDrift; }

  int64_t low_ns_ = 0;
  int64_t high_ns_ = 0;
  int64_t measured_ns_ = 0;  // 0: never
};

}  // namespace allranks
