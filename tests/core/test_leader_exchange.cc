// The exchange between leaders without the rest of a group: up to 24 hosts on slow streams, and a peer that sends
// invalid bytes.
//
// A seed determines the hosts, their messages and the sizes of the streams. If a seed fails, the test prints it.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <random>

#include "collective/leader_exchange.h"
#include "ranks.h"

using namespace allranks;
using namespace allranks::test;

namespace {

constexpr uint32_t kCall = 7;

struct HostMessage {
  std::vector<std::byte> head;
  std::vector<std::byte> body;
};

HostMessage made_up(std::mt19937_64& random, size_t fingerprints, size_t nbytes, uint32_t call = kCall) {
  Opening opening{.call = call,
                  .each = static_cast<uint32_t>(fingerprints),
                  .nbytes = nbytes,
                  .fingerprint = {.count = 5},
                  .arrival = {.last = 0}};
  HostMessage made{std::vector<std::byte>(opening.head_bytes()), std::vector<std::byte>(nbytes)};
  for (auto& b : made.head) b = static_cast<std::byte>(random());
  for (auto& b : made.body) b = static_cast<std::byte>(random());
  std::memcpy(made.head.data(), &opening, sizeof opening);
  return made;
}

// The streams between hosts. Each holds only a few bytes, like an almost full socket buffer.
struct Network {
  Network(int hosts, size_t room) : room(room), wires(static_cast<size_t>(hosts * hosts)), hosts(hosts) {}

  int64_t clock(int host) const { return clocks[static_cast<size_t>(host)]; }

  std::deque<std::byte>& wire(int from, int to) { return wires[static_cast<size_t>(from * hosts + to)]; }

  const size_t room;
  std::vector<std::deque<std::byte>> wires;
  const int hosts;
  // The clock of each host, and the maximum error of the other hosts' estimates of it.
  std::vector<int64_t> clocks = std::vector<int64_t>(static_cast<size_t>(hosts));
  int64_t clock_error_ns = 0;
  std::mutex mutex;
  std::condition_variable changed;
};

class Streams final : public LeaderStreams {
 public:
  Streams(Network& network, int here) : network_(network), here_(here) {}

  void send(int host, const void* data, size_t nbytes) override {
    if (nbytes > 0) out_[host].push_back({static_cast<const std::byte*>(data), nbytes});
  }
  uint64_t receive(int host, void* data, size_t nbytes) override {
    In& in = in_[host];
    if (nbytes > 0) in.places.push_back({static_cast<std::byte*>(data), nbytes});
    return in.asked += nbytes;
  }
  void wait_received(int host, uint64_t until) override {
    wait([&] { return in_[host].come >= until; });
  }
  void flush() override {
    wait([&] {
      for (const auto& [host, parts] : out_) {
        if (!parts.empty()) return false;
      }
      for (const auto& [host, in] : in_) {
        if (!in.places.empty()) return false;
      }
      return true;
    });
  }
  ClockOffset::Estimate clock_of(int host) override {
    const int64_t error = network_.clock_error_ns;
    const int64_t wrong = error == 0 ? 0 : (host * 7 + here_ * 3) % 5 * error / 2 - error;
    return {network_.clock(host) - network_.clock(here_) + wrong, error};
  }

 private:
  template <class Data>
  struct Part {
    Data* data;
    size_t nbytes;
  };
  struct In {
    std::deque<Part<std::byte>> places;
    uint64_t asked = 0;
    uint64_t come = 0;
  };

  template <class Done>
  void wait(Done&& done) {
    std::unique_lock lock(network_.mutex);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (move(), !done()) CHECK(network_.changed.wait_until(lock, until) == std::cv_status::no_timeout);
  }

  void move() {
    bool moved = false;
    for (auto& [host, parts] : out_) {
      auto& wire = network_.wire(here_, host);
      for (; !parts.empty() && wire.size() < network_.room; moved = true) {
        wire.push_back(*parts.front().data++);
        if (--parts.front().nbytes == 0) parts.pop_front();
      }
    }
    for (auto& [host, in] : in_) {
      auto& wire = network_.wire(host, here_);
      for (; !in.places.empty() && !wire.empty(); moved = true) {
        *in.places.front().data++ = wire.front();
        wire.pop_front();
        in.come++;
        if (--in.places.front().nbytes == 0) in.places.pop_front();
      }
    }
    if (moved) network_.changed.notify_all();
  }

  Network& network_;
  const int here_;
  std::map<int, std::deque<Part<const std::byte>>> out_;
  std::map<int, In> in_;
};

void all_get_all(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](size_t low, size_t high) { return low + random() % (high - low + 1); };
  const int count = static_cast<int>(pick(1, 3) == 1 ? pick(9, 24) : pick(1, 8));
  std::vector<int> host_of(static_cast<size_t>(count));
  std::iota(host_of.begin(), host_of.end(), 0);
  const Hosts hosts(host_of);
  Network network(count, pick(8, 300));
  const bool agree = pick(0, 1) == 0;
  std::vector<HostMessage> messages;
  for (int h = 0; h < count; h++) messages.push_back(made_up(random, agree ? 0 : pick(0, 1), pick(0, 200)));
  const bool all_agree = std::all_of(messages.begin(), messages.end(),
                                     [](const HostMessage& m) { return m.head.size() == sizeof(Opening); });
  const bool wants = count <= 8 && pick(0, 1) == 0;
  std::vector<std::string> errors(static_cast<size_t>(count));
  std::vector<std::thread> leaders;
  for (int here = 0; here < count; here++) {
    leaders.emplace_back([&, here] {
      try {
        LeaderExchange exchange(hosts, here);
        Streams streams(network, here);
        std::vector<std::vector<std::byte>> places(static_cast<size_t>(count), std::vector<std::byte>(400));
        const auto into = [&](int host) { return places[static_cast<size_t>(host)].data(); };
        for (int again = 0; again < 2; again++) {
          const HostMessage& own = messages[static_cast<size_t>(here)];
          const auto got = exchange.run(streams, {own.head.data(), own.body.data()},
                                        wants ? LeaderExchange::Into(into) : LeaderExchange::Into());
          CHECK(got.size() == messages.size());
          for (size_t h = 0; h < got.size(); h++) {
            const HostMessage& want = messages[h];
            CHECK(std::memcmp(got[h].head, want.head.data(), want.head.size()) == 0);
            CHECK(want.body.empty() || std::memcmp(got[h].body, want.body.data(), want.body.size()) == 0);
            if (static_cast<int>(h) != here) CHECK((got[h].body == places[h].data()) == (wants && all_agree));
          }
        }
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(here)] = error.what();
      }
    });
  }
  for (auto& leader : leaders) leader.join();
  for (const auto& error : errors) {
    if (!error.empty()) throw std::runtime_error(error);
  }
}

// Check which rank each leader finds to be the last to arrive. Hosts have different clocks, and their last ranks arrive
// at random times.
void who_came_last(uint64_t seed) {
  constexpr int64_t kUs = 1'000;
  std::mt19937_64 random(seed);
  const auto pick = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const int count = static_cast<int>(pick(1, 3) == 1 ? pick(9, 24) : pick(2, 8));
  std::vector<int> host_of(static_cast<size_t>(count));
  std::iota(host_of.begin(), host_of.end(), 0);
  const Hosts hosts(host_of);
  Network network(count, 300);
  network.clock_error_ns = 20 * kUs;
  std::vector<int64_t> came;
  std::vector<HostMessage> messages;
  const int64_t apart = pick(0, 1) == 0 ? 200 * kUs : 10'000 * kUs;
  for (int h = 0; h < count; h++) {
    network.clocks[static_cast<size_t>(h)] = pick(0, 1'000'000'000) * 1'000'000;
    came.push_back(pick(0, apart));
    messages.push_back(made_up(random, 0, 10));
    Opening opening = Opening::of(messages.back().head.data());
    opening.arrival = {.met_ns = network.clock(h) + came.back(), .late_ns = pick(1, 1'000) * kUs, .last = h};
    std::memcpy(messages.back().head.data(), &opening, sizeof opening);
  }
  const auto last = static_cast<int>(std::max_element(came.begin(), came.end()) - came.begin());
  int64_t late = Opening::of(messages[static_cast<size_t>(last)].head.data()).arrival.late_ns;
  int64_t ahead = INT64_MAX;
  for (int h = 0; h < count; h++) {
    if (h != last) ahead = std::min(ahead, came[static_cast<size_t>(last)] - came[static_cast<size_t>(h)]);
  }
  late = std::min(late, ahead);
  std::vector<LastArrival> found(static_cast<size_t>(count));
  std::vector<std::thread> leaders;
  for (int here = 0; here < count; here++) {
    leaders.emplace_back([&, here] {
      LeaderExchange exchange(hosts, here);
      Streams streams(network, here);
      const HostMessage& own = messages[static_cast<size_t>(here)];
      found[static_cast<size_t>(here)] = last_of(exchange.run(streams, {own.head.data(), own.body.data()}, {}));
    });
  }
  for (auto& leader : leaders) leader.join();
  const int64_t hops = count <= 8 ? 1 : 5;  // rounds between up to 24 hosts; each round adds a clock's error
  const int64_t error = network.clock_error_ns * hops;
  for (int here = 0; here < count; here++) {
    const LastArrival& a = found[static_cast<size_t>(here)];
    CHECK(a.last == last || (a.last == -1 && ahead <= 4 * error));
    CHECK(std::abs(a.met_ns - network.clock(here) - came[static_cast<size_t>(last)]) <= 2 * error);
    if (a.last >= 0) CHECK(std::abs(a.late_ns - late) <= 2 * error);
  }
}

// Streams with the bytes of the other hosts already in them. Sent bytes are dropped.
class Written final : public LeaderStreams {
 public:
  explicit Written(std::map<int, std::vector<std::byte>> bytes) : bytes_(std::move(bytes)) {}

  void send(int, const void*, size_t) override {}
  uint64_t receive(int host, void* data, size_t nbytes) override {
    auto& all = bytes_[host];
    size_t& at = at_[host];
    if (all.size() - at < nbytes) throw Error("nothing more");
    if (nbytes > 0) std::memcpy(data, all.data() + at, nbytes);
    return at += nbytes;
  }
  void wait_received(int, uint64_t) override {}
  void flush() override {}
  ClockOffset::Estimate clock_of(int) override { return {}; }

 private:
  std::map<int, std::vector<std::byte>> bytes_;
  std::map<int, size_t> at_;
};

void append(std::vector<std::byte>& to, const void* data, size_t nbytes) {
  const auto* bytes = static_cast<const std::byte*>(data);
  to.insert(to.end(), bytes, bytes + nbytes);
}

// Return the bytes that host 0 receives, by sending host.
std::map<int, std::vector<std::byte>> sent_to_first(const std::vector<HostMessage>& messages) {
  const int count = static_cast<int>(messages.size());
  std::map<int, std::vector<std::byte>> bytes;
  if (count <= 8) {
    for (int h = 1; h < count; h++) {
      append(bytes[h], messages[static_cast<size_t>(h)].head.data(), messages[static_cast<size_t>(h)].head.size());
      append(bytes[h], messages[static_cast<size_t>(h)].body.data(), messages[static_cast<size_t>(h)].body.size());
    }
    return bytes;
  }
  for (int distance = 1; distance < count; distance *= 2) {
    std::vector<std::byte> several;
    for (int i = 0; i < std::min(distance, count - distance); i++) {
      const HostMessage& each = messages[static_cast<size_t>((distance + i) % count)];
      append(several, each.head.data(), each.head.size());
      append(several, each.body.data(), each.body.size());
    }
    const uint64_t length = several.size();
    append(bytes[distance], &length, sizeof length);
    append(bytes[distance], several.data(), several.size());
  }
  return bytes;
}

std::string outcome(const std::vector<HostMessage>& messages, std::map<int, std::vector<std::byte>> bytes) {
  std::vector<int> host_of(messages.size());
  std::iota(host_of.begin(), host_of.end(), 0);
  const Hosts hosts(host_of);
  LeaderExchange exchange(hosts, 0);
  Written streams(std::move(bytes));
  try {
    const auto got = exchange.run(streams, {messages[0].head.data(), messages[0].body.data()}, {});
    size_t sum = 0;  // read all bytes that the messages claim to have
    for (const auto& each : got) {
      const Opening opening = Opening::of(each.head);
      for (size_t i = 0; i < opening.head_bytes(); i++) sum += static_cast<size_t>(each.head[i]);
      for (size_t i = 0; i < opening.nbytes; i++) sum += static_cast<size_t>(each.body[i]);
    }
    return sum == 0 ? "nothing" : "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

TEST(leaders_all_get_all_messages) {
  for (uint64_t seed = 1; seed <= 60; seed++) {
    try {
      all_get_all(seed);
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(error.what()) + "; seed " + std::to_string(seed));
    }
  }
}

TEST(leaders_find_out_who_came_last) {
  for (uint64_t seed = 1; seed <= 60; seed++) {
    try {
      who_came_last(seed);
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(error.what()) + "; seed " + std::to_string(seed));
    }
  }
}

TEST(where_a_clock_is_not_known_nobody_came_last) {
  std::mt19937_64 random(1);
  HostMessage mine = made_up(random, 0, 0);
  HostMessage theirs = made_up(random, 0, 0);
  Opening opening = Opening::of(theirs.head.data());
  opening.arrival = {.met_ns = 5, .error_ns = ClockOffset::kUnknownNs, .last = 1};
  std::memcpy(theirs.head.data(), &opening, sizeof opening);
  const LastArrival found = last_of({{mine.head.data(), mine.body.data()}, {theirs.head.data(), theirs.body.data()}});
  CHECK(found.last == -1 && found.met_ns == 0);
}

TEST(a_leader_at_another_call_is_named) {
  for (const int count : {2, 8, 9, 20}) {
    std::mt19937_64 random(1);
    std::vector<HostMessage> messages;
    for (int h = 0; h < count; h++) messages.push_back(made_up(random, 0, 10, h == 1 ? kCall + 1 : kCall));
    CHECK(outcome(messages, sent_to_first(messages)) ==
          "rank 1 is at call 8, this rank at call 7: the data from the network is corrupt");
  }
}

TEST(lengths_that_another_host_states_have_a_limit) {
  std::mt19937_64 random(1);
  for (const int count : {2, 20}) {
    std::vector<HostMessage> messages;
    for (int h = 0; h < count; h++) messages.push_back(made_up(random, 0, 10));
    Opening opening = Opening::of(messages[1].head.data());
    opening.nbytes = uint64_t{1} << 40;
    std::memcpy(messages[1].head.data(), &opening, sizeof opening);
    CHECK(outcome(messages, sent_to_first(messages)).find("the data from the network is corrupt") != std::string::npos);
  }
  std::vector<HostMessage> messages;
  for (int h = 0; h < 20; h++) messages.push_back(made_up(random, 0, 10));
  auto bytes = sent_to_first(messages);
  const uint64_t much = uint64_t{1} << 50;
  std::memcpy(bytes[1].data(), &much, sizeof much);
  CHECK(outcome(messages, bytes).starts_with("rank 1 announces 1125899906842624 bytes"));
  const uint64_t little = sizeof(Opening) - 1;
  std::memcpy(bytes[1].data(), &little, sizeof little);
  CHECK(outcome(messages, bytes) == "the message of host 1 is truncated");
  const uint64_t shorter = messages[1].head.size() + messages[1].body.size() - 1;
  std::memcpy(bytes[1].data(), &shorter, sizeof shorter);
  CHECK(outcome(messages, bytes) == "the message of host 1 is truncated");
}

// Invalid bytes must result in readable messages or in an Error. The address sanitizer checks all reads.
TEST(leaders_read_changed_bytes_safely) {
  size_t refused = 0;
  for (uint64_t seed = 1; seed <= 3000; seed++) {
    std::mt19937_64 random(seed);
    const size_t count = random() % 2 == 0 ? 2 + random() % 7 : 9 + random() % 12;
    std::vector<HostMessage> messages;
    for (size_t h = 0; h < count; h++) messages.push_back(made_up(random, random() % 2, random() % 100));
    auto bytes = sent_to_first(messages);
    auto& hit = std::next(bytes.begin(), static_cast<long>(random() % bytes.size()))->second;
    for (size_t changes = 1 + random() % 3; changes > 0; changes--) {
      hit[random() % hit.size()] ^= static_cast<std::byte>(1 << random() % 8);
    }
    if (random() % 4 == 0) hit.resize(random() % hit.size());
    refused += outcome(messages, bytes).empty() ? 0 : 1;
  }
  CHECK(refused > 300 && refused < 3000);
}
