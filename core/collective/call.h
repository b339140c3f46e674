// One collective under way, as the ranks of a host see it.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/waiting.h"
#include "channel/segment.h"

namespace allranks {

struct LocalCall {
  uint32_t number;  // of the calls on this host; about.call is the group's number
  Patience patience;
  Failure about;
  const std::string& site;
  int64_t entered_ns = 0;
  LastArrival arrival{};   // found when all ranks of the host have come; of the host, and then of all
  bool all_hosts = false;  // it is of all hosts
};

// What the ranks that have come to a call have brought.
struct Arrived {
  bool agree = true;  // all fingerprints do, and there are no call sites to compare
  int64_t met_ns = 0;
  int64_t before_last_ns = 0;
  int32_t last = 0;  // as a rank of the host

  // And others.
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

// What the leaders of groups make of all operands, so that the others read one line instead of one of each rank.
class Combining {
 public:
  virtual ~Combining() = default;
  // operands: by rank. The result has as many bytes as an operand.
  virtual void combine(std::byte* result, const void* const* operands) const = 0;
};

}  // namespace allranks
