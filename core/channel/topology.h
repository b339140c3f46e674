// Place of a process on its host, as the kernel reports it: the CPUs that it may use, and the caches and nodes that
// these CPUs share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace allranks {

struct Place {
  static constexpr size_t kCpus = 1024;  // as in cpu_set_t

  std::array<uint64_t, kCpus / 64> cpus{};  // bitmap of the CPUs that the process may use
  // The package, node and cache that all these CPUs share; -1: they do not share one, or it is not known.
  int32_t package = -1;
  int32_t node = -1;
  int32_t cache = -1;  // last-level cache, identified by the first CPU that uses it
};

// Read the place of the calling thread. root: the directory in which the kernel describes the CPUs.
Place read_place(const std::string& root = "/sys/devices/system");
// Return the place of the calling thread. Reads it again only if the set of CPUs has changed.
Place this_place();

// Return the place with the package, node and cache replaced: CPUs of one list are near each other (ALLRANKS_TOPOLOGY).
Place place_among(Place place, const std::vector<std::vector<int>>& lists);

// Parse a list of CPUs such as "0-3,8".
std::vector<int> parse_cpus(const std::string& list);

// Return whether these processes together may use fewer CPUs than there are processes.
bool is_crowded(const std::vector<Place>& places);

// Divide ranks into groups of at most `most` ranks that are near each other. The ranks of several caches of a node form
// one group if they fit into it. Groups are in the order of their first ranks, and the ranks of each in ascending
// order.
std::vector<std::vector<int>> near_ranks(const std::vector<Place>& places, size_t most);

}  // namespace allranks
