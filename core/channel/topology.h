// Where a process may run, as the kernel tells it: which CPUs of the host, and what these share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace allranks {

struct Place {
  static constexpr size_t kCpus = 1024;

  std::array<uint64_t, kCpus / 64> cpus{};  // a bit for each that it may use
  // What all of these share; -1: they do not share one, or it is not known.
  int32_t package = -1;
  int32_t node = -1;
  int32_t cache = -1;  // the last level's: the first CPU that uses it
};

// Of the calling thread. `root`: where the kernel describes its CPUs.
Place read_place(const std::string& root = "/sys/devices/system");
// The same, read once for each set of CPUs.
Place this_place();

// The same place where these lists say which CPUs are near each other, and not the kernel.
Place place_among(Place place, const std::vector<std::vector<int>>& lists);

// The CPUs that a list such as "0-3,8" names.
std::vector<int> parse_cpus(const std::string& list);

// Whether the CPUs of all are fewer than these processes.
bool is_crowded(const std::vector<Place>& places);

// Groups of ranks that are near each other: each has at most `most`, and only where it would otherwise be small does it
// reach over several caches of one node. In the order of their first ranks; the ranks of each in ascending order.
std::vector<std::vector<int>> near_ranks(const std::vector<Place>& places, size_t most);

}  // namespace allranks
