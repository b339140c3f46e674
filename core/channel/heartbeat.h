// Heartbeats between the hosts of a group, as a state machine. Inputs are bytes and times, outputs are bytes and
// events. It has no socket, no clock and no thread, so that tests can simulate thousands of networks in a second
// (tests/core/test_heartbeat.cc). net.h connects it to real sockets.
//
// The leader of each host has a Heartbeat for all ranks of the host. Up to 8 hosts are all connected with each other.
// With more hosts, each host is connected with the hosts at distances of 2^k in both directions, its neighbors. A host
// forwards every record that is new to it. The messages are:
//   status   for each rank of the host: its last collective, the message it waits for, and whether it has left. The
//            last status of a host has `closed` set. The end of its connections is then not a failure.
//   notes    after a mismatch: the call site of each rank.
//   verdict  the failure of the group. It is sent once.
// Status and notes are versioned states, not events. A newer record replaces an older one. It is forwarded only if it
// is newer than the known one. A leader sends records to a neighbor only after the neighbor has answered the previous
// batch (ping, pong). At most one batch is therefore queued for a host that is stopped, even for an hour, and its TCP
// window stays open. TCP would report a closed window as a host that does not respond. A pong contains the time of the
// neighbor's clock, so that each round trip measures the clock offset (clock_offset.h). The first round trips are made
// only for this purpose.
//
// A host counts as lost when its connection ends, and never because of a timeout: a rank that is stopped is not dead.
// docs/decisions/045 has the reasons.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "channel/clock_offset.h"
#include "channel/hosts.h"
#include "channel/segment.h"

namespace allranks {

class Heartbeat {
 public:
  // State of a rank.
  struct Status {
    uint32_t call = 0;  // the last collective it has begun
    uint32_t left = 0;
    Fingerprint fingerprint;
    Waits waits;
  };

  // Receiver of the events about ranks on other hosts.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void on_status(int rank, const Status& status) = 0;
    virtual void on_note(int rank, uint32_t call, const std::string& text) = 0;
    virtual void on_close(int host) = 0;          // the leader of the host has left
    virtual void on_end(int host, Kind how) = 0;  // the leader of a neighbor has died or is unreachable
    virtual void on_verdict(const Failure& failure) = 0;
    virtual void on_clock(int host, const ClockOffset& offset) = 0;  // of a neighbor
  };

  // Return the hosts with which a host is connected.
  static std::vector<int> neighbours(int host, int hosts);

  Heartbeat(int host, const Hosts& hosts, Listener& listener);

  // Publish the states of this host's ranks, by place. They are sent only if a state has changed, and at most once per
  // pause_ns_.
  void publish(int64_t now_ns, const std::vector<Status>& statuses);
  void publish_notes(uint32_t call, const std::vector<std::string>& texts);
  // Send a verdict to the neighbors, unless one has been sent before.
  void condemn(const Failure& failure);
  // Send the last status of this host's ranks, with `closed` set.
  void leave(const std::vector<Status>& statuses);

  // Process bytes from a neighbor. now_ns: read after the bytes had arrived, as ClockOffset requires.
  void receive(int neighbour, const std::byte* bytes, size_t nbytes, int64_t now_ns);
  // Process the end of a connection. error: errno; 0 if the other side has closed it.
  void ended(int neighbour, int error);

  // The bytes to send to a neighbor. sent() removes those that have been sent.
  const std::vector<std::byte>& outbox(int neighbour) const { return at(neighbour).outbox; }
  void sent(int neighbour, size_t nbytes);

 private:
  enum class MessageType : uint32_t { status = 1, notes, verdict, ping, pong };
  using Bytes = std::vector<std::byte>;

  // The newest known record of a host, of one message type.
  struct Record {
    uint32_t version = 0;
    Bytes body;
  };
  struct Host {
    Record status;
    Record notes;
    bool closed = false;
  };
  struct Neighbour {
    int host;
    bool open = true;
    bool awaits_pong = false;
    int64_t pinged_ns = 0;
    int round_trips = 0;
    ClockOffset clock{};
    bool dirty = false;            // a record below is due
    std::vector<bool> status_due;  // by host
    std::vector<bool> notes_due;
    Bytes inbox;
    Bytes outbox;
  };

  const Neighbour& at(int host) const;
  Neighbour& at(int host) { return const_cast<Neighbour&>(std::as_const(*this).at(host)); }
  static void add(Neighbour& to, MessageType type, const Bytes& body);
  bool receive_message(Neighbour& from, MessageType type, const std::byte* body, size_t nbytes);
  bool measure(Neighbour& from, const std::byte* body, size_t nbytes);
  bool accept(MessageType type, const std::byte* body, size_t nbytes, const Neighbour* from);
  void store(int host, MessageType type, const Bytes& body);
  void send_pending(Neighbour& to);
  void spread(const Neighbour* but);
  void lose(Neighbour& neighbour, Kind how);

  int host_;
  const Hosts& hosts_;
  Listener& listener_;
  std::vector<Host> known_;  // by host
  std::vector<Neighbour> neighbours_;
  std::optional<Failure> verdict_;
  std::vector<Status> published_;
  int64_t published_ns_ = 0;
  int64_t now_ns_ = 0;  // the time that was passed last
  int64_t pause_ns_;
};

}  // namespace allranks
