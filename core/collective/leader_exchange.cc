#include "collective/leader_exchange.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"

namespace allranks {

namespace {

constexpr size_t kLongestMessage = 16 << 20;  // bytes; limits the allocation for a corrupted length

}  // namespace

Opening Opening::of(const std::byte* message) {
  Opening opening;
  std::memcpy(&opening, message, sizeof opening);
  return opening;
}

std::vector<LeaderMessage> LeaderExchange::run(LeaderStreams& streams, const LeaderMessage& own, const Into& into) {
  return hosts_.count() <= kDirectHosts ? exchange_directly(streams, own, into) : disseminate(streams, own);
}

void LeaderExchange::check(int host, const std::byte* message, uint32_t call) const {
  const Opening theirs = Opening::of(message);
  const LastArrival& a = theirs.arrival;
  const auto in_range = [](int64_t ns) { return ns >= -ClockOffset::kLatestNs && ns <= ClockOffset::kLatestNs; };
  const bool possible = in_range(a.met_ns) && in_range(a.late_ns) && a.error_ns >= 0 &&
                        a.error_ns <= ClockOffset::kUnknownNs && a.last >= -1 && a.last < hosts_.ranks();
  if (possible && theirs.call == call && theirs.each <= ranks() && theirs.nbytes <= kLongestMessage) return;
  throw Error("rank " + std::to_string(hosts_.leader(host)) + " is at call " + std::to_string(theirs.call) +
              ", this rank at call " + std::to_string(call) + ": the data from the network is corrupt");
}

void LeaderExchange::convert(std::byte* message, const ClockOffset::Estimate& clock) {
  Opening opening = Opening::of(message);
  opening.arrival.met_ns -= clock.ns;
  opening.arrival.error_ns = std::min(opening.arrival.error_ns + clock.error_ns, ClockOffset::kUnknownNs);
  std::memcpy(message, &opening, sizeof opening);
}

LastArrival last_of(const std::vector<LeaderMessage>& messages) {
  LastArrival found = Opening::of(messages.front().head).arrival;
  for (size_t h = 1; h < messages.size(); h++) {
    const LastArrival other = Opening::of(messages[h].head).arrival;
    if (other.met_ns > found.met_ns) found = other;
  }
  const int winner = found.last;
  for (const LeaderMessage& message : messages) {
    const LastArrival other = Opening::of(message.head).arrival;
    if (other.error_ns >= ClockOffset::kUnknownNs) return {};
    if (other.last == winner) continue;
    const int64_t later = found.met_ns - other.met_ns;
    if (later <= found.error_ns + other.error_ns) found.last = -1;
    found.late_ns = std::min(found.late_ns, later);
  }
  return found;
}

LeaderExchange::Messages LeaderExchange::exchange_directly(LeaderStreams& streams, const LeaderMessage& own,
                                                           const Into& into) {
  const Opening ours = Opening::of(own.head);
  const auto count = static_cast<size_t>(hosts_.count());
  incoming_.resize(count);
  std::vector<uint64_t> tickets(count);
  for (int h = 0; h < hosts_.count(); h++) {
    if (h == here_) continue;
    auto& buffer = incoming_[static_cast<size_t>(h)];
    if (buffer.size() < sizeof(Opening)) buffer.resize(sizeof(Opening));
    tickets[static_cast<size_t>(h)] = streams.receive(h, buffer.data(), sizeof(Opening));
    streams.send(h, own.head, ours.head_bytes());
    streams.send(h, own.body, ours.nbytes);
  }
  // Wait for the heads, not for the sends. A send may need the other side to read first, and the other side needs the
  // head for this.
  for (int h = 0; h < hosts_.count(); h++) {
    if (h != here_) streams.wait_received(h, tickets[static_cast<size_t>(h)]);
  }
  bool agree = ours.each == 0;
  for (int h = 0; h < hosts_.count(); h++) {
    if (h == here_) continue;
    std::byte* head = incoming_[static_cast<size_t>(h)].data();
    check(h, head, ours.call);
    convert(head, streams.clock_of(h));
    const Opening theirs = Opening::of(head);
    agree = agree && theirs.each == 0 && theirs.fingerprint.agrees(ours.fingerprint);
  }
  Messages messages(count, own);
  for (int h = 0; h < hosts_.count(); h++) {
    if (h == here_) continue;
    auto& buffer = incoming_[static_cast<size_t>(h)];
    const Opening theirs = Opening::of(buffer.data());
    const size_t head = theirs.head_bytes();
    std::byte* body = agree && into ? into(h) : nullptr;
    const size_t kept = head + (body == nullptr ? theirs.nbytes : 0);
    if (buffer.size() < kept) buffer.resize(kept);
    streams.receive(h, buffer.data() + sizeof(Opening), head - sizeof(Opening));
    if (body == nullptr) body = buffer.data() + head;
    streams.receive(h, body, theirs.nbytes);
    messages[static_cast<size_t>(h)] = {buffer.data(), body};
  }
  streams.flush();
  return messages;
}

// Exchange by dissemination. In round k, each leader receives the messages of 2^k consecutive hosts from the host at
// distance 2^k, starting with that host.
LeaderExchange::Messages LeaderExchange::disseminate(LeaderStreams& streams, const LeaderMessage& own) {
  const int count = hosts_.count();
  incoming_.resize(2);
  auto& known = incoming_[0];  // the messages of this host and of the hosts after it
  auto& come = incoming_[1];
  const Opening ours = Opening::of(own.head);
  known.assign(own.head, own.head + ours.head_bytes());
  if (ours.nbytes > 0) known.insert(known.end(), own.body, own.body + ours.nbytes);
  std::vector<size_t> starts{0};
  for (int distance = 1; distance < count; distance *= 2) {
    const auto some = static_cast<size_t>(std::min(distance, count - distance));
    const int to = (here_ - distance + count) % count;
    const int from = (here_ + distance) % count;
    const uint64_t given = some == starts.size() ? known.size() : starts[some];
    uint64_t coming = 0;
    streams.send(to, &given, sizeof given);
    streams.send(to, known.data(), given);
    streams.wait_received(from, streams.receive(from, &coming, sizeof coming));
    if (coming > some * (kLongestMessage + sizeof(Opening) + ranks() * sizeof(Fingerprint))) {
      throw Error("rank " + std::to_string(hosts_.leader(from)) + " announces " + std::to_string(coming) +
                  " bytes: the data from the network is corrupt");
    }
    come.resize(coming);
    streams.receive(from, come.data(), coming);
    streams.flush();
    size_t at = 0;
    const ClockOffset::Estimate clock = streams.clock_of(from);
    for (size_t i = 0; i < some; i++) {
      const int host = (here_ + distance + static_cast<int>(i)) % count;
      if (coming - at < sizeof(Opening)) throw Error("the message of host " + std::to_string(host) + " is truncated");
      check(host, come.data() + at, ours.call);
      convert(come.data() + at, clock);
      starts.push_back(known.size() + at);
      at += Opening::of(come.data() + at).total_bytes();
      if (at > coming) throw Error("the message of host " + std::to_string(host) + " is truncated");
    }
    known.insert(known.end(), come.begin(), come.end());
  }
  Messages messages(static_cast<size_t>(count));
  for (int i = 0; i < count; i++) {
    const std::byte* head = known.data() + starts[static_cast<size_t>(i)];
    messages[static_cast<size_t>((here_ + i) % count)] = {head, head + Opening::of(head).head_bytes()};
  }
  return messages;
}

}  // namespace allranks
