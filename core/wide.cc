#include "wide.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace allranks {

namespace {

constexpr size_t kInMeeting = 256 << 10;  // bytes that all hosts say in a meeting
constexpr size_t kKept = 16 << 20;        // bytes of each scratch memory, between calls
constexpr size_t kLongestSpeech = 16 << 20;

// What a leader says first in a meeting.
struct Opening {
  uint32_t call;
  uint32_t each;    // not 0: its ranks do not agree, or compare call sites; so many fingerprints follow
  uint64_t nbytes;  // of what its ranks contribute, behind those
  Fingerprint fingerprint;
};

size_t aligned(size_t nbytes) { return (nbytes + 63) / 64 * 64; }

}  // namespace

void Wide::run(Team::Call& call, const Operation& operation) {
  net_.say(call.about.call, operation.fingerprint);
  try {
    dispatch(call, operation);
  } catch (Error& error) {
    net_.clear();  // what is queued belongs to the caller
    if (error.failure.kind == Kind::timeout) error.waiting_for = net_.behind(call.about.call);
    throw;
  }
  for (auto& part : scratch_) {
    if (part.capacity() > kKept) part = {};
  }
}

void Wide::dispatch(Team::Call& call, const Operation& operation) {
  const Fingerprint& f = operation.fingerprint;
  switch (f.verb) {
    case Verb::all_reduce:
      return all_reduce(call, operation.buffer, f.op);
    case Verb::broadcast:
      return broadcast(call, operation.buffer, f.root);
    case Verb::barrier:
      meet(call, nullptr, {.nbytes = [](int) { return size_t{0}; }});
      return;
    case Verb::reduce:
      return reduce(call, operation.buffer, f.op, f.root);
    case Verb::all_gather:
      return all_gather(call, operation.buffer, operation.outs);
    case Verb::gather:
      return gather(call, operation.buffer, operation.outs, f.root);
    case Verb::scatter:
      return scatter(call, operation.ins, operation.buffer, f.root);
    case Verb::reduce_scatter:
      return reduce_scatter(call, operation.ins, operation.buffer, f.op);
    case Verb::all_to_all:
      return all_to_all(call, operation);
    case Verb::none:
    case Verb::send:
    case Verb::recv:
      throw Error("not a collective");
  }
}

// --- the meeting ---

bool Wide::has_room(size_t total) const {
  const size_t ring = team_.shm().sizes().ring;
  const size_t room = std::bit_ceil(total + 64 * static_cast<size_t>(hosts_.count()));  // what meet takes of it
  return room <= ring / 2 && ring % room == 0;
}

bool Wide::fits(size_t total) const { return total <= kInMeeting && has_room(total); }

Wide::Bytes Wide::meet(Team::Call& call, const void* mine, const Said& said) {
  const Fingerprint& own = call.about.fingerprint;
  const auto of_host = [&](int host) {
    size_t nbytes = 0;
    if (said.kernel != nullptr) return said.nbytes(hosts_.leader(host));
    for (const int r : hosts_.on(host)) nbytes += said.nbytes(r);
    return nbytes;
  };
  size_t most = 0;
  for (const int r : mates()) most = std::max(most, said.nbytes(r));
  const bool alone = team_.size() == 1;
  const bool in_line = most <= CallLine::kInline;
  Team::Pieces contributions{&team_.shm(), 0, 0};
  bool agree = own.site == 0;
  if (!alone) {
    next(call);
    if (!in_line) {
      contributions = team_.take(most);
      team_.copier().copy(contributions.at(place()), static_cast<const std::byte*>(mine), said.nbytes(me()));
    }
    agree = team_.assemble(call, mine, in_line ? said.nbytes(me()) : 0);
  }
  const auto contribution = [&](int place) -> const std::byte* {
    if (alone) return static_cast<const std::byte*>(mine);
    return in_line ? team_.shm().call_line(place, call.number).payload.data() : contributions.at(place);
  };

  const auto count = static_cast<size_t>(hosts_.count());
  std::vector<Fingerprint> all;  // of all ranks, if they do not simply agree
  Bytes heard(count);
  if (place() == 0) {
    Opening opening{.call = call.about.call, .each = 0, .nbytes = of_host(here()), .fingerprint = own};
    std::vector<Fingerprint> of_mates;
    if (!agree) {
      of_mates = alone ? std::vector{own} : team_.fingerprints(call);
      opening.each = static_cast<uint32_t>(of_mates.size());
      // Who calls something else has contributed something else.
      if (!std::all_of(of_mates.begin(), of_mates.end(), [&](const auto& f) { return f.agrees(own); })) {
        opening.nbytes = 0;
      }
    }
    outgoing_.resize(sizeof opening + of_mates.size() * sizeof(Fingerprint) + opening.nbytes);
    std::byte* at = outgoing_.data();
    std::memcpy(at, &opening, sizeof opening);
    at += sizeof opening;
    if (!of_mates.empty()) std::memcpy(at, of_mates.data(), of_mates.size() * sizeof(Fingerprint));
    at += of_mates.size() * sizeof(Fingerprint);
    heard[static_cast<size_t>(here())] = at;
    if (opening.nbytes > 0 && said.kernel != nullptr && !alone) {
      std::vector<const void*> operands;
      for (int p = 0; p < team_.size(); p++) operands.push_back(contribution(p));
      said.kernel(at, operands.data(), team_.size(), said.count, team_.size());
    } else if (opening.nbytes > 0) {
      for (int p = 0; p < team_.size(); p++) {
        const size_t n = said.nbytes(mates()[static_cast<size_t>(p)]);
        if (n > 0) std::memcpy(at, contribution(p), n);
        at += n;
      }
    }

    incoming_.resize(count);
    for (int h = 0; h < hosts_.count(); h++) {
      if (h == here()) continue;
      auto& buffer = incoming_[static_cast<size_t>(h)];
      if (buffer.size() < sizeof opening) buffer.resize(sizeof opening);
      net_.receive(hosts_.leader(h), buffer.data(), sizeof opening);
      net_.send(hosts_.leader(h), outgoing_.data(), outgoing_.size());
    }
    flush(call);
    std::vector<Opening> openings(count, opening);
    for (int h = 0; h < hosts_.count(); h++) {
      if (h == here()) continue;
      auto& buffer = incoming_[static_cast<size_t>(h)];
      Opening& theirs = openings[static_cast<size_t>(h)];
      std::memcpy(&theirs, buffer.data(), sizeof theirs);
      if (theirs.call != call.about.call || theirs.each > ranks() || theirs.nbytes > kLongestSpeech) {
        throw Error("rank " + std::to_string(hosts_.leader(h)) + " is at call " + std::to_string(theirs.call) +
                    ", this rank at call " + std::to_string(call.about.call) +
                    ": what came over the network is not what was sent");
      }
      buffer.resize(std::max(buffer.size(), theirs.each * sizeof(Fingerprint) + theirs.nbytes));
      net_.receive(hosts_.leader(h), buffer.data(), theirs.each * sizeof(Fingerprint) + theirs.nbytes);
      heard[static_cast<size_t>(h)] = buffer.data() + theirs.each * sizeof(Fingerprint);
      agree = agree && theirs.each == 0 && theirs.fingerprint.agrees(own);
    }
    flush(call);
    if (!agree) {
      all.resize(ranks());
      for (int h = 0; h < hosts_.count(); h++) {
        const Opening& theirs = openings[static_cast<size_t>(h)];
        const std::byte* each = heard[static_cast<size_t>(h)] - theirs.each * sizeof(Fingerprint);
        for (const int r : hosts_.on(h)) {
          Fingerprint& f = all[static_cast<size_t>(r)];
          f = theirs.fingerprint;
          if (theirs.each == 0) continue;
          std::memcpy(&f, each + static_cast<size_t>(hosts_.place(r)) * sizeof f, sizeof f);
        }
      }
    }
  }

  if (!alone) {
    // The leader hands on what it has heard.
    size_t total = 0;
    for (int h = 0; h < hosts_.count(); h++) total += aligned(of_host(h));
    const auto results = team_.take(total);
    const bool leads = place() == 0;
    const auto same = [&](const auto& f) { return f.agrees(own); };
    if (leads && std::all_of(all.begin(), all.end(), same)) {
      std::byte* at = results.at(0);
      for (int h = 0; h < hosts_.count(); h++) {
        if (const size_t n = of_host(h); n > 0) std::memcpy(at, heard[static_cast<size_t>(h)], n);
        at += aligned(of_host(h));
      }
    }
    StepLine& step = team_.shm().step_line(0);
    const size_t listed = ranks() * sizeof(Fingerprint);
    team_.base_step++;
    if (leads) {
      step.disagree = 0;
      if (!all.empty()) {
        const auto list = team_.take(listed);
        std::memcpy(list.at(0), all.data(), listed);
        step.disagree = static_cast<uint32_t>(list.begin % team_.shm().sizes().ring) + 1;
      }
      team_.post_step(team_.base_step, true);
    } else {
      team_.wait_step_of(call, 0, team_.base_step);
      if (step.disagree != 0) {
        team_.take(listed);
        all.resize(ranks());
        std::memcpy(all.data(), team_.shm().ring_at(0, step.disagree - 1), listed);
      }
    }
    const std::byte* at = results.at(0);
    for (int h = 0; h < hosts_.count(); h++) {
      heard[static_cast<size_t>(h)] = at;
      at += aligned(of_host(h));
    }
  }
  if (!all.empty()) {
    if (const auto error = team_.judge(call, std::move(all))) disagree(call, *error);
  }
  call.about.fingerprint.site = 0;  // compared: what follows on this host is one call in parts
  return heard;
}

void Wide::disagree(Team::Call& call, Error error) {
  const auto here = team_.exchange_notes(call);
  error.sites = net_.exchange_notes(call.about, call.patience.caller, here);
  for (size_t p = 0; p < here.size(); p++) error.sites[static_cast<size_t>(mates()[p])] = here[p];
  throw Error(error);
}

}  // namespace allranks
