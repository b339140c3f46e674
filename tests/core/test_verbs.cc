// The verbs with one piece per rank, on every path, and messages that no thread waits for.
#include <chrono>

#include "ranks.h"

using namespace allranks;
using namespace allranks::test;

namespace {

const std::vector<size_t> kCounts = {0, 1, 13, 26, 100, 128, 129, 700, 3000};

int32_t element(int from, int to, size_t i) { return from * 10007 + to * 101 + static_cast<int32_t>(i % 97); }

std::vector<int32_t> piece(int from, int to, size_t count) {
  std::vector<int32_t> v(count);
  for (size_t i = 0; i < count; i++) v[i] = element(from, to, i);
  return v;
}

std::vector<std::byte*> pieces(std::vector<std::vector<int32_t>>& vs) {
  std::vector<std::byte*> out;
  for (auto& v : vs) out.push_back(reinterpret_cast<std::byte*>(v.data()));
  return out;
}

Operation operation(Verb verb, std::vector<int32_t>& v, int root = -1) {
  return {.fingerprint = {.verb = verb, .dtype = DType::i32, .root = root, .count = v.size()},
          .buffer = {v.data(), v.size(), DType::i32}};
}

}  // namespace

TEST(reduce_to_every_root) {
  for (const auto& hosts : kShapes) {
    const int n = static_cast<int>(hosts.size());
    Ranks ranks(hosts, small_sizes());
    for (int root = 0; root < n; root++) {
      for (const size_t count : kCounts) {
        ranks.each([&](Comm& comm) {
          auto v = piece(comm.rank(), 0, count);
          const auto before = v;
          Caller caller;
          comm.run(operation(Verb::reduce, v, root), caller);
          if (comm.rank() != root) {
            CHECK(v == before);
            return;
          }
          for (size_t i = 0; i < count; i++) {
            int32_t sum = 0;
            for (int r = 0; r < n; r++) sum += element(r, 0, i);
            CHECK(v[i] == sum);
          }
        });
      }
    }
  }
}

TEST(all_gather_and_gather) {
  for (const auto& hosts : kShapes) {
    const int n = static_cast<int>(hosts.size());
    Ranks ranks(hosts, small_sizes());
    for (const Verb verb : {Verb::all_gather, Verb::gather}) {
      for (const size_t count : kCounts) {
        ranks.each([&](Comm& comm) {
          const int root = verb == Verb::gather ? n - 1 : -1;
          auto in = piece(comm.rank(), 0, count);
          std::vector<std::vector<int32_t>> outs(static_cast<size_t>(n), std::vector<int32_t>(count));
          Operation op = operation(verb, in, root);
          if (root < 0 || root == comm.rank()) op.outs = pieces(outs);
          Caller caller;
          comm.run(op, caller);
          for (int r = 0; r < n && !op.outs.empty(); r++) CHECK(outs[static_cast<size_t>(r)] == piece(r, 0, count));
        });
      }
    }
  }
}

TEST(scatter_and_reduce_scatter) {
  for (const auto& hosts : kShapes) {
    const int n = static_cast<int>(hosts.size());
    Ranks ranks(hosts, small_sizes());
    for (const size_t count : kCounts) {
      ranks.each([&](Comm& comm) {
        Caller caller;
        std::vector<std::vector<int32_t>> ins;
        for (int r = 0; r < n; r++) ins.push_back(piece(comm.rank(), r, count));
        std::vector<int32_t> out(count);
        Operation op = operation(Verb::scatter, out, 0);
        if (comm.rank() == 0) op.ins = pieces(ins);
        comm.run(op, caller);
        CHECK(out == piece(0, comm.rank(), count));
        op = operation(Verb::reduce_scatter, out);
        op.ins = pieces(ins);
        comm.run(op, caller);
        for (size_t i = 0; i < count; i++) {
          int32_t sum = 0;
          for (int r = 0; r < n; r++) sum += element(r, comm.rank(), i);
          CHECK(out[i] == sum);
        }
      });
    }
  }
}

TEST(all_to_all_of_any_sizes) {
  for (const auto& hosts : kShapes) {
    const int n = static_cast<int>(hosts.size());
    Ranks ranks(hosts, small_sizes());
    for (const size_t count : kCounts) {
      for (const bool even : {true, false}) {
        const auto size = [&](int from, int to) {
          return even ? count : count * static_cast<size_t>((from * 3 + to * 5) % 4) / 2;
        };
        ranks.each([&](Comm& comm) {
          Caller caller;
          std::vector<std::vector<int32_t>> ins;
          std::vector<std::vector<int32_t>> outs;
          Operation op{.fingerprint = {.verb = Verb::all_to_all, .dtype = DType::i32}};
          for (int r = 0; r < n; r++) {
            ins.push_back(piece(comm.rank(), r, size(comm.rank(), r)));
            outs.emplace_back(size(r, comm.rank()));
            op.in_bytes.push_back(ins.back().size() * 4);
            op.out_bytes.push_back(outs.back().size() * 4);
          }
          op.ins = pieces(ins);
          op.outs = pieces(outs);
          comm.run(op, caller);
          for (int r = 0; r < n; r++) {
            CHECK(outs[static_cast<size_t>(r)] == piece(r, comm.rank(), size(r, comm.rank())));
          }
        });
      }
    }
  }
}

TEST_PLACED(all_to_all_sizes_that_disagree_raise_everywhere, 3) {
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    Caller caller;
    std::vector<std::vector<int32_t>> ins(3, std::vector<int32_t>(2));
    std::vector<std::vector<int32_t>> outs = ins;
    Operation op{.fingerprint = {.verb = Verb::all_to_all, .dtype = DType::i32},
                 .ins = pieces(ins),
                 .outs = pieces(outs),
                 .in_bytes = {8, 8, 8},
                 .out_bytes = {8, 8, comm.rank() == 1 ? 4u : 8u}};
    try {
      comm.run(op, caller);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.failure.kind == Kind::mismatch);
      CHECK(error.text == "rank 2 sends 8 bytes to rank 1, which expects 4");
    }
  });
}

// More than 8 hosts, so that leaders forward messages, and rings that are too small for the sizes of all ranks.
TEST(disagreements_of_many_raise_everywhere_and_the_group_goes_on) {
  const auto& hosts = kShapes.back();
  const size_t n = hosts.size();
  Ranks ranks(hosts, small_sizes());
  ranks.each([&](Comm& comm) {
    Caller caller;
    std::vector<std::vector<int32_t>> ins(n, std::vector<int32_t>(2));
    std::vector<std::vector<int32_t>> outs = ins;
    Operation op{.fingerprint = {.verb = Verb::all_to_all, .dtype = DType::i32},
                 .ins = pieces(ins),
                 .outs = pieces(outs),
                 .in_bytes = std::vector<size_t>(n, 8),
                 .out_bytes = std::vector<size_t>(n, 8)};
    if (comm.rank() == 1) op.out_bytes[9] = 4;
    if (comm.rank() == 10) op.out_bytes[4] = 0;
    try {
      comm.run(op, caller);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.text == "rank 4 sends 8 bytes to rank 10, which expects 0");
    }
    std::vector<int32_t> v(comm.rank() == 7 ? 3 : 4, 1);
    try {
      comm.run(all_reduce(v), caller);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.failure.kind == Kind::mismatch && error.calls.size() == n);
      for (size_t r = 0; r < n; r++) CHECK(error.calls[r].count == (r == 7 ? 3 : 4));
    }
    v.assign(4, comm.rank());
    comm.run(all_reduce(v), caller);
    CHECK(v == std::vector<int32_t>(4, static_cast<int32_t>(n * (n - 1) / 2)));
  });
}

TEST_PLACED(large_messages_go_round_while_nobody_waits, 4) {
  const int n = 4;
  Ranks ranks(hosts, small_sizes());
  ranks.each([&](Comm& comm) {
    Caller caller;
    const int next = (comm.rank() + 1) % n;
    const int previous = (comm.rank() + n - 1) % n;
    std::vector<std::vector<int32_t>> outgoing;
    std::vector<std::vector<int32_t>> incoming;
    std::vector<std::shared_ptr<Request>> requests;
    for (int k = 0; k < 5; k++) {
      outgoing.push_back(piece(comm.rank(), k, 4000));
      incoming.emplace_back(4000);
    }
    for (int k = 0; k < 5; k++) {
      auto& out = outgoing[static_cast<size_t>(k)];
      auto& in = incoming[static_cast<size_t>(4 - k)];
      requests.push_back(comm.start_send({out.data(), out.size(), DType::i32}, next, k, caller));
      requests.push_back(comm.start_recv({in.data(), in.size(), DType::i32}, previous, 4 - k, caller));
    }
    // Blocking calls while the other messages are in progress.
    int32_t x = comm.rank();
    comm.send({&x, 1, DType::i32}, next, 99, caller);
    comm.recv({&x, 1, DType::i32}, -1, 99, caller);
    CHECK(x == previous);
    // No thread waits for the messages, but all of them must be delivered.
    for (int turn = 0; turn < 1000; turn++) {
      bool all = true;
      for (const auto& r : requests) all = all && r->done;
      if (all) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    for (const auto& r : requests) CHECK(r->done);
    for (size_t i = requests.size(); i-- > 0;) comm.wait(requests[i], caller, -1);
    for (int k = 0; k < 5; k++) CHECK(incoming[static_cast<size_t>(k)] == piece(previous, k, 4000));
  });
}

TEST_PLACED(both_send_first_and_more_than_fits, 2) {
  Ranks ranks(hosts, small_sizes());
  ranks.each([&](Comm& comm) {
    Caller caller;
    const int other = 1 - comm.rank();
    auto out = piece(comm.rank(), other, 5000);
    std::vector<int32_t> in(5000);
    const auto receiving = comm.start_recv({in.data(), in.size(), DType::i32}, other, 0, caller);
    comm.send({out.data(), out.size(), DType::i32}, other, 0, caller);
    comm.wait(receiving, caller, -1);
    CHECK(in == piece(other, comm.rank(), 5000));
  });
}

TEST_PLACED(a_recv_that_waits_for_a_rank_that_leaves_fails, 2) {
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    if (comm.rank() == 1) {
      comm.close();
      return;
    }
    Caller caller;
    int32_t x = 0;
    const auto request = comm.start_recv({&x, 1, DType::i32}, 1, 0, caller);
    try {
      comm.wait(request, caller, -1);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.failure.kind == Kind::left);
      CHECK(error.failure.peer == 1);
    }
  });
}

TEST(closing_ends_messages_under_way) {
  Ranks ranks(2, small_sizes());
  ranks.each([&](Comm& comm) {
    if (comm.rank() == 1) return;
    Caller caller;
    std::vector<int32_t> v(5000);
    const auto sending = comm.start_send({v.data(), v.size(), DType::i32}, 1, 0, caller);
    const auto receiving = comm.start_recv({v.data(), v.size(), DType::i32}, 1, 0, caller);
    comm.close();
    CHECK(sending->done && receiving->done);
    for (const auto& request : {sending, receiving}) {
      try {
        comm.wait(request, caller, -1);
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.failure.kind == Kind::closed);
      }
    }
  });
}

TEST_PLACED(a_wait_for_a_message_with_a_timeout_may_be_repeated, 2) {
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    Caller caller;
    int32_t x = 5;
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      comm.send({&x, 1, DType::i32}, 0, 0, caller);
      return;
    }
    int32_t y = 0;
    const auto request = comm.start_recv({&y, 1, DType::i32}, -1, 0, caller);
    try {
      comm.wait(request, caller, 60'000'000);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.failure.kind == Kind::timeout);
    }
    comm.wait(request, caller, -1);
    CHECK(y == 5);
  });
}
