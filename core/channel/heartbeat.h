// Signs of life between the hosts of a group, as a state machine: bytes and the time go in, bytes and events come out.
// It has no socket, no clock and no thread, so that thousands of networks can be simulated in a second
// (tests/core/test_heartbeat.cc); net.h gives it real ones.
//
// The leader of each host has a Heartbeat for all ranks of the host. Up to 8 hosts each is connected with all others;
// beyond, with the hosts at a distance of 2^k either way. What a host receives for the first time it passes on. It
// sends
//   status   for each rank of the host: its last collective, the message it waits for, and whether it has left. The
//            last status of a host has `closed` set; the end of its connections is no failure then.
//   notes    after a mismatch: where in its program each rank called.
//   verdict  that the group has failed, and why. It is sent once.
// Status and notes are states with a version, not events: a newer one replaces an older one, and is passed on only if
// it is newer than the known one. They go to a neighbour only after it has answered the last of them (ping, pong). So
// what waits for a host that is stopped for an hour is one batch, not an hour's, and no TCP window closes. A closed
// window would look like a host that does not answer. A pong has the time of the neighbour's clock, so that each round
// trip shows how far that is ahead (clock_offset.h). Some are made at the beginning for that.
//
// A host counts as lost when its connection ends, never because time passes: a rank that is stopped is not dead.
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
  // What is known of a rank.
  struct Status {
    uint32_t call = 0;  // the last collective it has begun
    uint32_t left = 0;
    Fingerprint fingerprint;
    Waits waits;
  };

  // Gets what is received about ranks on other hosts.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void on_status(int rank, const Status& status) = 0;
    virtual void on_note(int rank, uint32_t call, const std::string& text) = 0;
    virtual void on_close(int host) = 0;          // its Heartbeat ends
    virtual void on_end(int host, Kind how) = 0;  // a neighbour: its leader has died or cannot be reached
    virtual void on_verdict(const Failure& failure) = 0;
    virtual void on_clock(int host, const ClockOffset& offset) = 0;  // a neighbour's
  };

  // The hosts that a host is connected with.
  static std::vector<int> neighbours(int host, int hosts);

  Heartbeat(int host, const Hosts& hosts, Listener& listener);

  // The ranks of this host, by place. Sent where something has changed, and at most once per pause_ns_.
  void publish(int64_t now_ns, const std::vector<Status>& statuses);
  void publish_notes(uint32_t call, const std::vector<std::string>& texts);
  // The group has failed.
  void condemn(const Failure& failure);
  // Ends this Heartbeat, with the last status of its ranks.
  void leave(const std::vector<Status>& statuses);

  // now_ns: read after the bytes had come.
  void receive(int neighbour, const std::byte* bytes, size_t nbytes, int64_t now_ns);
  // A connection has ended; error: errno, 0 where the other side has closed it.
  void ended(int neighbour, int error);

  // What is to be sent to a neighbour, and how much of it has been.
  const std::vector<std::byte>& outbox(int neighbour) const { return at(neighbour).outbox; }
  void sent(int neighbour, size_t nbytes);

 private:
  enum class MessageType : uint32_t { status = 1, notes, verdict, ping, pong };
  using Bytes = std::vector<std::byte>;

  // The newest that is known from a host, of one message type.
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
    bool dirty = false;            // something below is
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
  int64_t now_ns_ = 0;  // as it was given last: not later than the time
  int64_t pause_ns_;
};

}  // namespace allranks
