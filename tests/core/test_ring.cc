// The ring that all calls share: random verbs and sizes, random delays of ranks, mismatches in between. If a rank
// overwrites data too early, a result is wrong, and the thread sanitizer reports a race.
#include <array>
#include <chrono>
#include <random>

#include "collective/swaps.h"
#include "ranks.h"

using namespace allranks;
using namespace allranks::test;

namespace {

int32_t element(int call, int from, int to, size_t i) {
  return call * 1000003 + from * 10007 + to * 101 + static_cast<int32_t>(i % 97);
}

std::vector<int32_t> data(int call, int from, int to, size_t count) {
  std::vector<int32_t> v(count);
  for (size_t i = 0; i < count; i++) v[i] = element(call, from, to, i);
  return v;
}

std::vector<std::byte*> pieces(std::vector<std::vector<int32_t>>& vs) {
  std::vector<std::byte*> out;
  for (auto& v : vs) out.push_back(reinterpret_cast<std::byte*>(v.data()));
  return out;
}

void one_call(Comm& comm, int call, Verb verb, size_t count, int root) {
  const int n = comm.size();
  const int me = comm.rank();
  const auto ranks = static_cast<size_t>(n);
  auto v = data(call, me, 0, count);
  std::vector<std::vector<int32_t>> ins, outs(ranks, std::vector<int32_t>(count));
  for (int r = 0; r < n; r++) ins.push_back(data(call, me, r, count));
  const bool rooted = verb == Verb::reduce || verb == Verb::broadcast || verb == Verb::scatter || verb == Verb::gather;
  Operation op{.fingerprint = {.verb = verb, .dtype = DType::i32, .root = rooted ? root : -1, .count = count},
               .buffer = {v.data(), v.size(), DType::i32}};
  if (verb == Verb::all_gather || (verb == Verb::gather && me == root)) op.outs = pieces(outs);
  if (verb == Verb::reduce_scatter || (verb == Verb::scatter && me == root)) op.ins = pieces(ins);
  if (verb == Verb::all_to_all) {
    op.ins = pieces(ins);
    op.outs = pieces(outs);
    op.in_bytes.assign(ranks, count * sizeof(int32_t));
    op.out_bytes = op.in_bytes;
    op.fingerprint.count = 0;
    op.buffer = {};
  }
  Caller caller;
  comm.run(op, caller);
  for (size_t i = 0; i < count; i++) {
    int32_t sum = 0;
    int32_t sum_to_me = 0;
    for (int r = 0; r < n; r++) {
      sum += element(call, r, 0, i);
      sum_to_me += element(call, r, me, i);
    }
    if (verb == Verb::all_reduce || (verb == Verb::reduce && me == root)) CHECK(v[i] == sum);
    if (verb == Verb::reduce_scatter) CHECK(v[i] == sum_to_me);
    if (verb == Verb::broadcast) CHECK(v[i] == element(call, root, 0, i));
    if (verb == Verb::scatter) CHECK(v[i] == element(call, root, me, i));
  }
  for (int r = 0; r < n && !op.outs.empty(); r++) {
    CHECK(outs[static_cast<size_t>(r)] == data(call, r, verb == Verb::all_to_all ? me : 0, count));
  }
}

}  // namespace

TEST(calls_of_all_sizes_share_the_ring) {
  constexpr std::array verbs = {Verb::all_reduce, Verb::reduce,         Verb::broadcast,  Verb::all_gather,
                                Verb::gather,     Verb::reduce_scatter, Verb::all_to_all, Verb::scatter};
  constexpr std::array<size_t, 9> counts = {1, 20, 30, 64, 100, 128, 129, 500, 2000};
  for (const int n : {2, 3, 4}) {
    Ranks ranks(n, small_sizes());
    ranks.each([&](Comm& comm) {
      std::mt19937 common(static_cast<uint32_t>(n));  // the same seed on all ranks, so that their calls agree
      std::mt19937 own(static_cast<uint32_t>(100 * n + comm.rank()));
      for (int call = 0; call < 400; call++) {
        const Verb verb = verbs[common() % verbs.size()];
        const size_t count = counts[common() % counts.size()];
        const int root = static_cast<int>(common() % static_cast<uint32_t>(n));
        const bool mismatch = common() % 20 == 0;
        if (own() % 10 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
        if (!mismatch) {
          one_call(comm, call, verb, count, root);
          continue;
        }
        bool raised = false;
        try {
          one_call(comm, call, Verb::all_reduce, comm.rank() == root ? count : count + 1, 0);
        } catch (const Error& error) {
          raised = error.failure.kind == Kind::mismatch;
        }
        CHECK(raised);
      }
    });
  }
}

TEST(swapped_calls_are_told_from_branches) {
  const auto calls = [](uint32_t a, uint32_t b, int32_t root = -1) {
    Fingerprint f{.verb = Verb::all_reduce, .root = root, .count = 4};
    std::vector<Fingerprint> both = {f, f};
    both[0].site = a;
    both[1].site = b;
    return both;
  };
  const auto none = std::pair(-1, -1);
  Swaps swaps;
  CHECK(swaps.see(calls(1, 1)) == none);
  CHECK(swaps.see(calls(10, 12)) == none);  // a branch on the rank, which is repeated
  CHECK(swaps.see(calls(10, 12)) == none);
  CHECK(swaps.see(calls(20, 21, 0)) == none);
  CHECK(swaps.see(calls(21, 20, 1)) == none);  // another root, so another call
  CHECK(swaps.see(calls(30, 31)) == none);
  CHECK(swaps.see(calls(31, 30)) == std::pair(0, 1));
}
