#include "channel/heartbeat.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace allranks {

namespace {

constexpr int kAllConnected = 8;                 // up to this number of hosts, all are connected with each other
constexpr int64_t kPauseNs = 200'000'000;        // minimum time between two statuses of a host
constexpr int64_t kPausePerHostNs = 10'000'000;  // per host, so that all hosts together publish at most 100 per second
constexpr size_t kLongestMessage = 1 << 20;      // bytes; a larger length is invalid
constexpr int kFirstRoundTrips = 8;              // made at the beginning, without a pause, to measure the clock offset

struct MessageHead {
  uint32_t type;
  uint32_t nbytes;
};

// The beginning of a status and of notes.
struct RecordHead {
  uint32_t host;
  uint32_t version;
  uint32_t closed;  // used by status
  uint32_t call;    // used by notes
};

template <class T>
void append(std::vector<std::byte>& to, const T& value) {
  const size_t at = to.size();
  to.resize(at + sizeof value);
  std::memcpy(to.data() + at, &value, sizeof value);
}

template <class T>
T read_at(const std::byte* bytes) {
  T value;
  std::memcpy(static_cast<void*>(&value), bytes, sizeof value);
  return value;
}

bool same(const Heartbeat::Status& a, const Heartbeat::Status& b) {
  return a.call == b.call && a.left == b.left && a.fingerprint.agrees(b.fingerprint) && a.waits == b.waits;
}

}  // namespace

std::vector<int> Heartbeat::neighbours(int host, int hosts) {
  std::vector<int> found;
  for (int other = 0; other < hosts; other++) {
    const int ahead = (other - host + hosts) % hosts;
    const int distance = std::min(ahead, hosts - ahead);
    const auto power_of_two = [](int x) { return x > 0 && (x & (x - 1)) == 0; };
    // Both directions, so that the relation is symmetric: a host that is 2^k ahead of this one finds it 2^k behind.
    const bool near = power_of_two(ahead) || power_of_two(hosts - ahead);
    if (distance > 0 && (hosts <= kAllConnected || near)) found.push_back(other);
  }
  return found;
}

Heartbeat::Heartbeat(int host, const Hosts& hosts, Listener& listener)
    : host_(host),
      hosts_(hosts),
      listener_(listener),
      known_(static_cast<size_t>(hosts.count())),
      pause_ns_(std::max(kPauseNs, kPausePerHostNs * hosts.count())) {
  for (const int h : neighbours(host, hosts.count())) {
    neighbours_.push_back({.host = h,
                           .status_due = std::vector<bool>(known_.size()),
                           .notes_due = std::vector<bool>(known_.size()),
                           .inbox = {},
                           .outbox = {}});
  }
}

const Heartbeat::Neighbour& Heartbeat::at(int host) const {
  return *std::find_if(neighbours_.begin(), neighbours_.end(), [host](const auto& n) { return n.host == host; });
}

// --- messages ---

void Heartbeat::add(Neighbour& to, MessageType type, const Bytes& body) {
  append(to.outbox, MessageHead{static_cast<uint32_t>(type), static_cast<uint32_t>(body.size())});
  to.outbox.insert(to.outbox.end(), body.begin(), body.end());
}

void Heartbeat::store(int host, MessageType type, const Bytes& body) {
  Host& known = known_[static_cast<size_t>(host)];
  const auto head = read_at<RecordHead>(body.data());
  (type == MessageType::status ? known.status : known.notes) = {head.version, body};
  known.closed = known.closed || head.closed != 0;
}

void Heartbeat::spread(const Neighbour* but) {
  for (Neighbour& n : neighbours_) {
    if (n.open && &n != but) send_pending(n);
  }
}

// Queue the records that a neighbor has not received yet, if it has answered the last ping.
void Heartbeat::send_pending(Neighbour& to) {
  if (to.awaits_pong || (!to.dirty && (to.round_trips == 0 || to.round_trips >= kFirstRoundTrips))) return;
  for (size_t h = 0; h < known_.size(); h++) {
    if (to.status_due[h]) add(to, MessageType::status, known_[h].status.body);
    if (to.notes_due[h]) add(to, MessageType::notes, known_[h].notes.body);
    to.status_due[h] = to.notes_due[h] = false;
  }
  add(to, MessageType::ping, {});
  to.dirty = false;
  to.awaits_pong = true;
  to.pinged_ns = now_ns_;
}

void Heartbeat::publish(int64_t now_ns, const std::vector<Status>& statuses) {
  now_ns_ = now_ns;
  const bool first = published_.empty();
  if (!first && now_ns - published_ns_ < pause_ns_) return;
  if (!first && std::equal(published_.begin(), published_.end(), statuses.begin(), same)) return;
  published_ = statuses;
  published_ns_ = now_ns;
  Bytes body;
  append(body, RecordHead{static_cast<uint32_t>(host_), known_[static_cast<size_t>(host_)].status.version + 1, 0, 0});
  for (const Status& status : statuses) append(body, status);
  accept(MessageType::status, body.data(), body.size(), nullptr);
}

void Heartbeat::publish_notes(uint32_t call, const std::vector<std::string>& texts) {
  Bytes body;
  append(body, RecordHead{static_cast<uint32_t>(host_), known_[static_cast<size_t>(host_)].notes.version + 1, 0, call});
  for (const std::string& text : texts) {
    append(body, static_cast<uint32_t>(text.size()));
    for (const char c : text) append(body, c);
  }
  accept(MessageType::notes, body.data(), body.size(), nullptr);
}

void Heartbeat::condemn(const Failure& failure) {
  if (verdict_) return;
  verdict_ = failure;
  Bytes body;
  append(body, failure);
  for (Neighbour& n : neighbours_) {
    if (n.open) add(n, MessageType::verdict, body);  // without waiting for a pong: it is sent only once
  }
}

void Heartbeat::leave(const std::vector<Status>& statuses) {
  Bytes body;
  append(body, RecordHead{static_cast<uint32_t>(host_), known_[static_cast<size_t>(host_)].status.version + 1, 1, 0});
  for (const Status& status : statuses) append(body, status);
  store(host_, MessageType::status, body);
  // Even if a pong is missing, because nothing follows. The notes come first: after the status, no rank waits for them.
  for (Neighbour& n : neighbours_) {
    if (!n.open) continue;
    for (size_t h = 0; h < known_.size(); h++) {
      if (n.notes_due[h]) add(n, MessageType::notes, known_[h].notes.body);
      n.notes_due[h] = false;
    }
    add(n, MessageType::status, body);
  }
}

void Heartbeat::sent(int neighbour, size_t nbytes) {
  Bytes& outbox = at(neighbour).outbox;
  outbox.erase(outbox.begin(), outbox.begin() + static_cast<std::ptrdiff_t>(nbytes));
}

// --- received messages ---

void Heartbeat::receive(int neighbour, const std::byte* bytes, size_t nbytes, int64_t now_ns) {
  now_ns_ = now_ns;
  Neighbour& from = at(neighbour);
  if (!from.open) return;
  from.inbox.insert(from.inbox.end(), bytes, bytes + nbytes);
  size_t at = 0;
  while (from.inbox.size() - at >= sizeof(MessageHead)) {
    const auto head = read_at<MessageHead>(from.inbox.data() + at);
    if (head.nbytes > kLongestMessage) return lose(from, Kind::unreachable);
    if (from.inbox.size() - at < sizeof head + head.nbytes) break;
    if (!receive_message(from, static_cast<MessageType>(head.type), from.inbox.data() + at + sizeof head,
                         head.nbytes)) {
      return lose(from, Kind::unreachable);
    }
    at += sizeof head + head.nbytes;
  }
  from.inbox.erase(from.inbox.begin(), from.inbox.begin() + static_cast<std::ptrdiff_t>(at));
}

// Process a message. Return false if it is not valid.
bool Heartbeat::receive_message(Neighbour& from, MessageType type, const std::byte* body, size_t nbytes) {
  switch (type) {
    case MessageType::ping: {
      Bytes time;
      append(time, now_ns_);
      add(from, MessageType::pong, time);
      return true;
    }
    case MessageType::pong:
      if (!measure(from, body, nbytes)) return false;
      send_pending(from);
      return true;
    case MessageType::verdict:
      if (nbytes != sizeof(Failure)) return false;
      if (!verdict_) {
        const auto failure = read_at<Failure>(body);
        condemn(failure);  // forwards it, because not all hosts are connected with the sender
        listener_.on_verdict(failure);
      }
      return true;
    case MessageType::status:
    case MessageType::notes:
      return accept(type, body, nbytes, &from);
  }
  return false;
}

// Finish a round trip. Return false if the pong is not valid.
bool Heartbeat::measure(Neighbour& from, const std::byte* body, size_t nbytes) {
  if (!from.awaits_pong || nbytes != sizeof(int64_t)) return false;
  const auto theirs_ns = read_at<int64_t>(body);
  if (theirs_ns < 0 || theirs_ns > ClockOffset::kLatestNs) return false;
  from.awaits_pong = false;
  from.round_trips = std::min(from.round_trips + 1, kFirstRoundTrips);
  from.clock.add(from.pinged_ns, theirs_ns, now_ns_);
  listener_.on_clock(from.host, from.clock);
  return true;
}

// Store and forward the record of a host, this one included, if it is newer than the known one. The whole record is
// checked before it is stored. Return false if it is not valid.
bool Heartbeat::accept(MessageType type, const std::byte* body, size_t nbytes, const Neighbour* from) {
  if (nbytes < sizeof(RecordHead)) return false;
  const auto head = read_at<RecordHead>(body);
  // A neighbor may forward a record of this host. It is valid, but never newer than this host's own record.
  if (head.host >= known_.size() || (from != nullptr && head.host == static_cast<uint32_t>(host_))) {
    return head.host < known_.size();
  }
  const int host = static_cast<int>(head.host);
  const auto& ranks = hosts_.on(host);
  const Host& known = known_[head.host];
  const Record& before = type == MessageType::status ? known.status : known.notes;
  if (static_cast<int32_t>(head.version - before.version) <= 0) return true;  // signed, because versions may wrap
  const std::byte* at = body + sizeof head;
  const std::byte* end = body + nbytes;
  std::vector<Status> statuses;
  std::vector<std::string> texts;
  for (size_t p = 0; p < ranks.size(); p++) {
    if (type == MessageType::status) {
      if (end - at < static_cast<std::ptrdiff_t>(sizeof(Status))) return false;
      statuses.push_back(read_at<Status>(at));
      at += sizeof(Status);
      continue;
    }
    if (end - at < static_cast<std::ptrdiff_t>(sizeof(uint32_t))) return false;
    const auto length = read_at<uint32_t>(at);
    at += sizeof length;
    if (end - at < static_cast<std::ptrdiff_t>(length)) return false;
    texts.emplace_back(reinterpret_cast<const char*>(at), length);
    at += length;
  }
  store(host, type, Bytes(body, end));
  for (Neighbour& n : neighbours_) {
    if (!n.open || &n == from) continue;
    (type == MessageType::status ? n.status_due : n.notes_due)[head.host] = true;
    n.dirty = true;
  }
  if (host != host_) {
    for (size_t p = 0; p < statuses.size(); p++) listener_.on_status(ranks[p], statuses[p]);
    for (size_t p = 0; p < texts.size(); p++) listener_.on_note(ranks[p], head.call, texts[p]);
    if (head.closed != 0 && type == MessageType::status) listener_.on_close(host);
  }
  spread(from);
  return true;
}

void Heartbeat::ended(int neighbour, int error) {
  // These errors mean that the kernel of the host does not respond. After any other end, the process has terminated.
  const bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  if (Neighbour& n = at(neighbour); n.open) lose(n, silent ? Kind::unreachable : Kind::died);
}

void Heartbeat::lose(Neighbour& neighbour, Kind how) {
  neighbour.open = false;
  neighbour.inbox.clear();
  neighbour.outbox.clear();
  if (known_[static_cast<size_t>(neighbour.host)].closed) return;  // its leader has left: not a failure
  listener_.on_end(neighbour.host, how);
  if (verdict_) return;
  Failure failure{.kind = how, .peer = hosts_.leader(neighbour.host), .reporter = hosts_.leader(host_)};
  if (!published_.empty()) {
    failure.call = published_.front().call;
    failure.fingerprint = published_.front().fingerprint;
  }
  condemn(failure);
  listener_.on_verdict(failure);
}

}  // namespace allranks
