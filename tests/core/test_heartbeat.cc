// Heartbeats on thousands of networks of simulated hosts: delays, slow links, stopped and dead processes, unreachable
// hosts, ranks that leave.
//
// A seed determines one network and its events. Time is simulated, so all networks take some seconds. If a seed fails,
// the test prints it; ALLRANKS_TEST_HEARTBEAT_SEED=n runs only this seed.
#include <cerrno>
#include <cstdlib>
#include <deque>
#include <map>
#include <random>
#include <set>

#include "channel/heartbeat.h"
#include "ranks.h"

using namespace allranks;
using namespace allranks::test;

namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kTickNs = 50 * kMs;
constexpr int64_t kSilentNs = 15'000 * kMs;  // time after which a kernel reports a host as unreachable
constexpr int64_t kEndNs = 30'000 * kMs;

struct Network;

// One host: the state of its ranks, and the messages that it has received.
struct Node final : Heartbeat::Listener {
  Node(Network& network, int host, const Hosts& hosts)
      : network(network), host(host), heartbeat(host, hosts, *this), own(hosts.on(host).size()) {}

  void on_status(int rank, const Heartbeat::Status& status) override { heard[rank] = status; }
  void on_note(int rank, uint32_t call, const std::string& text) override { notes[rank] = {call, text}; }
  void on_close(int closed) override { closes.insert(closed); }
  void on_end(int, Kind) override {}
  void on_verdict(const Failure& failure) override { condemn(failure); }
  void on_clock(int other, const ClockOffset& offset) override;
  void condemn(const Failure& failure);
  int64_t clock() const;

  Network& network;
  int host;
  Heartbeat heartbeat;
  std::vector<Heartbeat::Status> own;
  std::map<int, Heartbeat::Status> heard;
  std::map<int, std::pair<uint32_t, std::string>> notes;
  std::set<int> closes;
  std::optional<Failure> verdict;
  int64_t condemned_ns = 0;
  int64_t stopped_until = 0;
  int64_t clock_began = 0;  // network time at which its clock showed 0
  int64_t clock_drift = 0;  // its clock gains this many parts per million
  int measured = 0;
  uint32_t noted = 0;  // number of its last notes
  bool gone = false;   // dead, or has left
  bool dead = false;
  bool cut = false;
};

struct Network {
  explicit Network(uint64_t seed) : random(seed) {
    const int count = pick(2, pick(0, 3) == 0 ? 20 : 9);
    std::vector<int> host_of;
    for (int h = 0; h < count; h++) host_of.insert(host_of.end(), static_cast<size_t>(pick(1, 3)), h);
    std::shuffle(host_of.begin(), host_of.end(), random);
    hosts.emplace(host_of);
    for (int h = 0; h < count; h++) {
      nodes.push_back(std::make_unique<Node>(*this, h, *hosts));
      nodes.back()->clock_began = -int64_t{pick(0, 1'000'000)} * 1'000 * kMs;
      nodes.back()->clock_drift = pick(-25, 25);
    }
    for (int h = 0; h < count; h++) {
      neighbours.push_back(Heartbeat::neighbours(h, count));
      for (const int other : neighbours.back()) {
        links[{h, other}].delay = pick(0, 9) == 0 ? pick(100, 400) * kMs : pick(1, 2'000) * kMs / 1'000;
      }
    }
  }

  struct Packet {
    int64_t due;
    std::vector<std::byte> bytes;
    bool end = false;
    int error = 0;
  };
  // One direction of a connection. Packets arrive in order, whatever their delays.
  struct Link {
    int64_t delay = 0;
    std::deque<Packet> packets;
    bool closed = false;  // accepts no more packets
  };

  int pick(int least, int most) { return std::uniform_int_distribution<>(least, most)(random); }
  Node& node(int host) { return *nodes[static_cast<size_t>(host)]; }
  bool up(int a, int b) { return !node(a).cut && !node(b).cut; }

  void close(int from, int to, int error) {
    Link& link = links[{from, to}];
    link.closed = true;
    const int64_t delay = error == 0 ? link.delay + pick(0, 20) * kMs : kSilentNs + pick(0, 1'000) * kMs;
    link.packets.push_back({.due = now + delay, .bytes = {}, .end = true, .error = error});
  }

  // Close the connections to all reachable neighbors, as the kernel does after the leader's process has exited.
  void close_all(Node& node) {
    for (const int other : Heartbeat::neighbours(node.host, hosts->count())) {
      if (up(node.host, other)) close(node.host, other, 0);
    }
  }

  void die(int host) {
    node(host).gone = node(host).dead = true;
    close_all(node(host));
    failed(hosts->leader(host));
  }

  void unplug(int host) {
    node(host).cut = true;
    for (const int other : Heartbeat::neighbours(host, hosts->count())) {
      close(host, other, ETIMEDOUT);
      close(other, host, ETIMEDOUT);
    }
    for (const int r : hosts->on(host)) failed(r);
  }

  void leave(int host) {
    Node& leaving = node(host);
    for (auto& status : leaving.own) status.left = 1;
    leaving.heartbeat.leave(leaving.own);
    send(leaving);
    leaving.gone = true;
    close_all(leaving);
    left.insert(host);
  }

  void failed(int rank) {
    lost.insert(rank);
    if (failed_ns == 0) failed_ns = now;
  }

  void send(Node& from) {
    for (const int to : neighbours[static_cast<size_t>(from.host)]) {
      const auto& outbox = from.heartbeat.outbox(to);
      if (outbox.empty()) continue;
      Link& link = links[{from.host, to}];
      if (link.closed) continue;
      // A stream has no message boundaries, so packets have random sizes.
      for (size_t at = 0; at < outbox.size();) {
        const size_t n = std::min(outbox.size() - at, static_cast<size_t>(pick(1, 2'000)));
        link.packets.push_back({.due = now + link.delay + pick(0, 5) * kMs / 10,
                                .bytes = {outbox.begin() + static_cast<std::ptrdiff_t>(at),
                                          outbox.begin() + static_cast<std::ptrdiff_t>(at + n)}});
        at += n;
      }
      sent_bytes += outbox.size();
      backlog = std::max(backlog, outbox.size());
      from.heartbeat.sent(to, outbox.size());
    }
  }

  // One round: deliver the packets that are due, then send the messages of each node.
  void turn() {
    for (auto& [ends, link] : links) {
      Node& to = node(ends.second);
      while (!link.packets.empty() && link.packets.front().due <= now && now >= to.stopped_until) {
        const Packet packet = std::move(link.packets.front());
        link.packets.pop_front();
        if (to.gone) continue;
        if (packet.end && packet.error != 0) {
          to.heartbeat.ended(ends.first, packet.error);
        } else if (!up(ends.first, ends.second)) {
          continue;  // the packet is lost
        } else if (packet.end) {
          to.heartbeat.ended(ends.first, 0);
        } else {
          to.heartbeat.receive(ends.first, packet.bytes.data(), packet.bytes.size(), to.clock());
        }
      }
    }
    for (auto& node : nodes) {
      if (node->gone || now < node->stopped_until) continue;
      if (now < calls_until && pick(0, 3) == 0) {
        node->own[static_cast<size_t>(pick(0, static_cast<int>(node->own.size()) - 1))].call++;
      }
      node->heartbeat.publish(node->clock(), node->own);
      send(*node);
    }
  }

  std::mt19937_64 random;
  std::optional<Hosts> hosts;
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<std::vector<int>> neighbours;
  std::map<std::pair<int, int>, Link> links;
  int64_t now = kMs;
  int64_t calls_until = 8'000 * kMs;
  int64_t failed_ns = 0;
  std::set<int> lost;  // ranks that are dead, or cannot be reached
  std::set<int> left;  // hosts
  size_t sent_bytes = 0;
  size_t backlog = 0;
};

int64_t Node::clock() const {
  const int64_t runs = network.now - clock_began;
  return runs + network.now / 1'000'000 * clock_drift;
}

void Node::on_clock(int other, const ClockOffset& offset) {
  const auto [ns, error] = offset.at(clock());
  CHECK(std::abs(network.node(other).clock() - clock() - ns) <= error + 100);  // 100 ns for rounding
  CHECK(error < 20'000 * kMs);
  measured++;
}

void Node::condemn(const Failure& failure) {
  heartbeat.condemn(failure);
  if (verdict) return;
  verdict = failure;
  condemned_ns = network.now;
}

// Return the nodes that receive messages of `first`, directly or through other nodes that are alive and reachable.
std::set<int> reached_from(Network& net, int first) {
  std::set<int> found{first};
  std::deque<int> ahead{first};
  while (!ahead.empty()) {
    const int host = ahead.front();
    ahead.pop_front();
    for (const int other : Heartbeat::neighbours(host, net.hosts->count())) {
      const Node& s = net.node(other);
      if (!s.gone && !s.cut && found.insert(other).second) ahead.push_back(other);
    }
  }
  return found;
}

void run(uint64_t seed) {
  Network net(seed);
  const int count = net.hosts->count();
  enum Event { nothing, mate_dies, leader_dies, host_vanishes, leaves, stops, notes };
  struct Planned {
    int64_t at;
    Event event;
    int host;
  };
  std::vector<Planned> plan;
  for (int n = net.pick(0, 4); n > 0; n--) {
    plan.push_back(
        {net.pick(100, 6'000) * kMs, static_cast<Event>(net.pick(mate_dies, notes)), net.pick(0, count - 1)});
  }
  std::sort(plan.begin(), plan.end(), [](const auto& a, const auto& b) { return a.at < b.at; });
  int64_t stop = 0;
  size_t events = 0;
  uint32_t noted = 0;
  for (; net.now < kEndNs; net.now += kTickNs) {
    for (; !plan.empty() && plan.front().at <= net.now; plan.erase(plan.begin())) {
      const auto& [at, event, host] = plan.front();
      Node& s = net.node(host);
      if (s.gone || s.cut) continue;
      events++;
      switch (event) {
        case mate_dies: {
          // The leader detects the death of another rank of its host, unless the leader is stopped. net.cc implements
          // this, so the test calls condemn() directly.
          const int rank = net.hosts->on(host).back();
          if (rank == net.hosts->leader(host) || net.now < s.stopped_until) break;
          net.failed(rank);
          s.condemn({.kind = Kind::died, .peer = rank, .reporter = net.hosts->leader(host)});
          break;
        }
        case leader_dies:
          net.die(host);
          break;
        case host_vanishes:
          net.unplug(host);
          break;
        case leaves:
          if (net.now >= s.stopped_until) net.leave(host);
          break;
        case stops:
          s.stopped_until = net.now + net.pick(100, 12'000) * kMs;
          stop = std::max(stop, s.stopped_until);
          break;
        case notes:
          if (net.now < s.stopped_until) break;
          s.noted = ++noted;
          s.heartbeat.publish_notes(noted, std::vector<std::string>(s.own.size(), "at " + std::to_string(noted)));
          break;
        case nothing:
          break;
      }
    }
    net.turn();
  }

  // Without new events, the nodes stop sending.
  const size_t said = net.sent_bytes;
  for (int i = 0; i < 20; i++, net.now += kTickNs) net.turn();
  CHECK(net.sent_bytes == said);
  // The limit of the bytes that may be queued for one neighbor: a status and notes of every host, and a few short
  // messages.
  CHECK(net.backlog < static_cast<size_t>(net.hosts->ranks()) * 128 + static_cast<size_t>(count) * 128 + 512);

  for (const auto& s : net.nodes) {
    if (!s->verdict) continue;
    // The rank in a verdict is lost, or cannot be reached from the reporter's host.
    const int peer = s->verdict->peer;
    const Node& named = net.node(net.hosts->of(peer));
    const bool from_cut = net.node(net.hosts->of(s->verdict->reporter)).cut;
    CHECK(net.lost.contains(peer) || (from_cut && s->verdict->kind == Kind::unreachable));
    if (s->verdict->kind == Kind::unreachable) CHECK(named.cut || from_cut);
    if (s->verdict->kind == Kind::died) CHECK(net.lost.contains(peer));
    CHECK(net.failed_ns > 0 && s->condemned_ns >= net.failed_ns);
  }
  // Every live node that a neighbor of a lost rank can reach must know of the failure, within the time limit.
  for (const int rank : net.lost) {
    const Node& from = net.node(net.hosts->of(rank));
    std::vector<int> witnesses = Heartbeat::neighbours(from.host, count);
    if (!from.gone && !from.cut) witnesses = {from.host};
    for (const int witness : witnesses) {
      const Node& w = net.node(witness);
      if (w.gone || w.cut) continue;
      for (const int host : reached_from(net, witness)) {
        const Node& s = net.node(host);
        CHECK(s.verdict.has_value());
        // If nodes have left or were stopped, the verdict may be late.
        if (net.left.empty() && stop == 0 && net.lost.size() == 1)
          CHECK(s.condemned_ns - net.failed_ns < kSilentNs + 3'000 * kMs);
      }
    }
  }
  // If no rank was lost, every node has the latest status of every rank, and the last notes of its neighbors, also of
  // those that have left.
  if (net.lost.empty()) {
    for (const auto& s : net.nodes) {
      CHECK(!s->verdict);
      if (s->gone) continue;
      for (const int host : reached_from(net, s->host)) {
        if (host == s->host) continue;
        const auto& ranks = net.hosts->on(host);
        for (size_t p = 0; p < ranks.size(); p++) {
          CHECK(s->heard.contains(ranks[p]));
          CHECK(s->heard.at(ranks[p]).call == net.node(host).own[p].call);
        }
      }
      if (net.left.empty()) CHECK(s->measured >= 8);
      for (const int host : Heartbeat::neighbours(s->host, count)) {
        CHECK(s->closes.contains(host) == net.left.contains(host));
        for (const int rank : net.hosts->on(host)) CHECK(s->notes[rank].first == net.node(host).noted);
      }
    }
  }
}

}  // namespace

TEST(signs_of_life_on_any_network) {
  const char* only = std::getenv("ALLRANKS_TEST_HEARTBEAT_SEED");
  const char* given = std::getenv("ALLRANKS_TEST_HEARTBEAT_SEEDS");
  const uint64_t first = only != nullptr ? std::strtoull(only, nullptr, 10) : 1;
  const uint64_t last = only != nullptr ? first : given != nullptr ? std::strtoull(given, nullptr, 10) : 200;
  for (uint64_t seed = first; seed <= last; seed++) {
    try {
      run(seed);
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(error.what()) +
                               "; again: ALLRANKS_TEST_HEARTBEAT_SEED=" + std::to_string(seed));
    }
  }
}

TEST(every_host_is_near_in_signs_of_life) {
  for (int hosts = 1; hosts <= 300; hosts++) {
    std::set<int> seen{0};
    std::vector<int> edge{0};
    int steps = 0;
    for (; static_cast<int>(seen.size()) < hosts; steps++) {
      std::vector<int> next;
      for (const int h : edge) {
        for (const int other : Heartbeat::neighbours(h, hosts)) {
          const auto theirs = Heartbeat::neighbours(other, hosts);
          CHECK(std::find(theirs.begin(), theirs.end(), h) != theirs.end());
          if (seen.insert(other).second) next.push_back(other);
        }
      }
      CHECK(!next.empty());
      edge = next;
    }
    CHECK(Heartbeat::neighbours(0, hosts).size() <= 18);  // twice log2(300), rounded up: distances 2^k both ways
    CHECK(steps <= (hosts <= 9 ? 2 : 5));
  }
}

TEST(garbage_ends_a_sign_of_life_and_no_more) {
  const Hosts hosts(std::vector<int>{0, 1});
  std::mt19937_64 random(7);
  for (int round = 0; round < 2'000; round++) {
    struct Quiet final : Heartbeat::Listener {
      void on_status(int rank, const Heartbeat::Status&) override { CHECK(rank == 1); }
      void on_note(int rank, uint32_t, const std::string&) override { CHECK(rank == 1); }
      void on_close(int) override {}
      void on_end(int host, Kind how) override { CHECK(host == 1 && how == Kind::unreachable); }
      void on_verdict(const Failure&) override {}
      void on_clock(int, const ClockOffset&) override { CHECK(false); }  // no ping was sent, so no pong is valid
    } quiet;
    Heartbeat heartbeat(0, hosts, quiet);
    std::vector<std::byte> bytes(200);
    for (auto& b : bytes) b = static_cast<std::byte>(random() % (round % 2 == 0 ? 256 : 4));
    heartbeat.receive(1, bytes.data(), bytes.size(), round);
  }
}
