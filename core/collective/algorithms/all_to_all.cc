// all_to_all: rank r's piece for rank q ends on rank q, as its piece from rank r. Sizes may all differ.
//
// Every rank posts, at the head of a piece of its ring, the sizes that it sends and that it expects. It
// compares what it is sent with what it expects; a sum over what all ranks post tells it of any other
// disagreement, so that one between two ranks is an error on every rank, and reads a line or two of each.
// The data follows in the same piece where a rank's fits there; if that of all ranks does, that was it.
// Otherwise it is read where it lies, if that is a shared block on all ranks; or else further pieces
// of the rings are cut into one cell per rank, until the largest part is through.
// Cost: one latency (one per piece of the ring); what a rank sends is written once, what it gets read once.
#include <numeric>
#include <string>

#include "collective/algorithms/moves.h"

namespace allranks::algorithms {

namespace {

// What goes from one rank to another.
struct Part {
  uint64_t bytes;
  uint64_t at;      // where it begins behind the head, if the data follows
  uint64_t before;  // bytes of the parts before it
};

// The head: what concerns everybody, a part for each rank, and the sizes that are expected from each.
class Head {
 public:
  struct ForAll {
    uint64_t complete;  // whether the data follows
    uint64_t largest;   // of the parts for others
    uint64_t sum;       // over what it sends, less that over what it expects: those of all ranks together are 0
  };

  Head(std::byte* piece, int ranks) : piece_(piece), ranks_(static_cast<size_t>(ranks)) {}

  ForAll& for_all() { return *reinterpret_cast<ForAll*>(piece_); }
  Part& part(size_t to) { return reinterpret_cast<Part*>(piece_ + sizeof(ForAll))[to]; }
  uint64_t& expects(size_t from) {
    return reinterpret_cast<uint64_t*>(piece_ + sizeof(ForAll) + ranks_ * sizeof(Part))[from];
  }
  size_t bytes() const { return sizeof(ForAll) + ranks_ * (sizeof(Part) + sizeof(uint64_t)); }

 private:
  std::byte* piece_;
  size_t ranks_;
};

// A number for a size between two ranks, of which sums over different sizes differ (the finaliser of splitmix64).
uint64_t mixed(size_t from, size_t to, uint64_t bytes) {
  uint64_t x = bytes * 0x9e3779b97f4a7c15 + (from << 32 | to) + 1;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// Writes a rank's head. Returns where its data would end.
size_t fill(Head head, size_t me, const std::vector<size_t>& in_bytes, const std::vector<size_t>& out_bytes) {
  Head::ForAll& for_all = head.for_all();
  for_all.largest = for_all.sum = 0;
  size_t at = head.bytes();
  size_t before = 0;
  for (size_t r = 0; r < in_bytes.size(); r++) {
    head.part(r) = {.bytes = in_bytes[r], .at = at, .before = before};
    at += (in_bytes[r] + 63) / 64 * 64;
    before += in_bytes[r];
    head.expects(r) = out_bytes[r];
    for_all.sum += mixed(me, r, in_bytes[r]) - mixed(r, me, out_bytes[r]);
    if (r != me) for_all.largest = std::max<uint64_t>(for_all.largest, in_bytes[r]);
  }
  return at;
}

struct Compared {
  bool all_fit = true;  // every rank's data follows its head
  size_t largest = 0;   // of what goes from one rank to another
};

// Throws the first disagreement of two ranks. Every rank finds the same.
template <class HeadOf>
void refuse_sizes(LocalComm& comm, LocalComm::Call& call, HeadOf&& head) {
  const auto ranks = static_cast<size_t>(comm.size());
  for (size_t from = 0; from < ranks; from++) {
    for (size_t to = 0; to < ranks; to++) {
      const uint64_t sent = head(from).part(to).bytes;
      const uint64_t expected = head(to).expects(from);
      if (sent == expected) continue;
      Failure failure = call.about;
      failure.kind = Kind::mismatch;
      failure.peer = static_cast<int>(from);
      Error error(failure);
      error.text = "rank " + std::to_string(from) + " sends " + std::to_string(sent) + " bytes to rank " +
                   std::to_string(to) + ", which expects " + std::to_string(expected);
      error.sites = comm.exchange_notes(call);
      throw error;
    }
  }
}

// Throws a mismatch, on every rank, unless every rank expects what it is sent.
template <class HeadOf>
Compared compare_sizes(LocalComm& comm, LocalComm::Call& call, HeadOf&& head, const std::vector<size_t>& out_bytes) {
  const auto ranks = static_cast<size_t>(comm.size());
  const auto me = static_cast<size_t>(comm.rank());
  Compared found;
  uint64_t sum = 0;
  bool agree = true;
  for (size_t from = 0; from < ranks; from++) {
    const Head::ForAll& theirs = head(from).for_all();
    found.all_fit = found.all_fit && theirs.complete == 1;
    found.largest = std::max<size_t>(found.largest, theirs.largest);
    sum += theirs.sum;
    agree = agree && head(from).part(me).bytes == out_bytes[from];
  }
  if (sum != 0 || !agree) refuse_sizes(comm, call, head);
  return found;
}

// Through pieces of the rings that are cut into one cell per rank, until the largest part is through. Each rank begins
// with the next one, so that they do not all read the first one's ring at a time.
void exchange_in_cells(LocalComm& comm, LocalComm::Call& call, const Pieces& ins, const std::vector<size_t>& in_bytes,
                       const Pieces& outs, const std::vector<size_t>& out_bytes, size_t largest) {
  const auto ranks = static_cast<size_t>(comm.size());
  const auto me = static_cast<size_t>(comm.rank());
  const size_t piece = piece_of(comm, largest * ranks);
  const size_t cell = cell_bytes(piece, comm.size());
  const size_t steps = steps_for(largest, cell);
  const auto ring = comm.take(piece, steps);
  const auto bytes = [&](size_t whole, size_t s) { return whole > s * cell ? std::min(cell, whole - s * cell) : 0; };
  pipeline(
      comm, call, steps,
      [&](size_t s) {
        for (size_t k = 1; k < ranks; k++) {
          const size_t r = (me + k) % ranks;
          comm.copier().copy(ring.at(comm.rank(), s) + r * cell, ins[r] + s * cell, bytes(in_bytes[r], s));
        }
      },
      [&](size_t s) {
        for (size_t k = 1; k < ranks; k++) {
          const size_t r = (me + ranks - k) % ranks;
          move_bytes(outs[r] + s * cell, ring.at(static_cast<int>(r), s) + me * cell, bytes(out_bytes[r], s));
        }
      });
}

}  // namespace

void all_to_all(LocalComm& comm, LocalComm::Call& call, const Pieces& ins, const std::vector<size_t>& in_bytes,
                const Pieces& outs, const std::vector<size_t>& out_bytes) {
  const auto ranks = static_cast<size_t>(comm.size());
  const auto me = static_cast<size_t>(comm.rank());
  // The others' sizes are not known yet: all ranks take the most.
  const size_t most = comm.shm().sizes().piece;
  const auto first = comm.take(most);
  const auto head = [&](size_t r) { return Head(first.at(static_cast<int>(r)), comm.size()); };

  Head mine = head(me);
  if (mine.bytes() > most) throw Error("all_to_all: too many ranks for a piece of the ring");
  const bool fits = fill(mine, me, in_bytes, out_bytes) <= most;
  mine.for_all().complete = fits ? 1 : 0;
  if (fits) {
    for (size_t r = 0; r < ranks; r++) {
      if (r != me) comm.copier().copy(first.at(comm.rank()) + mine.part(r).at, ins[r], in_bytes[r]);
    }
  }
  const std::byte* whole = contiguous(ins, [&](size_t r) { return in_bytes[r]; });
  const size_t total = std::accumulate(in_bytes.begin(), in_bytes.end(), size_t{0});
  // Whether what comes from others overwrites what they read here.
  bool overwritten = false;
  for (size_t r = 0; r < ranks; r++) overwritten = overwritten || intersect(outs[r], out_bytes[r], whole, total);
  const auto tensors = comm.arrive_at(call, overwritten ? nullptr : whole, total);

  const Compared sizes = compare_sizes(comm, call, head, out_bytes);
  move_bytes(outs[me], ins[me], in_bytes[me]);
  if (sizes.all_fit) {
    for (size_t r = 0; r < ranks; r++) {
      if (r != me) move_bytes(outs[r], first.at(static_cast<int>(r)) + head(r).part(me).at, out_bytes[r]);
    }
    return;
  }
  if (!tensors.empty()) {
    for (size_t r = 0; r < ranks; r++) {
      if (r != me) move_bytes(outs[r], tensors[r] + head(r).part(me).before, out_bytes[r]);
    }
    comm.depart(call);
    return;
  }
  exchange_in_cells(comm, call, ins, in_bytes, outs, out_bytes, sizes.largest);
}

void all_to_all(LocalComm& comm, LocalComm::Call& call, const Operation& operation) {
  all_to_all(comm, call, operation.ins, operation.in_bytes, operation.outs, operation.out_bytes);
}

}  // namespace allranks::algorithms
