// Messages: random programs compared with a model, and the limit of the memory for received messages without a recv.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>

#include "ranks.h"

using namespace allranks;
using namespace allranks::test;

namespace {

// One message of a program. A program is a list of messages. Each rank executes its sends and recvs in the order of the
// list, so the program finishes whether or not sends wait for their recvs.
struct Planned {
  int from;
  int to;
  int32_t tag;
  size_t count;
  bool waits_sent;      // its send blocks; otherwise the rank waits for it later
  bool waits_received;  // its recv blocks; otherwise the rank waits for it later
  bool any;             // its recv accepts any source
  bool wrong;           // its recv has another size
};

struct Program {
  std::vector<Planned> messages;
  size_t eager;
  Sizes sizes;
};

// Return a random program. Recvs from any source have tags of their own. All messages with such a tag have the same
// size and non-blocking sends, because any of the messages may match any of these recvs.
Program make_program(std::mt19937& random, int ranks) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  Program program;
  const bool large = below(8) == 0;
  program.sizes = below(3) == 0 ? Sizes{} : small_sizes();
  const std::vector<size_t> eagers = {0, 600, 4000, 100'000, 8 << 20};
  program.eager = eagers[below(eagers.size())];
  const std::vector<size_t> counts = {0, 1, 10, 118, 119, 250, 1000, 5000, large ? size_t{700'000} : size_t{20'000}};
  const size_t n = large ? 12 : 20 + below(120);
  for (size_t i = 0; i < n; i++) {
    Planned m{};
    m.from = static_cast<int>(below(static_cast<size_t>(ranks)));
    m.to = (m.from + 1 + static_cast<int>(below(static_cast<size_t>(ranks) - 1))) % ranks;
    m.any = below(5) == 0;
    m.tag = static_cast<int32_t>(below(4)) + (m.any ? 10 : 0);
    m.count = counts[m.any ? static_cast<size_t>(m.tag) % 5 : below(counts.size())];
    m.waits_sent = !m.any && below(3) == 0;
    m.waits_received = below(3) == 0;
    m.wrong = !m.any && below(30) == 0;
    program.messages.push_back(m);
  }
  return program;
}

std::vector<int32_t> contents(size_t message, size_t count) {
  std::vector<int32_t> v(count);
  for (size_t i = 0; i < count; i++) v[i] = static_cast<int32_t>(message * 1'000'003 + i);
  return v;
}

void run_program(const Program& program, const std::vector<int>& hosts, unsigned seed) {
  Ranks ranks(hosts, program.sizes, 8, 0, program.eager);
  ranks.each([&](Comm& comm) {
    Caller caller;
    std::mt19937 random(seed * 31 + static_cast<unsigned>(comm.rank()));
    struct Pending {
      std::shared_ptr<Request> request;
      bool fails;
    };
    std::vector<std::vector<int32_t>> memory(program.messages.size());
    std::vector<int> sources(program.messages.size(), -1);
    std::map<size_t, Pending> pending;
    const auto settle = [&](size_t i) {
      const Pending one = pending.at(i);
      pending.erase(i);
      bool failed = false;
      try {
        comm.wait(one.request, caller, -1);
      } catch (const Error& error) {
        if (error.failure.kind != Kind::mismatch) throw;
        failed = true;
      }
      CHECK(failed == one.fails);
      sources[i] = static_cast<const Message&>(*one.request).peer;
    };
    for (size_t i = 0; i < program.messages.size(); i++) {
      const Planned& m = program.messages[i];
      const bool sends = m.from == comm.rank();
      if (!sends && m.to != comm.rank()) continue;
      memory[i] = sends ? contents(i, m.count) : std::vector<int32_t>(m.count + (m.wrong ? 1 : 0), -1);
      const Buffer buffer{memory[i].data(), memory[i].size(), DType::i32};
      if (sends && m.waits_sent) {
        comm.send(buffer, m.to, m.tag, caller);
      } else if (sends) {
        pending[i] = {comm.start_send(buffer, m.to, m.tag, caller), false};
      } else if (m.waits_received && !m.wrong) {
        sources[i] = comm.recv(buffer, m.any ? -1 : m.from, m.tag, caller);
      } else {
        pending[i] = {comm.start_recv(buffer, m.any ? -1 : m.from, m.tag, caller), m.wrong};
        if (m.waits_received) settle(i);
      }
      // Wait only for recvs here. A wait for a send could deadlock: the peer may reach its recv only after this rank's
      // next call.
      if (random() % 6 == 0 && !pending.empty()) {
        auto it = pending.begin();
        std::advance(it, static_cast<long>(random() % pending.size()));
        const Planned& other = program.messages[it->first];
        if (other.to == comm.rank() && !other.any) settle(it->first);
      }
    }
    while (!pending.empty()) {
      auto it = pending.begin();
      std::advance(it, static_cast<long>(random() % pending.size()));
      settle(it->first);
    }
    // The recvs from one rank with one tag, in their order, must contain its messages in the order of its sends.
    std::map<std::pair<int, int32_t>, std::vector<size_t>> sent;
    for (size_t i = 0; i < program.messages.size(); i++) {
      const Planned& m = program.messages[i];
      if (m.to == comm.rank()) sent[{m.from, m.tag}].push_back(i);
    }
    std::map<std::pair<int, int32_t>, size_t> received;
    for (size_t i = 0; i < program.messages.size(); i++) {
      const Planned& m = program.messages[i];
      if (m.to != comm.rank()) continue;
      const int from = m.any ? sources[i] : m.from;
      const size_t message = sent.at({from, m.tag}).at(received[{from, m.tag}]++);
      CHECK(memory[i] == (m.wrong ? std::vector<int32_t>(m.count + 1, -1) : contents(message, m.count)));
    }
  });
}

int seeds() {
  const char* given = std::getenv("ALLRANKS_TEST_MESSAGE_SEEDS");
  return given != nullptr ? std::atoi(given) : 40;
}

}  // namespace

TEST(random_programs_of_messages) {
  const std::vector<std::vector<int>> shapes = {{0, 0}, {0, 1}, {0, 0, 0}, {0, 1, 0}, {0, 0, 1, 1}, {0, 0, 0, 0}};
  const char* from = std::getenv("ALLRANKS_TEST_MESSAGE_SEED");
  for (int seed = from ? std::atoi(from) : 0; seed < seeds(); seed++) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto& hosts = shapes[random() % shapes.size()];
    const Program program = make_program(random, static_cast<int>(hosts.size()));
    try {
      run_program(program, hosts, static_cast<unsigned>(seed));
    } catch (const Error& error) {
      throw std::runtime_error(
          "seed " + std::to_string(seed) + ": failure " + std::to_string(static_cast<int>(error.failure.kind)) +
          " peer " + std::to_string(error.failure.peer) + " reporter " + std::to_string(error.failure.reporter));
    } catch (const std::exception& error) {
      throw std::runtime_error("seed " + std::to_string(seed) + ": " + error.what());
    }
  }
}

// The receiver accepts messages without a recv only up to the sender's credit. These messages do not block a message
// with another tag.
TEST_PLACED(what_is_kept_for_a_rank_is_bounded, 2) {
  constexpr size_t kMessages = 100;
  constexpr size_t kCount = 2500;
  constexpr size_t kEager = 64 << 10;
  Ranks ranks(hosts, small_sizes(), 20, 0, kEager);
  ranks.each([&](Comm& comm) {
    Caller caller;
    std::vector<std::vector<int32_t>> v;
    for (size_t i = 0; i < kMessages; i++) v.emplace_back(kCount, comm.rank() == 0 ? static_cast<int32_t>(i) : -1);
    int32_t other = comm.rank();
    const Buffer one{&other, 1, DType::i32};
    if (comm.rank() == 0) {
      std::vector<std::shared_ptr<Request>> sends;
      for (auto& x : v) sends.push_back(comm.start_send({x.data(), kCount, DType::i32}, 1, 1, caller));
      comm.send(one, 1, 2, caller);
      comm.recv(one, 1, 2, caller);  // the peer sends this after it has received the message above
      const auto done = std::count_if(sends.begin(), sends.end(), [](const auto& s) { return s->done.load(); });
      CHECK(done == kEager / (kCount * sizeof(int32_t) + 128));  // credit: the payload and 128 bytes per message
      comm.send(one, 1, 3, caller);
      for (const auto& send : sends) comm.wait(send, caller, -1);
    } else {
      comm.recv(one, 0, 2, caller);
      CHECK(other == 0);
      comm.send(one, 0, 2, caller);
      comm.recv(one, 0, 3, caller);
      for (size_t i = 0; i < kMessages; i++) {
        comm.recv({v[i].data(), kCount, DType::i32}, 0, 1, caller);
        CHECK(v[i] == std::vector<int32_t>(kCount, static_cast<int32_t>(i)));
      }
    }
  });
}

TEST_PLACED(two_ranks_may_send_what_they_have_credit_for_first, 2) {
  constexpr size_t kCount = 15'000;
  Ranks ranks(hosts, small_sizes(), 20, 0, 64 << 10);
  ranks.each([&](Comm& comm) {
    Caller caller;
    std::vector<int32_t> mine(kCount, comm.rank());
    std::vector<int32_t> theirs(kCount, -1);
    for (int turn = 0; turn < 5; turn++) {
      comm.send({mine.data(), kCount, DType::i32}, 1 - comm.rank(), 0, caller);
      comm.recv({theirs.data(), kCount, DType::i32}, 1 - comm.rank(), 0, caller);
      CHECK(theirs == std::vector<int32_t>(kCount, 1 - comm.rank()));
    }
  });
}

// If a rank has many bytes to move for other messages, it first releases its caller's locks, even for a small recv.
TEST(who_moves_much_for_others_releases_its_callers_locks) {
  struct Watching final : Caller {
    void release() override { released = true; }
    bool released = false;
  };
  const Sizes sizes{};
  std::vector<sys::Fd> segments;
  for (int r = 0; r < 2; r++) segments.push_back(Shm::create_segment(r, 2, sizes));
  const Shm::Maps maps = Shm::map(2, sizes, segments);
  const auto shm = [&](int rank) { return std::make_unique<Shm>(rank, sizes, maps, Liveness(2)); };
  const auto zero = shm(0);
  const auto one = shm(1);
  constexpr int64_t kTimeoutNs = 20'000'000'000;
  PointToPoint sender(*zero, nullptr, kTimeoutNs, Polling{}, Polling{}, 8 << 20);
  PointToPoint receiver(*one, nullptr, kTimeoutNs, Polling{}, Polling{}, 8 << 20);
  for (const size_t count : {size_t{1000}, size_t{1 << 20}}) {
    std::vector<std::byte> sent(count);
    std::vector<std::byte> received(count);
    int32_t small = 0;
    Caller caller;
    Watching watching;
    const auto large = receiver.post_recv({received.data(), count, DType::u8}, 0, 1, caller);
    const auto send = sender.post_send({sent.data(), count, DType::u8}, 1, 1, caller);
    const auto recv = receiver.post_recv({&small, 1, DType::i32}, 0, 2, watching);
    CHECK(watching.released == (count > 1000));
    std::thread other([&] {
      sender.wait(send, caller, -1);
      sender.wait(sender.post_send({&small, 1, DType::i32}, 1, 2, caller), caller, -1);
    });
    Caller mine;
    receiver.wait(recv, mine, -1);
    receiver.wait(large, mine, -1);
    other.join();
  }
}
