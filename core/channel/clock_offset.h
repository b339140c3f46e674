// How far the clock of another host is ahead of this host's. Both are CLOCK_MONOTONIC, which counts from the start of
// the host.
//
// Every round trip gives bounds: what was sent here at s, was there at t and came back here at r, proves that the
// difference is between t - r and t - s. The bounds of all round trips are intersected. Those of earlier ones get wider
// with time, as clocks drift. So the error is half of the shortest ways there and back, and known. The idea is that of
// Marzullo's algorithm (1984), which NTP uses to select servers.
#pragma once

#include <algorithm>
#include <cstdint>

namespace allranks {

class ClockOffset {
 public:
  static constexpr int64_t kUnknownNs = INT64_MAX / 8;
  static constexpr int64_t kLatestNs = INT64_MAX / 8;  // no clock shows more

  struct Estimate {
    int64_t ns;  // the other clock is so far ahead
    int64_t error_ns;
  };

  // A round trip: sent here, seen there, received here.
  void add(int64_t sent_ns, int64_t theirs_ns, int64_t received_ns) {
    int64_t low = theirs_ns - received_ns;
    int64_t high = theirs_ns - sent_ns;
    if (measured_ns_ != 0) {
      const int64_t drift = drift_until(received_ns);
      low = std::max(low, low_ns_ - drift);
      high = std::min(high, high_ns_ + drift);
      if (low > high) {  // a host was suspended, or its clock drifts more than any that is in order
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
  static constexpr int64_t kDrift = 20'000;  // one part in so many, 50 ppm: of two clocks that NTP or a crystal keeps

  int64_t drift_until(int64_t now_ns) const { return std::max<int64_t>(now_ns - measured_ns_, 0) / kDrift; }

  int64_t low_ns_ = 0;
  int64_t high_ns_ = 0;
  int64_t measured_ns_ = 0;  // 0: never
};

}  // namespace allranks
