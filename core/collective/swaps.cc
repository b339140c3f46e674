#include "collective/swaps.h"

#include <algorithm>
#include <tuple>

namespace allranks {

namespace {
constexpr size_t kMost = 100'000;  // entries after which the history is cleared, which bounds the memory
}

bool Swaps::Alone::operator<(const Alone& b) const {
  const auto key = [](const Alone& x) {
    const Fingerprint& c = x.call;
    return std::tuple(c.site, x.rank, x.other, c.verb, c.dtype, c.op, c.root, c.count, c.shape);
  };
  return key(*this) < key(b);
}

std::pair<int, int> Swaps::see(const std::vector<Fingerprint>& calls) {
  std::pair<int, int> swapped{-1, -1};
  if (calls.front().verb == Verb::barrier) return swapped;  // swapped barriers do not change any data
  if (alone_.size() > kMost) alone_.clear();
  const int ranks = static_cast<int>(calls.size());
  for (int i = 0; i < ranks; i++) {
    for (int j = 0; j < ranks; j++) {
      const Fingerprint& call = calls[static_cast<size_t>(i)];
      if (call.site == calls[static_cast<size_t>(j)].site) continue;
      alone_.insert({call, i, j});
      if (swapped.first < 0 && alone_.contains({call, j, i})) swapped = std::minmax(i, j);
    }
  }
  return swapped;
}

}  // namespace allranks
