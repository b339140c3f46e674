#include "channel/topology.h"

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

namespace allranks {

namespace {

// Return the first line of a file, or "" if there is no such file.
std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

bool has(const Place& place, int cpu) {
  const auto bit = static_cast<size_t>(cpu);
  return bit < Place::kCpus && (place.cpus[bit / 64] >> (bit % 64) & 1) != 0;
}

// Return whether all CPUs that a process may use are in the list.
bool uses_only(const Place& place, const std::vector<int>& cpus) {
  Place rest = place;
  for (const int cpu : cpus) {
    if (has(rest, cpu)) rest.cpus[static_cast<size_t>(cpu) / 64] &= ~(uint64_t{1} << (static_cast<size_t>(cpu) % 64));
  }
  return std::ranges::all_of(rest.cpus, [](uint64_t word) { return word == 0; });
}

// Return the CPUs of the calling thread. The result is empty if the host has more CPUs than cpu_set_t supports.
std::array<uint64_t, Place::kCpus / 64> usable_cpus() {
  std::array<uint64_t, Place::kCpus / 64> cpus{};
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (size_t cpu = 0; cpu < std::min<size_t>(CPU_SETSIZE, Place::kCpus); cpu++) {
    if (CPU_ISSET(cpu, &set)) cpus[cpu / 64] |= uint64_t{1} << (cpu % 64);
  }
  return cpus;
}

std::vector<int> cpus_of_last_cache(const std::string& cpu) {
  std::vector<int> found;
  int highest = 0;
  for (int i = 0; i < 8; i++) {
    const std::string cache = cpu + "/cache/index" + std::to_string(i);
    const int level = std::atoi(read_line(cache + "/level").c_str());
    if (level > highest) {
      highest = level;
      found = parse_cpus(read_line(cache + "/shared_cpu_list"));
    }
  }
  return found;
}

// Return the NUMA node of a CPU, or -1 if the kernel reports none.
int node_of(const std::string& cpu) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(cpu.c_str()), closedir);
  if (!folder) return -1;
  while (const dirent* entry = readdir(folder.get())) {
    const std::string name = entry->d_name;
    if (name.starts_with("node") && name.size() > 4) return std::atoi(name.c_str() + 4);
  }
  return -1;
}

}  // namespace

std::vector<int> parse_cpus(const std::string& list) {
  std::vector<int> cpus;
  const char* at = list.c_str();
  while (*at >= '0' && *at <= '9') {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    long last = first;
    if (*end == '-') last = std::strtol(end + 1, &end, 10);
    for (long cpu = first; cpu <= last && cpu < static_cast<long>(Place::kCpus); cpu++) {
      cpus.push_back(static_cast<int>(cpu));
    }
    at = *end == ',' ? end + 1 : end;
  }
  return cpus;
}

Place read_place(const std::string& root) {
  Place place{.cpus = usable_cpus()};
  int first = 0;
  while (first < static_cast<int>(Place::kCpus) && !has(place, first)) first++;
  if (first == static_cast<int>(Place::kCpus)) return place;
  const std::string cpu = root + "/cpu/cpu" + std::to_string(first);
  const auto cache = cpus_of_last_cache(cpu);
  if (!cache.empty() && uses_only(place, cache)) place.cache = cache.front();
  const int node = node_of(cpu);
  if (node >= 0 && uses_only(place, parse_cpus(read_line(root + "/node/node" + std::to_string(node) + "/cpulist")))) {
    place.node = node;
  }
  if (uses_only(place, parse_cpus(read_line(cpu + "/topology/core_siblings_list")))) {
    place.package = std::atoi(read_line(cpu + "/topology/physical_package_id").c_str());
  }
  return place;
}

Place this_place() {
  // Per thread, because the affinity is an attribute of a thread.
  thread_local std::optional<Place> known;
  if (!known || known->cpus != usable_cpus()) known = read_place();
  return *known;
}

Place place_among(Place place, const std::vector<std::vector<int>>& lists) {
  place.package = place.node = place.cache = -1;
  for (size_t i = 0; i < lists.size(); i++) {
    // Each list is a separate node, so near_ranks does not merge small lists.
    if (uses_only(place, lists[i])) place.node = place.cache = static_cast<int32_t>(i);
  }
  return place;
}

bool is_crowded(const std::vector<Place>& places) {
  Place all;
  for (const Place& place : places) {
    for (size_t i = 0; i < all.cpus.size(); i++) all.cpus[i] |= place.cpus[i];
  }
  size_t cpus = 0;
  for (const uint64_t word : all.cpus) cpus += static_cast<size_t>(__builtin_popcountll(word));
  return cpus < places.size();
}

std::vector<std::vector<int>> near_ranks(const std::vector<Place>& places, size_t most) {
  using Key = std::tuple<int, int, int>;
  std::map<Key, std::vector<int>> caches;  // ranks by shared cache, in the order of packages and nodes
  for (size_t r = 0; r < places.size(); r++) {
    caches[{places[r].package, places[r].node, places[r].cache}].push_back(static_cast<int>(r));
  }
  std::vector<std::vector<int>> groups;
  Key before{-2, -2, -2};
  for (const auto& [key, ranks] : caches) {
    const bool same_node = std::get<0>(key) == std::get<0>(before) && std::get<1>(key) == std::get<1>(before);
    if (same_node && groups.back().size() + ranks.size() <= most) {
      groups.back().insert(groups.back().end(), ranks.begin(), ranks.end());
    } else {
      const size_t parts = (ranks.size() + most - 1) / most;  // of equal size, up to one rank
      for (size_t p = 0; p < parts; p++) {
        const auto at = [&](size_t part) {
          return ranks.begin() + static_cast<std::ptrdiff_t>(ranks.size() * part / parts);
        };
        groups.emplace_back(at(p), at(p + 1));
      }
    }
    before = key;
  }
  for (auto& group : groups) std::ranges::sort(group);
  std::ranges::sort(groups, {}, [](const auto& group) { return group.front(); });
  return groups;
}

}  // namespace allranks
