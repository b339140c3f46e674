// Ranks as threads of one process, on the real channel. The sanitizers cannot analyze several processes together.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "group/comm.h"

#define CHECK(condition)                                                                                \
  do {                                                                                                  \
    if (!(condition))                                                                                   \
      throw std::runtime_error(std::string(__FILE__ ":") + std::to_string(__LINE__) + ": " #condition); \
  } while (0)

namespace allranks::test {

// Return two connected TCP sockets on the loopback interface.
inline std::pair<sys::Fd, sys::Fd> tcp_pair() {
  const sys::Fd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  CHECK(bind(listener.get(), generic, size) == 0 && listen(listener.get(), 1) == 0);
  CHECK(getsockname(listener.get(), generic, &size) == 0);
  sys::Fd one(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(connect(one.get(), generic, size) == 0);
  sys::Fd other(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  CHECK(other.get() >= 0);
  return {std::move(one), std::move(other)};
}

// With at least four ranks per host, ranks synchronize in groups of two.
inline constexpr Tuning kLevels{.levels_from = 4, .crowded_levels_from = 4, .group = 2};
inline constexpr Tuning kNoLevels{.levels_from = Tuning::kNever};

// The network between the hosts of all ranks. ALLRANKS_TEST_FABRIC=tcp runs any test over that provider of libfabric.
inline FabricChoice fabric_of_tests() {
  const char* provider = getenv("ALLRANKS_TEST_FABRIC");
  return {.libraries = {"libfabric.so.1"}, .provider = provider == nullptr ? "" : provider, .sources = {"127.0.0.1"}};
}

// Run body(comm) in a thread for each rank. Rethrow the exception of the lowest rank that failed.
template <class Pointer>
void on_threads(const std::vector<Pointer>& comms,
                const std::function<void(typename std::pointer_traits<Pointer>::element_type&)>& body) {
  std::vector<std::exception_ptr> errors(comms.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < comms.size(); r++) {
    threads.emplace_back([&, r] {
      try {
        body(*comms[r]);
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  }
  for (auto& t : threads) t.join();
  for (auto& e : errors) {
    if (e) std::rethrow_exception(e);
  }
}

struct Ranks {
  explicit Ranks(int n, Sizes sizes = {}, double timeout_s = 20, int64_t spin_ns = 0, const Tuning& tuning = kLevels,
                 const std::vector<Place>& places = {})
      : Ranks(std::vector<int>(static_cast<size_t>(n)), sizes, timeout_s, spin_ns, Settings{}.eager, tuning, places) {}

  // host_of: the host of each rank. Ranks of one host share memory; ranks of different hosts have TCP connections.
  // places: the CPUs that each rank publishes as those on which it may run. Empty: the real ones.
  explicit Ranks(const std::vector<int>& host_of, Sizes sizes = {}, double timeout_s = 20, int64_t spin_ns = 0,
                 size_t eager = Settings{}.eager, const Tuning& tuning = kLevels,
                 const std::vector<Place>& places = {}) {
    const Hosts hosts(host_of);
    const size_t n = host_of.size();
    // near[a][b], heartbeats[a][b]: the socket of rank a that is connected to rank b.
    using Row = std::vector<sys::Fd>;
    const auto square = [n] {
      std::vector<Row> rows(n);
      for (auto& row : rows) row.resize(n);
      return rows;
    };
    std::vector<Row> near = square();
    std::vector<Row> heartbeats(n);  // only the rows of leaders have sockets
    for (int h = 0; h < hosts.count() && hosts.count() > 1; h++)
      heartbeats[static_cast<size_t>(hosts.leader(h))].resize(n);
    for (size_t a = 0; a < n; a++) {
      for (size_t b = 0; b < a; b++) {
        if (hosts.of(static_cast<int>(a)) == hosts.of(static_cast<int>(b))) {
          int pair[2];
          CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
          near[a][b] = sys::Fd(pair[0]);
          near[b][a] = sys::Fd(pair[1]);
        }
      }
    }
    for (int h = 0; h < hosts.count(); h++) {
      for (const int other : Heartbeat::neighbours(h, hosts.count())) {
        if (other > h) continue;
        const auto a = static_cast<size_t>(hosts.leader(h));
        const auto b = static_cast<size_t>(hosts.leader(other));
        std::tie(heartbeats[a][b], heartbeats[b][a]) = tcp_pair();
      }
    }
    if (hosts.count() > 1) sizes.ranks = n;
    std::vector<Shm::Maps> maps;  // by host
    for (int h = 0; h < hosts.count(); h++) {
      const int here = static_cast<int>(hosts.on(h).size());
      std::vector<sys::Fd> segments;
      for (int p = 0; p < here; p++) segments.push_back(Shm::create_segment(p, here, sizes));
      maps.push_back(Shm::map(here, sizes, segments));
    }
    Settings settings{.tuning = tuning,
                      .timeout_s = timeout_s,
                      .polling = {.spin_ns = spin_ns},
                      .eager = eager,
                      .fabric = fabric_of_tests()};
    for (size_t i = 0; i < n; i++) {
      const int r = static_cast<int>(i);
      if (!places.empty()) settings.place = places[i];
      const auto& mates = hosts.on(hosts.of(r));
      Liveness liveness;
      for (const int mate : mates) {
        liveness.push_back(std::make_shared<const sys::Fd>(std::move(near[i][static_cast<size_t>(mate)])));
      }
      auto shm = std::make_unique<Shm>(hosts.place(r), sizes, maps[static_cast<size_t>(hosts.of(r))],
                                       std::move(liveness), mates);
      comms.push_back(hosts.count() == 1
                          ? sys::make_owned<Comm>(std::move(shm), settings)
                          : sys::make_owned<Comm>(
                                std::move(shm), r, hosts, std::move(heartbeats[i]),
                                [this, r](int peer, Connection kind) { open(r, peer, kind); }, settings));
    }
  }

  // Connect two ranks when either of them first requests it, as Python does in a real job.
  void open(int rank, int peer, Connection kind) {
    const std::lock_guard lock(opening);
    if (!opened.insert({std::min(rank, peer), std::max(rank, peer), kind}).second) return;
    auto [one, other] = tcp_pair();
    comms[static_cast<size_t>(rank)]->adopt(peer, kind, std::move(one));
    comms[static_cast<size_t>(peer)]->adopt(rank, kind, std::move(other));
  }

  void each(const std::function<void(Comm&)>& body) { on_threads(comms, body); }

  std::mutex opening;
  std::set<std::tuple<int, int, Connection>> opened;
  std::vector<std::shared_ptr<Comm>> comms;
};

// The host of each rank: single ranks, one host, one rank per host, equal and unequal numbers of ranks. The last shape
// has more than 8 hosts, so that leaders forward messages of other hosts.
inline const std::vector<std::vector<int>> kShapes = {
    {0},       {0, 0},       {0, 0, 0},       {0, 0, 0, 0, 0}, {0, 1},
    {0, 1, 2}, {0, 0, 1, 1}, {0, 1, 1, 2, 2}, {0, 1, 0, 1, 1}, {0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 8}};

// Sizes of small pieces, so that small tensors take every path.
inline Sizes small_sizes() { return {.piece = 512, .ring = 6 * 512, .small_ring = 1024, .pipe = 1024}; }

template <class T>
DType dtype_of();
template <>
inline DType dtype_of<float>() {
  return DType::f32;
}
template <>
inline DType dtype_of<double>() {
  return DType::f64;
}
template <>
inline DType dtype_of<int32_t>() {
  return DType::i32;
}

template <class T>
Operation all_reduce(std::vector<T>& v, ReduceOp op = ReduceOp::sum) {
  return {{.verb = Verb::all_reduce, .dtype = dtype_of<T>(), .op = op, .count = v.size()},
          {v.data(), v.size(), dtype_of<T>()}};
}
template <class T>
Operation broadcast(std::vector<T>& v, int root) {
  return {{.verb = Verb::broadcast, .dtype = dtype_of<T>(), .root = root, .count = v.size()},
          {v.data(), v.size(), dtype_of<T>()}};
}
inline Operation barrier() { return {{.verb = Verb::barrier}, {}}; }

struct Test {
  const char* name;
  void (*body)();
};
std::vector<Test>& tests();
struct Register {
  Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};
#define TEST(name)                                                      \
  static void name();                                                   \
  static const ::allranks::test::Register register_##name(#name, name); \
  static void name()

// Define a test that runs with all ranks on one host, with each rank on its own host, and with only the last rank on
// another host. The body can use `hosts`.
#define TEST_PLACED(name, n)                                \
  static void name##_placed(const std::vector<int>& hosts); \
  TEST(name) {                                              \
    std::vector<int> hosts(n);                              \
    name##_placed(hosts);                                   \
    std::iota(hosts.begin(), hosts.end(), 0);               \
    name##_placed(hosts);                                   \
    hosts.assign(n, 0);                                     \
    hosts.back() = 1;                                       \
    if ((n) > 2) name##_placed(hosts);                      \
  }                                                         \
  static void name##_placed(const std::vector<int>& hosts)

}  // namespace allranks::test
