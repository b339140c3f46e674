// Ranks of one host that synchronize in groups: the choice of the groups, equal bits with and without groups, and the
// reported rank if one is late.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "channel/topology.h"
#include "ranks.h"

using namespace allranks;
using namespace allranks::test;

namespace {

Place on_cpu(int cpu, int package, int node, int cache) {
  Place place{.package = package, .node = node, .cache = cache};
  place.cpus[static_cast<size_t>(cpu) / 64] |= uint64_t{1} << (static_cast<size_t>(cpu) % 64);
  return place;
}

// Return the places of ranks on a machine with two sockets. One rank is bound to each CPU.
std::vector<Place> bound(int nodes, int caches_of_node, int cpus_of_cache) {
  std::vector<Place> places;
  for (int node = 0; node < nodes; node++) {
    for (int cache = 0; cache < caches_of_node; cache++) {
      const int first = (node * caches_of_node + cache) * cpus_of_cache;
      for (int i = 0; i < cpus_of_cache; i++) places.push_back(on_cpu(first + i, node * 2 / nodes, node, first));
    }
  }
  return places;
}

std::vector<size_t> sizes_of(const std::vector<std::vector<int>>& groups) {
  std::vector<size_t> sizes;
  for (const auto& group : groups) sizes.push_back(group.size());
  return sizes;
}

Failure failure_of(Comm& comm) {
  Caller caller;
  try {
    comm.run(barrier(), caller);
  } catch (const Error& error) {
    return error.failure;
  }
  return {};
}

// Return the results of each rank, for operands of several sizes.
std::vector<std::vector<float>> reduced(const Tuning& tuning, int n, ReduceOp op,
                                        const std::vector<Place>& places = {}) {
  std::vector<std::vector<float>> found(static_cast<size_t>(n));
  Ranks ranks(n, small_sizes(), 20, 0, tuning, places);
  ranks.each([&](Comm& comm) {
    Caller caller;
    for (const size_t count : {1, 5, 22, 23, 100, 3000}) {
      std::vector<float> v(count);
      for (size_t i = 0; i < count; i++) {
        v[i] = 1.0f / static_cast<float>(1 + (i * 7 + static_cast<size_t>(comm.rank()) * 13) % 97);
      }
      comm.run(all_reduce(v, op), caller);
      auto& all = found[static_cast<size_t>(comm.rank())];
      all.insert(all.end(), v.begin(), v.end());
      CHECK(comm.local_comm().has_levels() == (tuning.levels_from <= static_cast<uint32_t>(n) && all.size() > 1));
    }
  });
  return found;
}

}  // namespace

TEST(lists_of_cpus_are_read) {
  CHECK(parse_cpus("0-3,8,10-11\n") == (std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  CHECK(parse_cpus("").empty());
  CHECK(parse_cpus("nonsense").empty());
  CHECK(parse_cpus("7-").size() <= 1);
  CHECK(parse_cpus("5-99999999").size() == Place::kCpus - 5);
}

TEST(groups_follow_the_caches_and_nodes_of_a_machine) {
  // 192 CPUs, 8 per cache. Two caches of one node form a group.
  CHECK(sizes_of(near_ranks(bound(2, 12, 8), 16)) == std::vector<size_t>(12, 16));
  // 96 CPUs with one cache per socket.
  CHECK(sizes_of(near_ranks(bound(2, 1, 48), 16)) == std::vector<size_t>(6, 16));
  // Nodes of 6 CPUs: a group has CPUs of one node only.
  CHECK(sizes_of(near_ranks(bound(4, 1, 6), 16)) == std::vector<size_t>(4, 6));
  // Processes that may run anywhere.
  CHECK(sizes_of(near_ranks(std::vector<Place>(40), 16)) == (std::vector<size_t>{13, 13, 14}));
  // Ranks that are distributed to the sockets in turn.
  std::vector<Place> places = bound(2, 1, 4);
  for (size_t i = 0; i < places.size(); i++) places[i] = on_cpu(static_cast<int>(i), i % 2, i % 2, i % 2);
  CHECK(near_ranks(places, 16) == (std::vector<std::vector<int>>{{0, 2, 4, 6}, {1, 3, 5, 7}}));
}

TEST(ranks_are_crowded_where_they_have_fewer_cpus) {
  CHECK(!is_crowded(bound(2, 1, 4)));
  std::vector<Place> places = bound(2, 1, 4);
  places.push_back(places.front());
  CHECK(is_crowded(places));
}

TEST(the_kernel_says_where_a_process_may_run) {
  namespace fs = std::filesystem;
  const Place real = read_place();
  int cpu = 0;
  while ((real.cpus[static_cast<size_t>(cpu) / 64] >> (cpu % 64) & 1) == 0) cpu++;
  const fs::path root = fs::temp_directory_path() / ("allranks-core-" + std::to_string(getpid()));
  const fs::path of_cpu = root / "cpu" / ("cpu" + std::to_string(cpu));
  const auto put = [](const fs::path& path, const std::string& text) {
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  };
  put(of_cpu / "cache/index0/level", "1");
  put(of_cpu / "cache/index0/shared_cpu_list", "0");
  put(of_cpu / "cache/index1/level", "3");
  put(of_cpu / "cache/index1/shared_cpu_list", "0-1023");
  put(of_cpu / "topology/physical_package_id", "3");
  put(of_cpu / "topology/core_siblings_list", "0-1023");
  put(of_cpu / "node2/unused", "");
  put(root / "node/node2/cpulist", "0-1023");
  const Place place = read_place(root);
  CHECK(place.cpus == real.cpus);
  CHECK(place.package == 3 && place.node == 2 && place.cache == 0);
  put(root / "node/node2/cpulist", std::to_string(cpu + 1));  // the process may also run outside the node
  CHECK(read_place(root).node == -1);
  fs::remove_all(root);
  CHECK(read_place(root).cache == -1);
}

TEST(levels_do_not_change_a_bit) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::prod, ReduceOp::max}) {
    const auto flat = reduced(kNoLevels, 7, op);
    for (const uint32_t group : {2, 3, 4}) {
      CHECK(reduced({.levels_from = 4, .crowded_levels_from = 4, .group = group}, 7, op) == flat);
    }
  }
}

// Ranks that are distributed to two sockets in turn, to three caches of one socket in another order, and in part to no
// cache.
TEST(groups_of_ranks_that_are_not_side_by_side_do_not_change_a_bit) {
  std::vector<std::vector<Place>> topologies(3);
  std::vector<std::vector<std::vector<int>>> expected{
      {{0, 2, 4, 6}, {1, 3, 5}}, {{0, 3, 6}, {1, 4}, {2, 5}}, {{0, 2, 3, 5, 6}, {1, 4}}};
  for (int r = 0; r < 7; r++) {
    topologies[0].push_back(on_cpu(r, r % 2, r % 2, r % 2));
    topologies[1].push_back(place_among(on_cpu(r, 0, 0, 0), {{2, 5}, {0, 3, 6}, {1, 4}}));
    topologies[2].push_back(place_among(on_cpu(r, 0, 0, 0), {{1, 4}}));
  }
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::prod, ReduceOp::max}) {
    const auto flat = reduced(kNoLevels, 7, op);
    for (size_t t = 0; t < topologies.size(); t++) {
      CHECK(near_ranks(topologies[t], 8) == expected[t]);
      CHECK(reduced({.levels_from = 3, .crowded_levels_from = 3, .group = 8}, 7, op, topologies[t]) == flat);
    }
  }
}

// A ring holds six pieces. So the root, and the ranks that forward pieces, write each part of their rings many times.
TEST(a_large_broadcast_goes_through_the_groups) {
  for (const size_t group : {2, 3}) {
    Ranks ranks(7, small_sizes(), 20, 0,
                {.levels_from = 3, .crowded_levels_from = 3, .group = static_cast<uint32_t>(group)});
    ranks.each([&](Comm& comm) {
      Caller caller;
      comm.run(barrier(), caller);
      for (int i = 0; i < 60; i++) {
        const int root = i % 7;
        const size_t count = 1500 + static_cast<size_t>(i) * 37;
        std::vector<float> v(count, -1);
        if (comm.rank() == root) std::iota(v.begin(), v.end(), static_cast<float>(i));
        comm.run(broadcast(v, root), caller);
        std::vector<float> sum(static_cast<size_t>(i) % 5 * 100 + 1, 1);
        comm.run(all_reduce(sum), caller);  // writes to the rings immediately after the broadcast
        for (size_t k = 0; k < count; k++) CHECK(v[k] == static_cast<float>(static_cast<size_t>(i) + k));
        for (const float each : sum) CHECK(each == 7);
      }
    });
  }
}

TEST(who_is_late_is_named_across_levels) {
  for (int late = 0; late < 5; late++) {
    Ranks ranks(5, {}, 0.5);
    ranks.each([&](Comm& comm) {
      Caller caller;
      comm.run(barrier(), caller);
      comm.run(barrier(), caller);
      CHECK(comm.local_comm().has_levels());
      if (comm.rank() == late) return;
      const Failure failure = failure_of(comm);
      CHECK(failure.kind == Kind::timeout);
      CHECK(failure.peer == late);
    });
  }
}

TEST(who_has_left_is_named_across_levels) {
  for (int gone = 0; gone < 5; gone++) {
    Ranks ranks(5);
    ranks.each([&](Comm& comm) {
      Caller caller;
      comm.run(barrier(), caller);
      comm.run(barrier(), caller);
      if (comm.rank() == gone) return comm.close();
      const Failure failure = failure_of(comm);
      CHECK(failure.kind == Kind::left);
      CHECK(failure.peer == gone);
    });
  }
}

TEST(a_mismatch_across_levels_raises_everywhere_and_the_group_goes_on) {
  for (int odd = 0; odd < 5; odd++) {
    Ranks ranks(5);
    ranks.each([&](Comm& comm) {
      Caller caller;
      std::vector<float> v(3, 1.0f);
      std::vector<float> w(4, 1.0f);
      for (int i = 0; i < 3; i++) {
        comm.run(all_reduce(v), caller);
        bool refused = false;
        try {
          comm.run(comm.rank() == odd ? all_reduce(w) : all_reduce(v), caller);
        } catch (const Error& error) {
          refused = error.failure.kind == Kind::mismatch && error.calls.size() == 5;
        }
        CHECK(refused);
      }
      CHECK(v == std::vector<float>(3, 125.0f) && w == std::vector<float>(4, 1.0f));
    });
  }
}
