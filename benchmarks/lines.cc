// Counts the lines of other ranks' memory that each rank of a call touches, on a described machine:
//
//     lines VERB BYTES RANKS NODES CACHES_OF_NODE CPUS_OF_CACHE LEVELS_FROM
//     lines bounce
//
// The ranks are threads here, one for each CPU of that machine. They run the core's own code, which treats them as
// bound to those CPUs. Prints first the groups, as "group RANK RANK ...", and then "READER OWNER LINES" for each pair
// with lines. A rank that waits for long touches further lines, to find the rank that it names. Such lines must not
// count, so the minimum of several calls is used for each rank. `bounce` prints the ns in which a line moves from this
// machine's first CPU to its second.
#include "channel/lines.h"

#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "channel/shm.h"
#include "channel/topology.h"
#include "collective/algorithms/table.h"
#include "collective/local_comm.h"

using namespace allranks;

namespace {

constexpr int kCalls = 12;
constexpr int kCounted = 4;  // from there on: rings are there and groups are known

struct Machine {
  int nodes, caches_of_node, cpus_of_cache;
  // Of the CPU with this number; two sockets, where it has more nodes than one.
  Place place(int cpu) const {
    const int node = cpu / (caches_of_node * cpus_of_cache);
    Place place{
        .package = nodes > 1 ? node * 2 / nodes : 0, .node = node, .cache = cpu / cpus_of_cache * cpus_of_cache};
    place.cpus[static_cast<size_t>(cpu) / 64] |= uint64_t{1} << (static_cast<size_t>(cpu) % 64);
    return place;
  }
};

using Counts = std::map<int, size_t>;  // by owner

Counts run(LocalComm& comm, const Operation& operation) {
  Caller caller;
  const std::string site;
  std::vector<lines::Touched> calls;
  for (int i = 0; i < kCalls; i++) {
    const uint32_t number = comm.next();
    LocalComm::Call call{.number = number,
                         .patience = {.caller = caller, .timeout_ns = 600'000'000'000, .polling = {.yield_ns = 0}},
                         .about = {.call = number, .fingerprint = operation.fingerprint},
                         .site = site};
    lines::Touched touched;
    lines::touched = &touched;
    algorithms::run_first<algorithms::kAlgorithms>(comm, call, operation);
    lines::touched = nullptr;
    if (i >= kCounted) calls.push_back(std::move(touched));
  }
  const auto& least = *std::ranges::min_element(calls, {}, &lines::Touched::size);
  Counts counts;
  for (const auto& [owner, line] : least) {
    if (owner != comm.rank()) counts[owner]++;
  }
  return counts;
}

// The two write one line in turn.
double bounce_ns() {
  constexpr int kRounds = 200'000;
  alignas(128) static std::atomic<int> turn = 0;
  const auto play = [](int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) std::exit(1);
    for (int i = 0; i < kRounds; i++) {
      while (turn.load(std::memory_order_acquire) != 2 * i + cpu) {
      }
      turn.store(2 * i + cpu + 1, std::memory_order_release);
    }
  };
  std::vector<double> found;
  for (int i = 0; i < 9; i++) {
    turn = 0;
    const auto began = std::chrono::steady_clock::now();
    std::thread other(play, 1);
    play(0);
    other.join();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    found.push_back(took.count() / (2 * kRounds));
  }
  std::ranges::sort(found);
  return found[found.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "bounce") == 0) {
    std::printf("%.1f\n", bounce_ns());
    return 0;
  }
  if (argc != 8) return 2;
  const bool is_barrier = std::strcmp(argv[1], "barrier") == 0;
  const size_t count = is_barrier ? 0 : static_cast<size_t>(std::atoll(argv[2])) / sizeof(float);
  const int ranks = std::atoi(argv[3]);
  const Machine machine{std::atoi(argv[4]), std::atoi(argv[5]), std::atoi(argv[6])};
  const Tuning tuning{.levels_from = static_cast<uint32_t>(std::atoll(argv[7]))};

  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) return 1;
  const auto alive = std::make_shared<const sys::Fd>(pair[0]);  // all threads of a process live as long
  const sys::Fd other(pair[1]);
  std::vector<sys::Fd> segments;
  for (int r = 0; r < ranks; r++) segments.push_back(Shm::create_segment(r, ranks, {}));
  const Shm::Maps maps = Shm::map(ranks, {}, segments);
  std::vector<std::unique_ptr<LocalComm>> comms;
  for (int r = 0; r < ranks; r++) {
    auto shm = std::make_unique<Shm>(r, Sizes{}, maps, Liveness(static_cast<size_t>(ranks), alive));
    comms.push_back(std::make_unique<LocalComm>(std::move(shm), tuning, machine.place(r)));
  }
  std::vector<Counts> counts(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < counts.size(); r++) {
    threads.emplace_back([&, r] {
      std::vector<float> data(count);
      const Operation reduction{{.verb = Verb::all_reduce, .dtype = DType::f32, .op = ReduceOp::sum, .count = count},
                                {data.data(), data.size(), DType::f32}};
      counts[r] = run(*comms[r], is_barrier ? Operation{{.verb = Verb::barrier}, {}} : reduction);
    });
  }
  for (auto& thread : threads) thread.join();
  std::vector<Place> places;
  for (int r = 0; r < ranks; r++) places.push_back(machine.place(r));
  for (const auto& group : near_ranks(places, tuning.group)) {
    std::printf("group");
    for (const int r : group) std::printf(" %d", r);
    std::printf("\n");
  }
  for (size_t r = 0; r < counts.size(); r++) {
    for (const auto& [owner, n] : counts[r]) std::printf("%zu %d %zu\n", r, owner, n);
  }
  return 0;
}
