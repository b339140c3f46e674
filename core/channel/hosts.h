// The hosts of a group's ranks. Ranks that share a host use shared memory, other pairs of ranks use connections.
#pragma once

#include <algorithm>
#include <vector>

namespace allranks {

// Hosts are numbered in the order of their first ranks. The ranks of a host are in ascending order; the first one is
// the leader.
class Hosts {
 public:
  // host_of[r]: an arbitrary number that identifies the host of rank r.
  explicit Hosts(const std::vector<int>& host_of) : of_(host_of.size()), place_(host_of.size()) {
    std::vector<int> seen;
    for (size_t r = 0; r < host_of.size(); r++) {
      const auto at = std::find(seen.begin(), seen.end(), host_of[r]);
      const auto host = static_cast<size_t>(at - seen.begin());
      if (at == seen.end()) {
        seen.push_back(host_of[r]);
        members_.emplace_back();
      }
      of_[r] = static_cast<int>(host);
      place_[r] = static_cast<int>(members_[host].size());
      members_[host].push_back(static_cast<int>(r));
    }
  }

  int ranks() const { return static_cast<int>(of_.size()); }
  int count() const { return static_cast<int>(members_.size()); }
  int of(int rank) const { return of_[static_cast<size_t>(rank)]; }
  int place(int rank) const { return place_[static_cast<size_t>(rank)]; }  // index among the ranks of its host
  const std::vector<int>& on(int host) const { return members_[static_cast<size_t>(host)]; }
  int leader(int host) const { return on(host).front(); }
  bool even() const {
    return std::all_of(members_.begin(), members_.end(),
                       [this](const auto& ranks) { return ranks.size() == members_.front().size(); });
  }

 private:
  std::vector<int> of_;
  std::vector<int> place_;
  std::vector<std::vector<int>> members_;
};

}  // namespace allranks
