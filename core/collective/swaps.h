// Debug mode: notices that ranks make the same calls in a different order.
//
// Two calls that look alike (same verb, dtype, shape, ...) and are swapped on one rank give a wrong
// number and no error, because all ranks make equal calls. Only their place in the program differs.
// Ranks may make one call from different lines (a branch on the rank), but then each line belongs to one rank. It is
// suspicious if rank i was at a line while rank j was not and, in another such call, rank j was at that line while
// rank i was not.
#pragma once

#include <set>
#include <utility>
#include <vector>

#include "base/types.h"

namespace allranks {

class Swaps {
 public:
  // One call: each rank's fingerprint, which agree. Returns two ranks that have swapped calls, or
  // (-1, -1). All ranks see the same calls and so return the same.
  std::pair<int, int> see(const std::vector<Fingerprint>& calls);

 private:
  struct Alone {  // `rank` was at `site` while `other` was elsewhere
    Fingerprint call;
    int rank;
    int other;
    bool operator<(const Alone& b) const;
  };
  std::set<Alone> alone_;
};

}  // namespace allranks
