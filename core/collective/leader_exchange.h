// The exchange between the leaders of a group's hosts, with which every collective between hosts begins.
//
// Each leader sends one message for its host and receives the messages of all hosts. A message consists of an Opening,
// optional fingerprints, and the contribution of the host. The fingerprints are present if the ranks of the host do not
// agree or compare call sites. Up to 8 hosts, each leader sends to all others. Above 8 hosts, they use dissemination in
// log2(hosts) rounds (Bruck et al., 1997), so that a leader has few streams.
//
// An Opening contains the time at which the last rank of its host arrived. The clocks of hosts differ, so the receiver
// converts the time to its own clock (clock_offset.h). The time in a forwarded message always refers to the clock of
// the host that sends it. Its error grows with each hop.
//
// Received data is checked before it is used. A length that another host sends never causes an allocation above its
// limit.
#pragma once

#include <functional>
#include <vector>

#include "base/types.h"
#include "channel/clock_offset.h"
#include "channel/hosts.h"
#include "channel/segment.h"

namespace allranks {

// Streams of a leader to the leaders of other hosts. Within a stream, bytes arrive in the order of sending.
class LeaderStreams {
 public:
  virtual ~LeaderStreams() = default;
  // Queue bytes for sending. They must stay valid until flush() has returned.
  virtual void send(int host, const void* data, size_t nbytes) = 0;
  // Queue the destination of the next bytes. Returns the ticket for wait_received.
  virtual uint64_t receive(int host, void* data, size_t nbytes) = 0;
  // Wait until the bytes of the ticket `until` have arrived. Throws Error.
  virtual void wait_received(int host, uint64_t until) = 0;
  // Wait until all queued bytes have been transferred, in both directions. Throws Error.
  virtual void flush() = 0;
  // Return how far the clock of a host is ahead of the clock of this host.
  virtual ClockOffset::Estimate clock_of(int host) = 0;
};

// The start of a leader's message.
struct Opening {
  uint32_t call;
  uint32_t each;    // number of fingerprints that follow; not 0 if the ranks do not agree or compare call sites
  uint64_t nbytes;  // bytes of the contribution, which follows the fingerprints
  Fingerprint fingerprint;
  LastArrival arrival{};

  static Opening of(const std::byte* message);
  size_t head_bytes() const { return sizeof(Opening) + each * sizeof(Fingerprint); }
  size_t total_bytes() const { return head_bytes() + nbytes; }
};

// head: an Opening and its fingerprints. body: the contribution, either directly after the head or in other memory.
struct LeaderMessage {
  const std::byte* head;
  const std::byte* body;
};

// Return the last arrival among the ranks of all hosts. last < 0: the clocks are not known exactly enough to identify
// one rank.
LastArrival last_of(const std::vector<LeaderMessage>& messages);

class LeaderExchange {
 public:
  // Up to this number of hosts, every leader sends to every other: one round is faster (docs/decisions/046).
  static constexpr int kDirectHosts = 8;

  // here: the host of this leader.
  LeaderExchange(const Hosts& hosts, int here) : hosts_(hosts), here_(here) {}

  // Return the destination of a host's contribution, used after all hosts agree; nullptr: no fixed destination.
  using Into = std::function<std::byte*(int host)>;
  // Run the exchange. Returns the messages, indexed by host. They stay valid until the next run. Throws Error.
  std::vector<LeaderMessage> run(LeaderStreams& streams, const LeaderMessage& own, const Into& into);

 private:
  using Messages = std::vector<LeaderMessage>;
  Messages exchange_directly(LeaderStreams& streams, const LeaderMessage& own, const Into& into);
  Messages disseminate(LeaderStreams& streams, const LeaderMessage& own);
  // Throw an Error unless the message belongs to this call and respects the limits.
  void check(int host, const std::byte* message, uint32_t call) const;
  // Convert the time in a message from another leader to the clock of this host.
  static void convert(std::byte* message, const ClockOffset::Estimate& clock);
  size_t ranks() const { return static_cast<size_t>(hosts_.ranks()); }

  const Hosts& hosts_;
  const int here_;
  std::vector<std::vector<std::byte>> incoming_;  // direct: by host; dissemination: all messages, and the latest batch
};

}  // namespace allranks
