// The exchange between the leaders of a group's hosts, with which every collective between hosts begins.
//
// Each leader gives a message of its host and gets those of all hosts. A message is an Opening, fingerprints where the
// ranks do not agree or compare call sites, and the contribution of the host. Up to 8 hosts each leader sends to all
// others. Beyond, they use dissemination in log2(hosts) rounds (Bruck et al., 1997), so that a leader has few streams.
//
// An Opening has the time when the last rank of its host came. As clocks of hosts differ, who receives it converts that
// to the own clock (clock_offset.h). So a message that is passed on has always the time of the host that sends it, and
// an error that grows on the way.
//
// What arrives is checked before it is used: a length that another host states never allocates more than its limit.
#pragma once

#include <functional>
#include <vector>

#include "base/types.h"
#include "channel/clock_offset.h"
#include "channel/hosts.h"
#include "channel/segment.h"

namespace allranks {

// The streams of a leader to the leaders of other hosts. Within a stream, bytes arrive in the order of sending.
class LeaderStreams {
 public:
  virtual ~LeaderStreams() = default;
  // Queues bytes. They must stay until flush() has returned.
  virtual void send(int host, const void* data, size_t nbytes) = 0;
  // Queues the place of the next bytes. Returns what wait_received takes.
  virtual uint64_t receive(int host, void* data, size_t nbytes) = 0;
  // Returns when these bytes have arrived. Throws Error.
  virtual void wait_received(int host, uint64_t until) = 0;
  // The same for all that is queued, in both directions.
  virtual void flush() = 0;
  // How far the clock of a host is ahead of this one's.
  virtual ClockOffset::Estimate clock_of(int host) = 0;
};

// The beginning of a leader's message.
struct Opening {
  uint32_t call;
  uint32_t each;    // not 0: its ranks do not agree, or compare call sites; so many fingerprints follow
  uint64_t nbytes;  // of what its ranks contribute, behind those
  Fingerprint fingerprint;
  LastArrival arrival{};

  static Opening of(const std::byte* message);
  size_t head_bytes() const { return sizeof(Opening) + each * sizeof(Fingerprint); }
  size_t total_bytes() const { return head_bytes() + nbytes; }
};

// The head is an Opening and its fingerprints. The body lies there or elsewhere.
struct LeaderMessage {
  const std::byte* head;
  const std::byte* body;
};

// Who came last of the ranks of all hosts. last < 0: several may have, as their clocks are known only so well.
LastArrival last_of(const std::vector<LeaderMessage>& messages);

class LeaderExchange {
 public:
  static constexpr int kDirectHosts = 8;  // up to which every host speaks to every other

  // here: this leader's host.
  LeaderExchange(const Hosts& hosts, int here) : hosts_(hosts), here_(here) {}

  // Where this leader wants the contribution of a host, once all hosts agree; nullptr: anywhere.
  using Into = std::function<std::byte*(int host)>;
  // Returns the messages of all hosts, by host. They stay until the next run. Throws Error.
  std::vector<LeaderMessage> run(LeaderStreams& streams, const LeaderMessage& own, const Into& into);

 private:
  using Messages = std::vector<LeaderMessage>;
  Messages exchange_directly(LeaderStreams& streams, const LeaderMessage& own, const Into& into);
  Messages disseminate(LeaderStreams& streams, const LeaderMessage& own);
  // Throws unless the message is of this call and within the limits.
  void check(int host, const std::byte* message, uint32_t call) const;
  // Converts the time in a message that came from another leader.
  static void convert(std::byte* message, const ClockOffset::Estimate& clock);
  size_t ranks() const { return static_cast<size_t>(hosts_.ranks()); }

  const Hosts& hosts_;
  const int here_;
  std::vector<std::vector<std::byte>> incoming_;  // by host; or all messages, as they were passed on
};

}  // namespace allranks
