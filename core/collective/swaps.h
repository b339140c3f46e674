// Debug mode: notices that ranks make the same calls in a different order.
//
// Two calls that look alike (same verb, dtype, shape, ...) and are swapped on one rank give a wrong
// number and no error, because each rank finds the others calling what it calls itself. What tells
// them apart is where in the program they stand. Ranks may well make one call from different lines (a
// branch on the rank), but then each line is one rank's: it is suspicious that rank i was at a line
// when rank j was elsewhere and, in another such call, rank j was at that line when rank i was not.
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
