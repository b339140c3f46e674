// State of one running collective, within one host.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/waiting.h"
#include "channel/segment.h"

namespace allranks {

struct LocalCall {
  uint32_t number;  // counts the calls on this host; about.call is the number of the call in the group
  Patience patience;
  Failure about;
  const std::string& site;
  int64_t entered_ns = 0;
  LastArrival arrival{};   // known when all ranks of the host have arrived: first for the host, later for all hosts
  bool all_hosts = false;  // `arrival` covers all hosts
};

// Summary of the ranks that have arrived in a call.
struct Arrived {
  bool agree = true;  // all fingerprints are equal, and there are no call sites to compare
  int64_t met_ns = 0;
  int64_t before_last_ns = 0;
  int32_t last = 0;  // the rank within the host that arrived last

  // Merge the summary of further ranks.
  void add(const Arrived& more) {
    agree = agree && more.agree;
    if (more.met_ns > met_ns) {
      before_last_ns = met_ns > more.before_last_ns ? met_ns : more.before_last_ns;
      met_ns = more.met_ns;
      last = more.last;
    } else if (more.met_ns > before_last_ns) {
      before_last_ns = more.met_ns;
    }
  }
};

// Function that combines the operands of all ranks. The leaders of groups call it, so that the other ranks read one
// line instead of the line of every rank.
class Combining {
 public:
  virtual ~Combining() = default;
  // operands: indexed by rank. The result has the size of one operand.
  virtual void combine(std::byte* result, const void* const* operands) const = 0;
};

}  // namespace allranks
