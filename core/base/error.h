// What goes wrong in the core, as facts. Python writes the text for users, with the names of hosts.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "base/types.h"

namespace allranks {

enum class Kind : uint32_t {
  timeout = 1,  // `peer` did not come before the deadline
  died,         // the process of `peer` ended without leaving the group
  left,         // `peer` left the group (destroyed it, or exited)
  interrupted,  // a signal handler of the caller asked to stop (Ctrl-C)
  mismatch,     // the ranks' fingerprints differ: see `calls`
  closed,       // this rank closed the group
  system,       // the operating system refused: see `text`
  unreachable,  // the host of `peer` does not answer
  memory,       // `peer` ran out of memory in the middle of a call
  forked,       // this process was forked from the one whose group it is
  aborted,      // the program of `peer` has ended the group
};

constexpr int32_t kAnyPeer = -2;

// The wire of an Error inside the group's shared memory, so that one rank's failure is every rank's.
struct Failure {
  Kind kind = Kind::closed;
  int32_t peer = -1;        // the rank that the failure is about, or kAnyPeer
  int32_t reporter = -1;    // the rank that noticed it
  uint32_t call = 0;        // the number of the collective in which it was noticed; 0: send or recv
  Fingerprint fingerprint;  // of that call, on the reporter
  double seconds = 0;       // how long the reporter had waited
};

// That `rank` waits for `peer` (< 0: any rank) in a message call.
struct Wait {
  int rank;
  int peer;
  Verb verb;
  int32_t tag;
  std::string site;  // where in its program
};

// Messages with one tag that no recv has asked for.
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
  std::vector<Fingerprint> calls;  // mismatch: what each rank called (send, recv: the sender, the receiver)
  bool signalled = false;          // interrupted, and by this caller's own signal
  std::vector<int> waiting_for;    // timeout: every rank that had not come
  std::vector<std::string> sites;  // mismatch of collectives: where each rank called; "" where it is not known
  std::vector<Wait> waits;         // timeout of a message: who waits for whom, from this rank on
  std::vector<Unasked> unasked;    // the same, of a recv: messages with other tags
  std::string text;
};

}  // namespace allranks
