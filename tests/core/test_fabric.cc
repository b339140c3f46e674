// Calls and messages over libfabric. Without the library, these tests check nothing; the tests in Python fail in CI.
#include <chrono>
#include <cstdlib>
#include <numeric>

#include "ranks.h"

using namespace allranks;
using namespace allranks::test;

namespace {

bool installed() {
  try {
    return !fabric_devices({.libraries = {"libfabric.so.1"}, .provider = "tcp"}).empty();
  } catch (const Error&) {
    return false;
  }
}

// Scope in which ranks on different hosts use libfabric's provider tcp.
class OverFabric {
 public:
  OverFabric() { setenv("ALLRANKS_TEST_FABRIC", "tcp", 1); }
  ~OverFabric() { unsetenv("ALLRANKS_TEST_FABRIC"); }
};

void sum(Comm& comm, size_t count) {
  std::vector<int32_t> v(count);
  std::iota(v.begin(), v.end(), comm.rank());
  Operation op{.fingerprint = {.verb = Verb::all_reduce, .dtype = DType::i32, .root = -1, .count = count},
               .buffer = {v.data(), v.size(), DType::i32}};
  Caller caller;
  comm.run(op, caller);
  const int n = comm.size();
  for (size_t i = 0; i < count; i++) CHECK(v[i] == n * static_cast<int>(i) + n * (n - 1) / 2);
}

}  // namespace

TEST(sums_over_libfabric_are_right) {
  if (!installed()) return;
  const OverFabric over;
  Ranks ranks({0, 1, 1, 2});
  ranks.each([](Comm& comm) {
    for (const size_t count : {1, 100, 5000, 300'000}) sum(comm, count);
  });
}

TEST(ranks_that_close_over_libfabric_at_different_times_lose_no_data) {
  if (!installed()) return;
  const OverFabric over;
  for (int round = 0; round < 5; round++) {
    Ranks ranks({0, 1, 2});
    ranks.each([](Comm& comm) {
      sum(comm, 70'000);
      std::this_thread::sleep_for(std::chrono::milliseconds(20 * comm.rank()));
      comm.close();
    });
  }
}
