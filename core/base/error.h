// Failures of the core, as facts. Python formats the text for users and adds host names.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "base/types.h"

namespace allranks {

enum class Kind : uint32_t {
  timeout = 1,  // `peer` did not arrive before the deadline
  died,         // the process of `peer` terminated without leaving the group
  left,         // `peer` left the group (destroyed it, or exited)
  interrupted,  // a signal handler of the caller requested a stop (Ctrl-C)
  mismatch,     // the ranks' fingerprints differ: see `calls`
  closed,       // this rank closed the group
  system,       // a system call failed, or a failure that only `text` describes
  unreachable,  // the host of `peer` does not respond
  memory,       // `peer` ran out of memory during a call
  forked,       // this process was forked from the process that owns the group
  aborted,      // the program of `peer` aborted the group
};

// Return whether another rank did not answer: it is late or gone.
constexpr bool is_missing(Kind kind) {
  return kind == Kind::timeout || kind == Kind::died || kind == Kind::left || kind == Kind::unreachable;
}

constexpr int32_t kAnyPeer = -2;  // Failure::peer of a wait for any rank

// Serialized form of an Error. It is stored in the group's shared memory and sent to other hosts. The failure of one
// rank is thereby raised on every rank.
struct Failure {
  Kind kind = Kind::closed;
  int32_t peer = -1;        // the rank that the failure is about, or kAnyPeer
  int32_t reporter = -1;    // the rank that detected it
  uint32_t call = 0;        // the number of the collective in which it was detected; 0: send or recv
  Fingerprint fingerprint;  // of that call, on the reporter
  double seconds = 0;       // how long the reporter had waited
};

// A blocked message call: `rank` waits for `peer` (< 0: any rank).
struct Wait {
  int rank;
  int peer;
  Verb verb;
  int32_t tag;
  std::string site;  // the call site in the program of `rank`
};

// Unexpected messages with one tag: they have arrived, but no recv has been posted for them.
struct Unasked {
  int from;
  int32_t tag;
  Fingerprint first;
  size_t count;
};

class Error : public std::exception {
 public:
  explicit Error(Failure failure) : failure(failure) {}
  Error(Failure failure, std::vector<Fingerprint> calls) : failure(failure), calls(std::move(calls)) {}
  explicit Error(std::string text) : text(std::move(text)) { failure.kind = Kind::system; }

  const char* what() const noexcept override { return text.empty() ? "allranks core error" : text.c_str(); }

  Failure failure;
  std::vector<Fingerprint> calls;  // mismatch: the call of each rank (send, recv: of the sender and the receiver)
  bool signalled = false;          // interrupted, and by this caller's own signal
  std::vector<int> waiting_for;    // timeout: every rank that had not arrived
  std::vector<std::string> sites;  // mismatch of collectives: each rank's call site; "" if it is not known
  std::vector<Wait> waits;         // timeout of a message: the chain of waits that begins with this rank
  std::vector<Unasked> unasked;    // timeout of a recv: messages with other tags
  std::string text;
};

}  // namespace allranks
