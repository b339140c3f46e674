// Large calls between hosts. Results must have the same bits as one kernel for all hosts. Operands must not change
// unless they are also results. Most tests use more than 8 hosts, which form a chain. One test loses a host of the
// chain.
#include <algorithm>
#include <cstring>

#include "collective/reduce.h"
#include "ranks.h"

using namespace allranks;
using namespace allranks::test;

namespace {

using Bytes = std::vector<std::byte>;

// Compare with one memcmp. With the thread sanitizer, a loop over the bytes takes half of the time of these tests.
bool same(const Bytes& one, const Bytes& other) {
  return one.size() == other.size() && std::memcmp(one.data(), other.data(), one.size()) == 0;
}

const std::vector<std::vector<int>> kMany = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 9},  // ranks of a host are not consecutive
    {0, 0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11},            // unequal numbers of ranks per host
};

// Return numbers of several magnitudes, so that another order of summation would give other bits.
Bytes operand(int rank, size_t count, DType dtype) {
  Bytes bytes(count * size_of(dtype));
  uint32_t state = static_cast<uint32_t>(rank) * 7919u + 17u;
  for (size_t i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(static_cast<int>(state >> 16) - 32768) / static_cast<float>(1 + i % 511);
    const auto word = std::bit_cast<uint32_t>(value);
    std::byte* at = bytes.data() + i * size_of(dtype);
    if (dtype == DType::f32) {
      std::memcpy(at, &word, 4);
    } else if (dtype == DType::bf16) {
      const auto upper = static_cast<uint16_t>(word >> 16);
      std::memcpy(at, &upper, 2);
    } else {
      const auto half = static_cast<uint16_t>((state >> 16) & 0xbbff);  // finite float16, also as sums
      std::memcpy(at, &half, 2);
    }
  }
  return bytes;
}

// Return the expected result: reduce each host's operands in the order of ranks, then the results in the order of
// hosts.
Bytes reduced(const std::vector<Bytes>& operands, const std::vector<int>& host_of, DType dtype, ReduceOp op) {
  const Hosts hosts(host_of);
  const size_t count = operands.front().size() / size_of(dtype);
  const ReduceOp within = op == ReduceOp::avg ? ReduceOp::sum : op;
  std::vector<Bytes> by_host;
  std::vector<const void*> results;
  for (int h = 0; h < hosts.count(); h++) {
    std::vector<const void*> of_host;
    for (const int r : hosts.on(h)) of_host.push_back(operands[static_cast<size_t>(r)].data());
    by_host.emplace_back(operands.front().size());
    const auto n = static_cast<int>(of_host.size());
    kernel_for(dtype, within)(by_host.back().data(), of_host.data(), n, count, n);
  }
  for (const Bytes& result : by_host) results.push_back(result.data());
  Bytes all(operands.front().size());
  kernel_for(dtype, op)(all.data(), results.data(), hosts.count(), count, hosts.ranks());
  return all;
}

Operation operation(Verb verb, Bytes& bytes, DType dtype, ReduceOp op, int root = -1) {
  const size_t count = bytes.size() / size_of(dtype);
  return {.fingerprint = {.verb = verb, .dtype = dtype, .op = op, .root = root, .count = count},
          .buffer = {bytes.data(), count, dtype}};
}

void check_reductions(const std::vector<int>& host_of, size_t count, DType dtype, ReduceOp op) {
  const size_t n = host_of.size();
  std::vector<Bytes> operands;
  for (size_t r = 0; r < n; r++) operands.push_back(operand(static_cast<int>(r), count * n, dtype));
  const Bytes whole = reduced(operands, host_of, dtype, op);
  Ranks ranks(host_of);
  ranks.each([&](Comm& comm) {
    Caller caller;
    const auto me = static_cast<size_t>(comm.rank());
    Bytes all = operands[me];
    comm.run(operation(Verb::all_reduce, all, dtype, op), caller);
    CHECK(same(all, whole));
    for (const size_t root : {n - 1, n / 2}) {
      Bytes mine = operands[me];
      comm.run(operation(Verb::reduce, mine, dtype, op, static_cast<int>(root)), caller);
      CHECK(same(mine, me == root ? whole : operands[me]));
    }
    const size_t share = count * size_of(dtype);
    Bytes piece(share);
    Operation scattered = operation(Verb::reduce_scatter, piece, dtype, op);
    for (size_t r = 0; r < n; r++) scattered.ins.push_back(all.data() + r * share);
    all = operands[me];
    comm.run(scattered, caller);
    CHECK(std::memcmp(piece.data(), whole.data() + me * share, share) == 0);
    CHECK(same(all, operands[me]));
  });
}

}  // namespace

TEST(chains_reduce_to_the_bits_of_one_kernel) {
  for (const auto& host_of : kMany) {
    check_reductions(host_of, 6001, DType::f32, ReduceOp::sum);
    check_reductions(host_of, 20'003, DType::f16, ReduceOp::sum);
    check_reductions(host_of, 20'003, DType::bf16, ReduceOp::avg);
  }
  check_reductions(kMany[1], 6001, DType::f32, ReduceOp::avg);
  check_reductions(kMany[1], 10'001, DType::f16, ReduceOp::max);
  check_reductions(kMany[1], 10'000, DType::bf16, ReduceOp::prod);
}

// The three ways: each rank transfers its shard, the leaders transfer all, or stages overlap. The larger size has
// stages: one part is on the network while each host reduces the next part.
TEST(an_all_reduce_has_the_bits_of_one_kernel_in_each_way) {
  const std::vector<std::pair<std::vector<int>, DType>> cases{{{0, 0, 1, 1}, DType::f32},
                                                              {{0, 1, 2, 2, 0, 1}, DType::bf16}};
  for (const auto& [host_of, dtype] : cases) {
    for (const size_t nbytes : {size_t{300} << 10, size_t{10} << 20}) {
      const size_t count = nbytes / size_of(dtype) + 7;
      std::vector<Bytes> operands;
      for (size_t r = 0; r < host_of.size(); r++) operands.push_back(operand(static_cast<int>(r), count, dtype));
      const Bytes whole = reduced(operands, host_of, dtype, ReduceOp::avg);
      Ranks ranks(host_of);
      ranks.each([&](Comm& comm) {
        Caller caller;
        for (int i = 0; i < 8; i++) {  // one way, the other way, then the faster one
          Bytes mine = operands[static_cast<size_t>(comm.rank())];
          comm.run(operation(Verb::all_reduce, mine, dtype, ReduceOp::avg), caller);
          CHECK(same(mine, whole));
        }
      });
    }
  }
}

TEST(the_faster_way_is_chosen_by_the_slowest_rank) {
  for (const size_t faster : {0, 1}) {
    Trial trial;
    std::vector<uint64_t> durations{0, 0};
    std::vector<size_t> ways;
    for (int i = 0; i < 10; i++) {
      const bool under_way = trial.under_way();
      ways.push_back(trial.choose(under_way ? durations : std::vector<uint64_t>{}));
      trial.took(ways.back() == faster ? 2'000'000 : 1'000'000, 2 << 20);
      CHECK(trial.duration() == (ways.back() == faster ? 1'000'000 : 500'000));
      durations = {trial.duration(), ways.back() == faster ? 0U : 1'500'000U};  // another rank, slower in the other way
    }
    CHECK(std::vector(ways.begin(), ways.begin() + 6) == (std::vector<size_t>{0, 1, 0, 1, 0, 1}));
    CHECK(std::vector(ways.begin() + 6, ways.end()) == std::vector<size_t>(4, faster));
    CHECK(!trial.under_way());
  }
}

// The call has more segments than the memory for partial results can hold, so the memory is reused.
TEST(chains_use_the_memory_of_partial_results_again) {
  check_reductions(kMany[0], 400'000, DType::bf16, ReduceOp::sum);
}

TEST(what_all_get_goes_round_many_hosts) {
  for (const auto& host_of : kMany) {
    const size_t n = host_of.size();
    Ranks ranks(host_of);
    for (const size_t count : {3001, 100'001}) {
      std::vector<Bytes> operands;
      for (size_t r = 0; r < n; r++) operands.push_back(operand(static_cast<int>(r), count, DType::f32));
      ranks.each([&](Comm& comm) {
        Caller caller;
        Bytes in = operands[static_cast<size_t>(comm.rank())];
        Bytes all(n * in.size());
        Operation gathered = operation(Verb::all_gather, in, DType::f32, ReduceOp::sum);
        for (size_t r = 0; r < n; r++) gathered.outs.push_back(all.data() + r * in.size());
        comm.run(gathered, caller);
        for (size_t r = 0; r < n; r++) {
          CHECK(std::memcmp(all.data() + r * in.size(), operands[r].data(), in.size()) == 0);
        }
      });
    }
    for (const size_t root : {size_t{0}, n / 2, n - 1}) {
      const Bytes given = operand(static_cast<int>(root), 1'200'007, DType::f32);
      ranks.each([&](Comm& comm) {
        Caller caller;
        Bytes mine = static_cast<size_t>(comm.rank()) == root ? given : Bytes(given.size());
        comm.run(operation(Verb::broadcast, mine, DType::f32, ReduceOp::sum, static_cast<int>(root)), caller);
        CHECK(same(mine, given));
      });
    }
  }
}

void check_gather_and_scatter(Ranks& ranks, size_t n, size_t count, size_t root) {
  ranks.each([&](Comm& comm) {
    Caller caller;
    const bool is_root = static_cast<size_t>(comm.rank()) == root;
    const Bytes given = operand(comm.rank(), count, DType::f32);
    Bytes mine = given;
    Bytes all(is_root ? n * mine.size() : 0);
    Operation gathered = operation(Verb::gather, mine, DType::f32, ReduceOp::sum, static_cast<int>(root));
    for (size_t r = 0; r < n && is_root; r++) gathered.outs.push_back(all.data() + r * mine.size());
    comm.run(gathered, caller);
    for (size_t r = 0; r < n && is_root; r++) {
      const Bytes theirs = operand(static_cast<int>(r), count, DType::f32);
      CHECK(std::memcmp(all.data() + r * mine.size(), theirs.data(), theirs.size()) == 0);
    }
    CHECK(same(mine, given));
    std::ranges::fill(mine, std::byte{});
    Operation scattered = operation(Verb::scatter, mine, DType::f32, ReduceOp::sum, static_cast<int>(root));
    scattered.ins = gathered.outs;
    comm.run(scattered, caller);
    CHECK(same(mine, given));
  });
}

TEST(what_one_gives_or_gets_goes_along_a_tree_of_many_hosts) {
  for (const auto& host_of : kMany) {
    Ranks ranks(host_of);
    const size_t n = host_of.size();
    for (const size_t root : {size_t{0}, size_t{1}, n / 2, n - 1}) check_gather_and_scatter(ranks, n, 20'001, root);
    if (n > 9) check_gather_and_scatter(ranks, n, 300'001, n / 2);  // two slabs
  }
}

TEST(a_rank_speaks_to_few_of_many_hosts) {
  for (const auto& host_of : {kMany[0], kMany[1]}) {
    const size_t n = host_of.size();
    Ranks ranks(host_of);
    ranks.each([&](Comm& comm) {
      Caller caller;
      Bytes mine = operand(comm.rank(), 16'000 * n, DType::f32);
      comm.run(operation(Verb::all_reduce, mine, DType::f32, ReduceOp::sum), caller);
      comm.run(operation(Verb::reduce, mine, DType::f32, ReduceOp::sum, 0), caller);
      comm.run(operation(Verb::broadcast, mine, DType::f32, ReduceOp::sum, 0), caller);
      Bytes piece(16'000 * 4);
      Operation scattered = operation(Verb::reduce_scatter, piece, DType::f32, ReduceOp::sum);
      Operation gathered = operation(Verb::all_gather, piece, DType::f32, ReduceOp::sum);
      for (size_t r = 0; r < n; r++) scattered.ins.push_back(mine.data() + r * piece.size());
      gathered.outs = scattered.ins;
      comm.run(scattered, caller);
      comm.run(gathered, caller);
      for (const int root : {0, 3}) {  // leaders
        for (const Verb verb : {Verb::gather, Verb::scatter}) {
          Operation one = operation(verb, piece, DType::f32, ReduceOp::sum, root);
          if (comm.rank() == root) (verb == Verb::gather ? one.outs : one.ins) = scattered.ins;
          comm.run(one, caller);
        }
      }
    });
    // The exchange of the leaders has four rounds, with two peers each. The trees use the same connections.
    const Hosts hosts(host_of);
    std::vector<int> held(n);
    for (const auto& [one, other, kind] : ranks.opened) {
      held[static_cast<size_t>(one)]++;
      held[static_cast<size_t>(other)]++;
    }
    for (size_t r = 0; r < n; r++) CHECK(held[r] <= (hosts.place(static_cast<int>(r)) == 0 ? 8 : 2));
  }
}

TEST(the_loss_of_a_host_of_a_chain_is_named_everywhere) {
  for (const int lost : {0, 4, 8}) {
    Ranks ranks(kMany[0]);
    ranks.each([&](Comm& comm) {
      Caller caller;
      std::vector<float> v(1'000'000, 1.0f);
      try {
        for (int turn = 0; comm.rank() != lost || turn < 2; turn++) comm.run(all_reduce(v), caller);
        comm.close();
      } catch (const Error& error) {
        CHECK(error.failure.kind == Kind::left && error.failure.peer == lost);
      }
    });
  }
}
