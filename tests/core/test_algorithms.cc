// The table of algorithms. An algorithm is one function and one row: this file adds a row, and ranks use it if it
// applies (docs/decisions/092).
#include <atomic>

#include "collective/algorithms/moves.h"
#include "collective/reduce.h"
#include "ranks.h"

using namespace allranks;
using namespace allranks::test;

namespace {

std::atomic<int> ran = 0;

bool is_of_three(const LocalComm&, const Operation& operation) { return operation.buffer.count == 3; }

// Every rank reads the operands from the rings of all ranks and adds them.
void sum_of_three(LocalComm& comm, LocalComm::Call& call, const Operation& operation) {
  const Buffer& buffer = operation.buffer;
  const auto ring = comm.take(buffer.nbytes());
  std::memcpy(ring.at(comm.rank()), buffer.data, buffer.nbytes());
  comm.arrive(call);
  std::vector<const void*> operands;
  for (int r = 0; r < comm.size(); r++) operands.push_back(ring.at(r));
  kernel_for(buffer.dtype, operation.fingerprint.op)(buffer.data, operands.data(), comm.size(), buffer.count,
                                                     comm.size());
  ran++;
}

using algorithms::Algorithm;
using algorithms::kAlgorithms;

constexpr auto kTable = [] {
  std::array<Algorithm, kAlgorithms.size() + 1> table{{{Verb::all_reduce, sum_of_three, is_of_three}}};
  for (size_t i = 0; i < kAlgorithms.size(); i++) table[i + 1] = kAlgorithms[i];
  return table;
}();

// The ranks of one host. If their number is even, one file has all segments; otherwise each segment has its own file.
struct Host {
  explicit Host(int n) {
    const auto size = static_cast<size_t>(n);
    std::vector<sys::Fd> segments;
    if (n % 2 == 0) {
      segments.push_back(Shm::create_segments(n, small_sizes()));
    } else {
      for (int r = 0; r < n; r++) segments.push_back(Shm::create_segment(r, n, small_sizes()));
    }
    const Shm::Maps maps = Shm::map(n, small_sizes(), segments);
    std::vector<std::vector<sys::Fd>> sockets(size);
    for (auto& row : sockets) row.resize(size);
    std::vector<int> ranks;
    for (int a = 0; a < n; a++) {
      ranks.push_back(a);
      for (int b = 0; b < a; b++) {
        int pair[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
        sockets[static_cast<size_t>(a)][static_cast<size_t>(b)] = sys::Fd(pair[0]);
        sockets[static_cast<size_t>(b)][static_cast<size_t>(a)] = sys::Fd(pair[1]);
      }
    }
    for (int r = 0; r < n; r++) {
      Liveness liveness;
      for (auto& fd : sockets[static_cast<size_t>(r)])
        liveness.push_back(std::make_shared<const sys::Fd>(std::move(fd)));
      comms.push_back(
          std::make_unique<LocalComm>(std::make_unique<Shm>(r, small_sizes(), maps, std::move(liveness), ranks)));
    }
  }

  void each(const std::function<void(LocalComm&)>& body) { on_threads(comms, body); }

  std::vector<std::unique_ptr<LocalComm>> comms;
};

void run(LocalComm& comm, const Operation& operation) {
  Caller caller;
  LocalComm::Call call{.number = comm.next(),
                       .patience = {.caller = caller, .timeout_ns = 20'000'000'000, .polling = {}},
                       .about = {.reporter = comm.rank(), .call = 1, .fingerprint = operation.fingerprint},
                       .site = operation.site};
  algorithms::run_first<kTable>(comm, call, operation);
}

}  // namespace

TEST(an_added_algorithm_is_taken_where_it_applies) {
  ran = 0;
  Host host(3);
  host.each([](LocalComm& comm) {
    for (const size_t count : {1, 3, 200, 3}) {
      std::vector<int32_t> v(count, comm.rank() + 1);
      run(comm, all_reduce(v));
      CHECK(v == std::vector<int32_t>(count, 6));
    }
    std::vector<int32_t> v(3, comm.rank());  // the added row is for another verb
    run(comm, broadcast(v, 2));
    CHECK(v == std::vector<int32_t>(3, 2));
    run(comm, barrier());
  });
  CHECK(ran == 6);
}

TEST(what_no_row_is_of_is_an_error) {
  Host host(1);
  bool refused = false;
  try {
    run(*host.comms[0], {{.verb = Verb::send}, {}});
  } catch (const Error&) {
    refused = true;
  }
  CHECK(refused);
}

TEST(every_collective_has_an_algorithm) {
  for (int code = static_cast<int>(Verb::all_reduce); code <= static_cast<int>(Verb::barrier); code++) {
    int rows = 0;
    for (const Algorithm& each : kAlgorithms) rows += each.verb == static_cast<Verb>(code);
    CHECK(rows > 0);
  }
}
