// Signs of life between the hosts of a group, as a state machine: bytes and the time go in, bytes and news come out.
// It has no socket, no clock and no thread, so that thousands of networks can be simulated in a second
// (tests/core/test_pulse.cc); net.h gives it real ones.
//
// Each host has a station, which speaks for all its ranks and is connected with some others: up to 8 hosts with all,
// beyond with those at a distance of 2^k either way. What a station hears for the first time it passes on. It says
//   status   which call each of its ranks has begun last, what message it waits for, and which have left. The last one
//   of a host has `closed` set:
//            its station goes, and the end of its connections is no death.
//   notes    where its ranks' calls stand that do not match.
//   verdict  that the group has failed, and why: once.
// Status and notes are states with a version, not events: a newer one takes the place of an older one, and is passed on
// if it is newer than the one that is known. They go to a neighbour only when it has answered the last of them (tick,
// tock). So a station that is stopped for an hour is owed one batch, not an hour's, and no window closes, which
// TCP would take for a silent host.
//
// Who is gone is found by connections that end, never by the time that passes: a rank that is stopped is not dead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "channel/hosts.h"
#include "channel/segment.h"

namespace allranks {

class Pulse {
 public:
  // What a rank does.
  struct Status {
    uint32_t call = 0;  // the last collective it has begun
    uint32_t left = 0;
    Fingerprint fingerprint;
    Waits waits;
  };

  // Is told what is heard of the ranks on other hosts.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void heard_status(int rank, const Status& status) = 0;
    virtual void heard_note(int rank, uint32_t call, const std::string& text) = 0;
    virtual void heard_close(int host) = 0;          // its station goes
    virtual void heard_end(int host, Kind how) = 0;  // its station, a neighbour, has died or cannot be reached
    virtual void heard_verdict(const Failure& failure) = 0;
  };

  // The hosts that a host is connected with.
  static std::vector<int> neighbours(int host, int hosts);

  Pulse(int host, const Hosts& hosts, Listener& listener);

  // What the ranks of this host do, by place. Said if it is new, and not more often than the others can bear.
  void say(int64_t now_ns, const std::vector<Status>& statuses);
  void say_notes(uint32_t call, const std::vector<std::string>& texts);
  // The group has failed.
  void condemn(const Failure& failure);
  // This station goes; what its ranks do at the end.
  void leave(const std::vector<Status>& statuses);

  void hear(int neighbour, const std::byte* bytes, size_t nbytes);
  // A connection has ended; error: errno, 0 where the other side has closed it.
  void ended(int neighbour, int error);

  // What is to be sent to a neighbour, and how much of it has been.
  const std::vector<std::byte>& outbox(int neighbour) const { return at(neighbour).outbox; }
  void sent(int neighbour, size_t nbytes);

 private:
  enum class Word : uint32_t { status = 1, notes, verdict, tick, tock };
  using Bytes = std::vector<std::byte>;

  // What a host has said of one kind.
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
    bool owes_tock = false;
    bool dirty = false;            // something below is
    std::vector<bool> status_due;  // by host
    std::vector<bool> notes_due;
    Bytes inbox;
    Bytes outbox;
  };

  const Neighbour& at(int host) const;
  Neighbour& at(int host) { return const_cast<Neighbour&>(std::as_const(*this).at(host)); }
  static void add(Neighbour& to, Word word, const Bytes& body);
  bool hear_word(Neighbour& from, Word word, const std::byte* body, size_t nbytes);
  bool take(Word word, const std::byte* body, size_t nbytes, const Neighbour* from);
  void learn(int host, Word word, const Bytes& body);
  void pump(Neighbour& to);
  void spread(const Neighbour* but);
  void lose(Neighbour& neighbour, Kind how);

  int host_;
  const Hosts& hosts_;
  Listener& listener_;
  std::vector<Host> known_;  // by host
  std::vector<Neighbour> neighbours_;
  std::optional<Failure> verdict_;
  std::vector<Status> said_;
  int64_t said_ns_ = 0;
  int64_t pause_ns_;
};

}  // namespace allranks
