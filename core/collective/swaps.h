// Debug mode: detects ranks that make equal calls in a different order.
//
// If two calls with the same fingerprint (verb, dtype, shape, ...) are swapped on one rank, the result is wrong without
// an error. Only the call sites differ. Different call sites for one call are legitimate (a branch on the rank), but
// then each call site belongs to one rank. Two equal calls are therefore reported as swapped if two ranks exchange
// their roles. In one call, rank i is at a call site and rank j is not; in the other call, rank j is at that call site
// and rank i is not.
#pragma once

#include <set>
#include <utility>
#include <vector>

#include "base/types.h"

namespace allranks {

class Swaps {
 public:
  // Record one call. calls: the fingerprints of all ranks, which agree. Returns two ranks that have swapped calls, or
  // (-1, -1). All ranks receive the same fingerprints and therefore return the same result.
  std::pair<int, int> see(const std::vector<Fingerprint>& calls);

 private:
  struct Alone {  // `rank` was at the call site of `call` while `other` was at another one
    Fingerprint call;
    int rank;
    int other;
    bool operator<(const Alone& b) const;
  };
  std::set<Alone> alone_;
};

}  // namespace allranks
