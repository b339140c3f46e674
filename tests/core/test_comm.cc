#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <set>
#include <stdexcept>

#include "ranks.h"

using namespace allranks;
using namespace allranks::test;

namespace {

// Numbers of float32 elements around each boundary: empty, a call's cache line, a piece, several pieces, a wrapped
// ring.
const std::vector<size_t> kCounts = {0, 1, 25, 26, 27, 127, 128, 129, 200, 256, 257, 1000, 5000};

template <class Body>
Kind kind_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.failure.kind;
  }
  return Kind{};
}

std::vector<float> operand(int rank, size_t count) {
  std::vector<float> v(count);
  for (size_t i = 0; i < count; i++) v[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101);
  return v;
}

}  // namespace

TEST(all_reduce_every_path) {
  for (const auto& hosts : kShapes) {
    const int n = static_cast<int>(hosts.size());
    Ranks ranks(hosts, small_sizes());
    for (int round = 0; round < 3; round++) {
      for (const size_t count : kCounts) {
        ranks.each([&](Comm& comm) {
          auto v = operand(comm.rank(), count);
          Caller caller;
          comm.run(all_reduce(v), caller);
          std::vector<float> expected(count);
          for (int r = 0; r < n; r++) {
            const auto theirs = operand(r, count);
            for (size_t i = 0; i < count; i++) expected[i] += theirs[i];
          }
          CHECK(v == expected);
        });
      }
    }
  }
}

TEST(all_reduce_is_the_same_on_every_rank_and_path) {
  // The sums of these operands depend on the order. The bits are equal only if all ranks and paths use one order.
  const int n = 3;
  const size_t count = 1000;
  std::vector<std::vector<float>> results;
  for (const size_t piece : {512, 4096}) {  // pipelined, then one-shot
    Sizes sizes = small_sizes();
    sizes.piece = piece;
    sizes.ring = 6 * piece;
    Ranks ranks(n, sizes);
    std::vector<std::vector<float>> mine(n);
    ranks.each([&](Comm& comm) {
      auto& v = mine[static_cast<size_t>(comm.rank())];
      for (size_t i = 0; i < count; i++) {
        v.push_back(1.0f / static_cast<float>(i + 1) * (comm.rank() == 0 ? 1e7f : comm.rank() == 1 ? -1e7f : 1.0f));
      }
      Caller caller;
      comm.run(all_reduce(v), caller);
    });
    results.insert(results.end(), mine.begin(), mine.end());
  }
  for (const auto& r : results) CHECK(std::memcmp(r.data(), results[0].data(), count * sizeof(float)) == 0);
}

TEST(all_reduce_between_hosts_has_one_order) {
  // The order is (rank 0 + rank 2) + rank 1 on every rank, for large calls in segments and for small calls.
  const size_t count = 100'000;
  Ranks ranks({0, 1, 0});
  std::vector<std::vector<float>> operands(3);
  for (size_t r = 0; r < 3; r++) {
    for (size_t i = 0; i < count; i++) {
      operands[r].push_back(1.0f / static_cast<float>(i + 1) * (r == 0 ? 1e7f : r == 1 ? -1e7f : 1.0f));
    }
  }
  std::vector<float> expected(count);
  for (size_t i = 0; i < count; i++) expected[i] = (operands[0][i] + operands[2][i]) + operands[1][i];
  ranks.each([&](Comm& comm) {
    auto whole = operands[static_cast<size_t>(comm.rank())];
    std::vector<float> first(whole.begin(), whole.begin() + 1000);
    Caller caller;
    comm.run(all_reduce(whole), caller);
    comm.run(all_reduce(first), caller);
    CHECK(std::memcmp(whole.data(), expected.data(), count * sizeof(float)) == 0);
    CHECK(std::memcmp(first.data(), expected.data(), 1000 * sizeof(float)) == 0);
  });
}

TEST(broadcast_every_path_and_root) {
  for (const auto& hosts : kShapes) {
    const int n = static_cast<int>(hosts.size());
    Ranks ranks(hosts, small_sizes());
    for (int root = 0; root < n; root++) {
      for (const size_t count : kCounts) {
        ranks.each([&](Comm& comm) {
          auto v = operand(comm.rank(), count);
          Caller caller;
          comm.run(broadcast(v, root), caller);
          CHECK(v == operand(root, count));
        });
      }
    }
  }
}

TEST_PLACED(barrier_holds_everybody, 4) {
  const int n = 4;
  Ranks ranks(hosts);
  std::atomic<int> entered = 0;
  ranks.each([&](Comm& comm) {
    Caller caller;
    for (int round = 1; round <= 200; round++) {
      entered++;
      comm.run(barrier(), caller);
      CHECK(entered >= round * n);
      comm.run(barrier(), caller);
    }
  });
}

TEST_PLACED(spinning_and_sleeping_ranks_meet, 2) {
  for (const int64_t spin : {0, 100'000}) {
    Ranks ranks(hosts, {}, 20, spin);
    ranks.each([&](Comm& comm) {
      Caller caller;
      for (int i = 0; i < 2000; i++) {
        std::vector<int32_t> v = {i, comm.rank()};
        comm.run(all_reduce(v), caller);
        CHECK(v[0] == 2 * i);
        CHECK(v[1] == 1);
      }
    });
  }
}

TEST_PLACED(asynchronous_calls_keep_their_order, 3) {
  Ranks ranks(hosts, small_sizes());
  ranks.each([&](Comm& comm) {
    Caller caller;
    std::vector<std::vector<int32_t>> buffers(40);
    std::vector<std::shared_ptr<Request>> requests;
    for (size_t i = 0; i < buffers.size(); i++) {
      buffers[i].assign(1 + i * 20, static_cast<int32_t>(i));
      requests.push_back(comm.start(all_reduce(buffers[i])));
    }
    std::vector<int32_t> last(1, 5);
    comm.run(all_reduce(last), caller);  // a blocking call after the queued ones
    CHECK(last[0] == 15);
    for (size_t i = buffers.size(); i-- > 0;) {
      comm.wait(requests[i], caller, -1);
      for (const int32_t x : buffers[i]) CHECK(x == 3 * static_cast<int32_t>(i));
    }
  });
}

TEST_PLACED(watched_requests_are_told_of_once, 2) {
  constexpr int kCalls = 50;
  std::atomic<uint64_t> tickets = 1;
  std::multiset<uint64_t> told;
  Completions completions;
  Ranks ranks(hosts, small_sizes());
  ranks.each([&](Comm& comm) {
    std::vector<std::vector<float>> operands(kCalls, operand(comm.rank(), 100));
    std::vector<std::shared_ptr<Request>> requests;
    for (auto& v : operands) {
      requests.push_back(comm.start(all_reduce(v)));
      if (requests.size() % 2 == 0) requests.back()->watch(tickets++, completions);
    }
    Caller caller;
    for (auto& request : requests) comm.wait(request, caller, -1);
    for (size_t i = 0; i < requests.size(); i += 2) requests[i]->watch(tickets++, completions);  // already done
  });
  while (told.size() < 2 * kCalls) {
    for (const uint64_t ticket : completions.take(-1)) told.insert(ticket);
  }
  CHECK(completions.take(0).empty());
  for (uint64_t ticket = 1; ticket < tickets; ticket++) CHECK(told.count(ticket) == 1);
}

TEST_PLACED(several_threads_may_wait, 2) {
  Ranks ranks(hosts, small_sizes());
  ranks.each([&](Comm& comm) {
    std::vector<std::vector<int32_t>> buffers(30, std::vector<int32_t>(300, 1));
    std::vector<std::shared_ptr<Request>> requests;
    for (auto& b : buffers) requests.push_back(comm.start(all_reduce(b)));
    std::vector<std::thread> threads;
    std::atomic<int> good = 0;
    for (size_t t = 0; t < 3; t++) {
      threads.emplace_back([&, t] {
        Caller caller;
        for (size_t i = t; i < requests.size(); i += 3) {
          comm.wait(requests[i], caller, -1);
          good += buffers[i][299] == 2;
        }
      });
    }
    for (auto& t : threads) t.join();
    CHECK(good == 30);
  });
}

TEST_PLACED(mismatches_raise_everywhere_and_the_group_goes_on, 3) {
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    Caller caller;
    std::vector<float> v(comm.rank() == 2 ? 5 : 4, 1.0f);
    const auto before = v;
    try {
      comm.run(all_reduce(v), caller);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.failure.kind == Kind::mismatch);
      CHECK(error.calls.size() == 3);
      CHECK(error.calls[0].count == 4 && error.calls[2].count == 5);
    }
    CHECK(v == before);
    std::vector<float> w(1, 1.0f);
    CHECK(kind_of([&] { comm.run(comm.rank() == 0 ? all_reduce(w, ReduceOp::max) : all_reduce(w), caller); }) ==
          Kind::mismatch);
    CHECK(kind_of([&] { comm.run(comm.rank() == 0 ? barrier() : all_reduce(w), caller); }) == Kind::mismatch);
    CHECK(kind_of([&] { comm.run(broadcast(w, comm.rank() == 1), caller); }) == Kind::mismatch);
    CHECK(w[0] == 1.0f);
    comm.run(all_reduce(w), caller);
    CHECK(w[0] == 3.0f);
  });
}

TEST_PLACED(a_rank_that_leaves_is_named, 3) {
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    Caller caller;
    comm.run(barrier(), caller);
    if (comm.rank() == 1) {
      comm.close();
      return;
    }
    for (int again = 0; again < 2; again++) {
      try {
        comm.run(barrier(), caller);
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.failure.kind == Kind::left);
        CHECK(error.failure.peer == 1);
      }
    }
  });
}

TEST_PLACED(a_rank_that_never_comes_is_named, 3) {
  Ranks ranks(hosts, {}, 0.8);
  ranks.each([&](Comm& comm) {
    if (comm.rank() == 2) return;
    Caller caller;
    try {
      comm.run(barrier(), caller);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.failure.kind == Kind::timeout);
      CHECK(error.failure.peer == 2);
      CHECK(error.waiting_for == std::vector<int>{2});
    }
  });
}

TEST(each_step_of_a_large_call_has_the_whole_timeout) {
  constexpr int64_t kTimeoutNs = 800'000'000;
  Ranks ranks(2);
  ranks.each([&](Comm& comm) {
    Caller caller;
    const std::string site;
    LocalComm::Call call{.number = 1,
                         .patience = {.caller = caller, .timeout_ns = kTimeoutNs, .polling = {}},
                         .about = {},
                         .site = site};
    for (uint32_t step = 1; step <= 6; step++) {
      if (comm.rank() == 1) {
        std::this_thread::sleep_for(std::chrono::nanoseconds(kTimeoutNs / 4));
        comm.local_comm().post_step_to_any(step);
      } else {
        step % 2 == 0 ? comm.local_comm().wait_step_of_all(call, 0) : comm.local_comm().wait_step_of(call, 1, step);
      }
    }
  });
}

TEST_PLACED(memory_that_runs_short_within_a_call_ends_the_group, 2) {
  struct Poor : Caller {
    void release() override { throw std::bad_alloc(); }
  };
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    Caller rich;
    Poor poor;
    if (comm.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    Caller& caller = comm.rank() == 0 ? rich : poor;
    try {
      comm.run(barrier(), caller);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.failure.kind == Kind::memory);
      CHECK(error.failure.peer == 1);
    }
  });
}

TEST(a_sleeper_whose_condition_throws_is_not_counted_for_ever) {
  Ranks ranks(1);
  Shm& shm = ranks.comms[0]->local_comm().shm();
  Caller caller;
  Patience patience{.caller = caller, .timeout_ns = 1'000'000'000, .polling = {}};
  bool thrown = false;
  try {
    shm.wait(shm.bell(0), patience, Failure{}, [&] {
      if (shm.bell(0).sleepers.load() != 0) throw std::runtime_error("while asleep");
      return 0;
    });
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  CHECK(thrown);
  CHECK(shm.bell(0).sleepers.load() == 0);
}

TEST_PLACED(closing_ends_pending_calls, 2) {
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    if (comm.rank() == 1) return;
    std::vector<float> v(1);
    const auto request = comm.start(all_reduce(v));
    const auto queued = comm.start(all_reduce(v));
    comm.close();
    Caller caller;
    CHECK(kind_of([&] { comm.wait(request, caller, -1); }) == Kind::closed);
    CHECK(kind_of([&] { comm.wait(queued, caller, -1); }) == Kind::closed);
    CHECK(kind_of([&] { comm.start(all_reduce(v)); }) == Kind::closed);
  });
}

TEST_PLACED(a_wait_with_a_timeout_may_be_repeated, 2) {
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    Caller caller;
    std::vector<float> v(1, 1.0f);
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const auto request = comm.start(all_reduce(v));
    if (comm.rank() == 0) CHECK(kind_of([&] { comm.wait(request, caller, 50'000'000); }) == Kind::timeout);
    comm.wait(request, caller, -1);
    CHECK(v[0] == 2.0f);
  });
}

TEST_PLACED(an_interrupted_call_fails_everywhere, 3) {
  struct Interrupted : Caller {
    bool interrupted() override { return true; }
  };
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    if (comm.rank() == 2) return;
    Caller patient;
    Interrupted impatient;
    Caller& caller = comm.rank() == 0 ? patient : impatient;
    try {
      comm.run(barrier(), caller);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.failure.kind == Kind::interrupted);
      CHECK(error.failure.peer == 1);
    }
  });
}

TEST_PLACED(send_and_recv, 3) {
  Ranks ranks(hosts, small_sizes());
  ranks.each([&](Comm& comm) {
    Caller caller;
    const int next = (comm.rank() + 1) % 3;
    const int previous = (comm.rank() + 2) % 3;
    // All ranks send first. A message that fits into the pipe is buffered, so no send blocks.
    std::vector<int32_t> small(10, comm.rank());
    comm.send({small.data(), small.size(), DType::i32}, next, 0, caller);
    comm.recv({small.data(), small.size(), DType::i32}, previous, 0, caller);
    CHECK(small[9] == previous);
    // Messages up to sizes larger than the pipe, one after the other.
    for (const size_t count : {0, 1, 1000, 5000}) {
      std::vector<int32_t> v(count, comm.rank());
      if (comm.rank() == 0) {
        comm.send({v.data(), count, DType::i32}, 1, 7, caller);
      } else if (comm.rank() == 1) {
        CHECK(comm.recv({v.data(), count, DType::i32}, -1, 7, caller) == 0);
        for (const int32_t x : v) CHECK(x == 0);
      }
    }
  });
}

TEST_PLACED(tags_find_their_message, 2) {
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    Caller caller;
    int32_t x = 0;
    const Buffer one{&x, 1, DType::i32};
    if (comm.rank() == 0) {
      for (const int32_t tag : {1, 2, 3, 1}) {
        x = tag * 10 + (tag == 1 ? x : 0);
        comm.send(one, 1, tag, caller);
      }
    } else {
      comm.recv(one, 0, 3, caller);
      CHECK(x == 30);
      comm.recv(one, 0, 1, caller);
      CHECK(x == 10);
      comm.recv(one, 0, 1, caller);
      CHECK(x == 40);
      comm.recv(one, 0, 2, caller);
      CHECK(x == 20);
    }
  });
}

TEST_PLACED(recv_of_the_wrong_size_is_refused_and_the_next_is_found, 2) {
  Ranks ranks(hosts, small_sizes());
  ranks.each([&](Comm& comm) {
    Caller caller;
    std::vector<float> v(1000, 3.0f);
    if (comm.rank() == 0) {
      comm.send({v.data(), 1000, DType::f32}, 1, 0, caller);
      comm.send({v.data(), 4, DType::i32}, 1, 0, caller);
      comm.send({v.data(), 1, DType::f32}, 1, 0, caller);
    } else {
      float x[4] = {};
      CHECK(kind_of([&] { comm.recv({x, 4, DType::f32}, 0, 0, caller); }) == Kind::mismatch);
      CHECK(kind_of([&] { comm.recv({x, 4, DType::f32}, 0, 0, caller); }) == Kind::mismatch);
      CHECK(x[0] == 0);
      comm.recv({x, 1, DType::f32}, 0, 0, caller);
      CHECK(x[0] == 3.0f);
    }
  });
}

TEST(call_numbers_wrap) {
  // Ranks only compare steps, so a start just before 2^32 is valid. The comparisons must be correct for steps that are
  // far apart, and after the overflow.
  Ranks ranks(2, small_sizes());
  for (auto& comm : ranks.comms) {
    comm->local_comm().base_step = 0xfffffffd;
    comm->local_comm().shm().step_line(comm->rank()).done = 0xfffffffd;
  }
  ranks.each([&](Comm& comm) {
    Caller caller;
    std::vector<float> v(3000, 1.0f);
    for (int i = 0; i < 3; i++) comm.run(all_reduce(v), caller);
    CHECK(v[2999] == 8.0f);
  });
}

TEST_PLACED(an_interrupted_wait_ends_the_request_first, 2) {
  // The progress thread is executing a request when the signal arrives.
  struct Interrupted : Caller {
    bool interrupted() override { return true; }
  };
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    if (comm.rank() == 1) return;
    std::vector<float> v(1);
    const auto running = comm.start(all_reduce(v));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto queued = comm.start(all_reduce(v));
    Interrupted caller;
    CHECK(kind_of([&] { comm.wait(queued, caller, -1); }) == Kind::interrupted);
    CHECK(queued->done && running->done);
  });
}

TEST_PLACED(a_call_that_nobody_waits_for_ends, 3) {
  // The pauses cover three states of the progress thread: newly started, polling for calls, and sleeping.
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    std::vector<float> v(1, 1.0f);
    Caller caller;
    for (const int pause_ms : {0, 0, 30, 0, 30}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
      const auto request = comm.start(all_reduce(v));
      while (!request->done) std::this_thread::yield();
      const auto waited = comm.start(all_reduce(v));  // a call that either thread may execute
      comm.wait(waited, caller, -1);
    }
    CHECK(v[0] == 59049.0f);  // 3^10: ten calls of three ranks
  });
}

TEST_PLACED(a_wait_with_a_limit_leaves_the_call_to_the_progress_thread, 2) {
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    std::vector<float> v(1, 1.0f);
    Caller caller;
    for (int i = 0; i < 50; i++) {
      if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      comm.wait(comm.start(barrier()), caller, 10'000'000'000);
    }
  });
}

TEST_PLACED(threads_start_and_wait_at_once, 2) {
  // All calls are equal, so their order within a rank does not matter.
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    std::vector<std::thread> threads;
    std::atomic<int> ended = 0;
    for (int t = 0; t < 4; t++) {
      threads.emplace_back([&, t] {
        Caller caller;
        for (int i = 0; i < 100; i++) {
          const bool queued = (i + t) % 3 != 0;
          const auto request = queued ? comm.start(barrier()) : nullptr;
          if (!queued) {
            comm.run(barrier(), caller);
          } else if (i % 5 == 0) {
            while (!request->done) std::this_thread::yield();
          } else {
            comm.wait(request, caller, i % 2 == 0 ? -1 : 10'000'000'000);
          }
          ended++;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(ended == 400);
  });
}

TEST_PLACED(closing_ends_a_call_that_was_left_to_its_caller, 2) {
  Ranks ranks(hosts);
  ranks.each([&](Comm& comm) {
    std::vector<float> v(1);
    Caller caller;
    comm.wait(comm.start(all_reduce(v)), caller, -1);
    const auto request = comm.start(barrier());
    comm.close();
    CHECK(request->done);
  });
}
