#include "channel/pulse.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace allranks {

namespace {

constexpr int kAllConnected = 8;  // hosts
constexpr int64_t kPauseNs = 200'000'000;
constexpr int64_t kPausePerHostNs = 10'000'000;
constexpr size_t kLongestWord = 1 << 20;

struct WordHead {
  uint32_t word;
  uint32_t nbytes;
};

// What stands first in a status and in notes.
struct RecordHead {
  uint32_t host;
  uint32_t version;
  uint32_t closed;  // of a status
  uint32_t call;    // of notes
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

bool same(const Pulse::Status& a, const Pulse::Status& b) {
  return a.call == b.call && a.left == b.left && a.fingerprint.agrees(b.fingerprint) && a.waits == b.waits;
}

}  // namespace

std::vector<int> Pulse::neighbours(int host, int hosts) {
  std::vector<int> found;
  for (int other = 0; other < hosts; other++) {
    const int ahead = (other - host + hosts) % hosts;
    const int distance = std::min(ahead, hosts - ahead);
    const auto power_of_two = [](int x) { return x > 0 && (x & (x - 1)) == 0; };
    // Either way round: where others count this host as so far ahead, this one counts them as so far behind.
    const bool near = power_of_two(ahead) || power_of_two(hosts - ahead);
    if (distance > 0 && (hosts <= kAllConnected || near)) found.push_back(other);
  }
  return found;
}

Pulse::Pulse(int host, const Hosts& hosts, Listener& listener)
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

const Pulse::Neighbour& Pulse::at(int host) const {
  return *std::find_if(neighbours_.begin(), neighbours_.end(), [host](const auto& n) { return n.host == host; });
}

// --- what is said ---

void Pulse::add(Neighbour& to, Word word, const Bytes& body) {
  append(to.outbox, WordHead{static_cast<uint32_t>(word), static_cast<uint32_t>(body.size())});
  to.outbox.insert(to.outbox.end(), body.begin(), body.end());
}

void Pulse::learn(int host, Word word, const Bytes& body) {
  Host& known = known_[static_cast<size_t>(host)];
  const auto head = read_at<RecordHead>(body.data());
  (word == Word::status ? known.status : known.notes) = {head.version, body};
  known.closed = known.closed || head.closed != 0;
}

void Pulse::spread(const Neighbour* but) {
  for (Neighbour& n : neighbours_) {
    if (n.open && &n != but) pump(n);
  }
}

// All that a neighbour has not been told, if it has answered.
void Pulse::pump(Neighbour& to) {
  if (!to.dirty || to.owes_tock) return;
  for (size_t h = 0; h < known_.size(); h++) {
    if (to.status_due[h]) add(to, Word::status, known_[h].status.body);
    if (to.notes_due[h]) add(to, Word::notes, known_[h].notes.body);
    to.status_due[h] = to.notes_due[h] = false;
  }
  add(to, Word::tick, {});
  to.dirty = false;
  to.owes_tock = true;
}

void Pulse::say(int64_t now_ns, const std::vector<Status>& statuses) {
  const bool first = said_.empty();
  if (!first && now_ns - said_ns_ < pause_ns_) return;
  if (!first && std::equal(said_.begin(), said_.end(), statuses.begin(), same)) return;
  said_ = statuses;
  said_ns_ = now_ns;
  Bytes body;
  append(body, RecordHead{static_cast<uint32_t>(host_), known_[static_cast<size_t>(host_)].status.version + 1, 0, 0});
  for (const Status& status : statuses) append(body, status);
  take(Word::status, body.data(), body.size(), nullptr);
}

void Pulse::say_notes(uint32_t call, const std::vector<std::string>& texts) {
  Bytes body;
  append(body, RecordHead{static_cast<uint32_t>(host_), known_[static_cast<size_t>(host_)].notes.version + 1, 0, call});
  for (const std::string& text : texts) {
    append(body, static_cast<uint32_t>(text.size()));
    for (const char c : text) append(body, c);
  }
  take(Word::notes, body.data(), body.size(), nullptr);
}

void Pulse::condemn(const Failure& failure) {
  if (verdict_) return;
  verdict_ = failure;
  Bytes body;
  append(body, failure);
  for (Neighbour& n : neighbours_) {
    if (n.open) add(n, Word::verdict, body);
  }
}

void Pulse::leave(const std::vector<Status>& statuses) {
  Bytes body;
  append(body, RecordHead{static_cast<uint32_t>(host_), known_[static_cast<size_t>(host_)].status.version + 1, 1, 0});
  for (const Status& status : statuses) append(body, status);
  learn(host_, Word::status, body);
  for (Neighbour& n : neighbours_) {
    if (n.open) add(n, Word::status, body);  // whatever it owes: there is no later
  }
}

void Pulse::sent(int neighbour, size_t nbytes) {
  Bytes& outbox = at(neighbour).outbox;
  outbox.erase(outbox.begin(), outbox.begin() + static_cast<std::ptrdiff_t>(nbytes));
}

// --- what is heard ---

void Pulse::hear(int neighbour, const std::byte* bytes, size_t nbytes) {
  Neighbour& from = at(neighbour);
  if (!from.open) return;
  from.inbox.insert(from.inbox.end(), bytes, bytes + nbytes);
  size_t at = 0;
  while (from.inbox.size() - at >= sizeof(WordHead)) {
    const auto head = read_at<WordHead>(from.inbox.data() + at);
    if (head.nbytes > kLongestWord) return lose(from, Kind::unreachable);
    if (from.inbox.size() - at < sizeof head + head.nbytes) break;
    if (!hear_word(from, static_cast<Word>(head.word), from.inbox.data() + at + sizeof head, head.nbytes)) {
      return lose(from, Kind::unreachable);
    }
    at += sizeof head + head.nbytes;
  }
  from.inbox.erase(from.inbox.begin(), from.inbox.begin() + static_cast<std::ptrdiff_t>(at));
}

// False: nothing that a station says.
bool Pulse::hear_word(Neighbour& from, Word word, const std::byte* body, size_t nbytes) {
  switch (word) {
    case Word::tick:
      add(from, Word::tock, {});
      return true;
    case Word::tock:
      from.owes_tock = false;
      pump(from);
      return true;
    case Word::verdict:
      if (nbytes != sizeof(Failure)) return false;
      if (!verdict_) {
        const auto failure = read_at<Failure>(body);
        condemn(failure);
        listener_.heard_verdict(failure);
      }
      return true;
    case Word::status:
    case Word::notes:
      return take(word, body, nbytes, &from);
  }
  return false;
}

// Takes what a host says, this one included, if it is newer than what is known, and passes it on.
bool Pulse::take(Word word, const std::byte* body, size_t nbytes, const Neighbour* from) {
  if (nbytes < sizeof(RecordHead)) return false;
  const auto head = read_at<RecordHead>(body);
  if (head.host >= known_.size() || (from != nullptr && head.host == static_cast<uint32_t>(host_))) {
    return head.host < known_.size();
  }
  const int host = static_cast<int>(head.host);
  const auto& ranks = hosts_.on(host);
  const Host& known = known_[head.host];
  const Record& before = word == Word::status ? known.status : known.notes;
  if (static_cast<int32_t>(head.version - before.version) <= 0) return true;
  const std::byte* at = body + sizeof head;
  const std::byte* end = body + nbytes;
  std::vector<Status> statuses;
  std::vector<std::string> texts;
  for (size_t p = 0; p < ranks.size(); p++) {
    if (word == Word::status) {
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
  learn(host, word, Bytes(body, end));
  for (Neighbour& n : neighbours_) {
    if (!n.open || &n == from) continue;
    (word == Word::status ? n.status_due : n.notes_due)[head.host] = true;
    n.dirty = true;
  }
  if (host != host_) {
    for (size_t p = 0; p < statuses.size(); p++) listener_.heard_status(ranks[p], statuses[p]);
    for (size_t p = 0; p < texts.size(); p++) listener_.heard_note(ranks[p], head.call, texts[p]);
    if (head.closed != 0 && word == Word::status) listener_.heard_close(host);
  }
  spread(from);
  return true;
}

void Pulse::ended(int neighbour, int error) {
  const bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  if (Neighbour& n = at(neighbour); n.open) lose(n, silent ? Kind::unreachable : Kind::died);
}

void Pulse::lose(Neighbour& neighbour, Kind how) {
  neighbour.open = false;
  neighbour.inbox.clear();
  neighbour.outbox.clear();
  if (known_[static_cast<size_t>(neighbour.host)].closed) return;
  listener_.heard_end(neighbour.host, how);
  if (verdict_) return;
  Failure failure{.kind = how, .peer = hosts_.leader(neighbour.host), .reporter = hosts_.leader(host_)};
  if (!said_.empty()) {
    failure.call = said_.front().call;
    failure.fingerprint = said_.front().fingerprint;
  }
  condemn(failure);
  listener_.heard_verdict(failure);
}

}  // namespace allranks
