#include "wide.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "algorithms/algorithms.h"

namespace allranks {

namespace {

constexpr int kSpeakDirectly = 8;         // hosts
constexpr size_t kInMeeting = 256 << 10;  // bytes that all hosts say in a meeting
constexpr size_t kKept = 16 << 20;        // bytes of each scratch memory, between calls
constexpr size_t kLongestSpeech = 16 << 20;

// What a leader says first in a meeting: the head of its speech.
struct Opening {
  uint32_t call;
  uint32_t each;    // not 0: its ranks do not agree, or compare call sites; so many fingerprints follow
  uint64_t nbytes;  // of what its ranks contribute, behind those
  Fingerprint fingerprint;
};

size_t aligned(size_t nbytes) { return (nbytes + 63) / 64 * 64; }

Opening opening_of(const std::byte* speech) {
  Opening opening;
  std::memcpy(&opening, speech, sizeof opening);
  return opening;
}

size_t length_of(const Opening& opening) {
  return sizeof opening + opening.each * sizeof(Fingerprint) + opening.nbytes;
}

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

    const Bytes speeches =
        hosts_.count() <= kSpeakDirectly ? exchange_directly(call, outgoing_) : disseminate(call, outgoing_);
    std::vector<Opening> openings(count, opening);
    for (size_t h = 0; h < count; h++) {
      openings[h] = opening_of(speeches[h]);
      heard[h] = speeches[h] + sizeof opening + openings[h].each * sizeof(Fingerprint);
      agree = agree && openings[h].each == 0 && openings[h].fingerprint.agrees(own);
    }
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

void Wide::check(const Team::Call& call, int host, const std::byte* speech) const {
  const Opening theirs = opening_of(speech);
  if (theirs.call == call.about.call && theirs.each <= ranks() && theirs.nbytes <= kLongestSpeech) return;
  throw Error("rank " + std::to_string(hosts_.leader(host)) + " is at call " + std::to_string(theirs.call) +
              ", this rank at call " + std::to_string(call.about.call) +
              ": what came over the network is not what was sent");
}

Wide::Bytes Wide::exchange_directly(Team::Call& call, const std::vector<std::byte>& speech) {
  const auto count = static_cast<size_t>(hosts_.count());
  incoming_.resize(count);
  for (int h = 0; h < hosts_.count(); h++) {
    if (h == here()) continue;
    auto& buffer = incoming_[static_cast<size_t>(h)];
    if (buffer.size() < sizeof(Opening)) buffer.resize(sizeof(Opening));
    net_.receive(hosts_.leader(h), buffer.data(), sizeof(Opening));
    net_.send(hosts_.leader(h), speech.data(), speech.size());
  }
  flush(call);
  Bytes speeches(count, speech.data());
  for (int h = 0; h < hosts_.count(); h++) {
    if (h == here()) continue;
    auto& buffer = incoming_[static_cast<size_t>(h)];
    check(call, h, buffer.data());
    const size_t length = length_of(opening_of(buffer.data()));
    if (buffer.size() < length) buffer.resize(length);
    net_.receive(hosts_.leader(h), buffer.data() + sizeof(Opening), length - sizeof(Opening));
    speeches[static_cast<size_t>(h)] = buffer.data();
  }
  flush(call);
  return speeches;
}

// In round k each gets, from the host 2^k further on, the speeches of the 2^k hosts from there on.
Wide::Bytes Wide::disseminate(Team::Call& call, const std::vector<std::byte>& speech) {
  const int count = hosts_.count();
  incoming_.resize(2);
  auto& known = incoming_[0];  // the speeches of this host and of those behind it
  auto& come = incoming_[1];
  known = speech;
  std::vector<size_t> starts{0};
  for (int distance = 1; distance < count; distance *= 2) {
    const auto some = static_cast<size_t>(std::min(distance, count - distance));
    const int to = hosts_.leader((here() - distance + count) % count);
    const int from = hosts_.leader((here() + distance) % count);
    const uint64_t given = some == starts.size() ? known.size() : starts[some];
    uint64_t coming = 0;
    net_.send(to, &given, sizeof given);
    net_.send(to, known.data(), given);
    net_.wait_received(call.patience, call.about, from, net_.receive(from, &coming, sizeof coming));
    if (coming > some * (kLongestSpeech + sizeof(Opening) + ranks() * sizeof(Fingerprint))) {
      throw Error("rank " + std::to_string(from) + " announces " + std::to_string(coming) +
                  " bytes: what came over the network is not what was sent");
    }
    come.resize(coming);
    net_.receive(from, come.data(), coming);
    flush(call);
    size_t at = 0;
    for (size_t i = 0; i < some; i++) {
      const int host = (here() + distance + static_cast<int>(i)) % count;
      if (coming - at < sizeof(Opening)) throw Error("a speech of host " + std::to_string(host) + " is cut off");
      check(call, host, come.data() + at);
      starts.push_back(known.size() + at);
      at += length_of(opening_of(come.data() + at));
      if (at > coming) throw Error("a speech of host " + std::to_string(host) + " is cut off");
    }
    known.insert(known.end(), come.begin(), come.end());
  }
  Bytes speeches(static_cast<size_t>(count));
  for (int i = 0; i < count; i++) {
    speeches[static_cast<size_t>((here() + i) % count)] = known.data() + starts[static_cast<size_t>(i)];
  }
  return speeches;
}

// --- the sizes of an all_to_all ---

void Wide::compare_sizes(Team::Call& call, const Operation& operation) {
  const auto& in_bytes = operation.in_bytes;
  const auto& out_bytes = operation.out_bytes;
  // Of every rank: what it sends to each, then what it expects from each.
  const size_t row = 2 * ranks() * sizeof(uint64_t);
  if (!fits(row * ranks())) return compare_sizes_of_many(call, operation);
  std::vector<uint64_t> sizes(in_bytes.begin(), in_bytes.end());
  sizes.insert(sizes.end(), out_bytes.begin(), out_bytes.end());
  const auto heard = meet(call, sizes.data(), {.nbytes = [row](int) { return row; }});
  const auto size = [&](int rank, size_t column) {
    uint64_t value;
    const std::byte* theirs = heard[static_cast<size_t>(hosts_.of(rank))];
    std::memcpy(&value, theirs + static_cast<size_t>(hosts_.place(rank)) * row + column * sizeof value, sizeof value);
    return value;
  };
  for (int from = 0; from < hosts_.ranks(); from++) {
    for (int to = 0; to < hosts_.ranks(); to++) {
      const uint64_t sent = size(from, static_cast<size_t>(to));
      const uint64_t expected = size(to, ranks() + static_cast<size_t>(from));
      if (sent != expected) refuse_sizes(call, from, to, sent, expected);
    }
  }
}

// Where all sizes of all ranks are too many: the leaders exchange those between their hosts, every rank compares what
// is sent to it, and all hear what the others have found.
// Cost: two meetings, and between each two hosts the product of their ranks in numbers.
void Wide::compare_sizes_of_many(Team::Call& call, const Operation& operation) {
  meet(call, nullptr, {.nbytes = [](int) { return size_t{0}; }});
  std::vector<uint64_t> row(operation.in_bytes.begin(), operation.in_bytes.end());
  std::vector<uint64_t> column(ranks());  // what each rank sends to this one
  const size_t line = ranks() * sizeof(uint64_t);
  const Buffer gives{row.data(), line, DType::u8};
  const Buffer gets{column.data(), line, DType::u8};
  if (place() != 0) {
    algorithms::gather(team_, next(call), gives, {}, 0);
    algorithms::scatter(team_, next(call), {}, gets, 0);
  } else {
    const auto here_ranks = mates().size();
    std::vector<std::vector<uint64_t>> rows(here_ranks, std::vector<uint64_t>(ranks()));
    auto columns = rows;  // by rank here
    const auto pieces = [](auto& lines) {
      Pieces all;
      for (auto& l : lines) all.push_back(reinterpret_cast<std::byte*>(l.data()));
      return all;
    };
    if (team_.size() == 1) {
      rows[0] = row;
    } else {
      algorithms::gather(team_, next(call), gives, pieces(rows), 0);
    }
    const auto count = static_cast<size_t>(hosts_.count());
    std::vector<std::vector<uint64_t>> out(count);
    std::vector<std::vector<uint64_t>> in(count);
    for (int h = 0; h < hosts_.count(); h++) {
      const auto i = static_cast<size_t>(h);
      for (const auto& theirs : rows) {
        for (const int r : hosts_.on(h)) out[i].push_back(theirs[static_cast<size_t>(r)]);
      }
      in[i].resize(hosts_.on(h).size() * here_ranks);
      if (h == here()) {
        in[i] = out[i];
        continue;
      }
      net_.send(hosts_.leader(h), out[i].data(), out[i].size() * sizeof(uint64_t));
      net_.receive(hosts_.leader(h), in[i].data(), in[i].size() * sizeof(uint64_t));
    }
    flush(call);
    for (int r = 0; r < hosts_.ranks(); r++) {
      const auto& from = in[static_cast<size_t>(hosts_.of(r))];
      for (size_t p = 0; p < here_ranks; p++) {
        columns[p][static_cast<size_t>(r)] = from[static_cast<size_t>(hosts_.place(r)) * here_ranks + p];
      }
    }
    if (team_.size() == 1) {
      column = columns[0];
    } else {
      algorithms::scatter(team_, next(call), pieces(columns), gets, 0);
    }
  }
  // From whom, how much, and what was expected; from nobody: as many as there are ranks.
  std::array<uint64_t, 3> found{ranks(), 0, 0};
  for (size_t from = ranks(); from-- > 0;) {
    if (column[from] != operation.out_bytes[from]) found = {from, column[from], operation.out_bytes[from]};
  }
  const auto heard = meet(call, found.data(), {.nbytes = [](int) { return sizeof found; }});
  std::array<uint64_t, 3> worst{ranks(), 0, 0};
  int to = 0;
  for (int r = 0; r < hosts_.ranks(); r++) {
    std::array<uint64_t, 3> theirs;
    std::memcpy(theirs.data(),
                heard[static_cast<size_t>(hosts_.of(r))] + static_cast<size_t>(hosts_.place(r)) * sizeof theirs,
                sizeof theirs);
    if (theirs[0] >= worst[0]) continue;
    worst = theirs;
    to = r;
  }
  if (worst[0] < ranks()) refuse_sizes(call, static_cast<int>(worst[0]), to, worst[1], worst[2]);
}

void Wide::refuse_sizes(Team::Call& call, int from, int to, uint64_t sent, uint64_t expected) {
  Failure failure = call.about;
  failure.kind = Kind::mismatch;
  failure.peer = from;
  Error error(failure);
  error.text = "rank " + std::to_string(from) + " sends " + std::to_string(sent) + " bytes to rank " +
               std::to_string(to) + ", which expects " + std::to_string(expected);
  disagree(call, error);
}

void Wide::disagree(Team::Call& call, Error error) {
  const auto here = team_.exchange_notes(call);
  error.sites = net_.exchange_notes(call.about, call.patience.caller, here);
  for (size_t p = 0; p < here.size(); p++) error.sites[static_cast<size_t>(mates()[p])] = here[p];
  throw Error(error);
}

}  // namespace allranks
