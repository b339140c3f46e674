// all_to_all: rank r's piece for rank q ends on rank q, as its piece from rank r. Sizes may all differ.
//
// Every rank posts, at the head of a piece of its ring, the sizes that it sends and that it expects;
// every rank compares all of them, so that a disagreement between two ranks is an error on every rank.
// The data follows in the same piece where a rank's fits there; if that of all ranks does, that was it.
// Otherwise it is read where it lies, if that is a shared block on all ranks; or else further pieces
// of the rings are cut into one cell per rank, until the largest part is through.
// Cost: one latency (one per piece of the ring); what a rank sends is written once, what it gets read once.
#include <numeric>
#include <string>

#include "collective/algorithms/moves.h"

namespace allranks::algorithms {

namespace {

// The head: whether the data follows, then what goes to each rank, then what is expected.
class Head {
 public:
  Head(std::byte* piece, int ranks) : words_(reinterpret_cast<uint64_t*>(piece)), ranks_(static_cast<size_t>(ranks)) {}

  uint64_t& complete() { return words_[0]; }
  uint64_t& sends(size_t to) { return words_[1 + to]; }
  uint64_t& expects(size_t from) { return words_[1 + ranks_ + from]; }
  size_t bytes() const { return (1 + 2 * ranks_) * sizeof(uint64_t); }
  // Where the data for a rank lies.
  size_t offset(size_t to) {
    size_t at = bytes();
    for (size_t r = 0; r < to; r++) at += (sends(r) + 63) / 64 * 64;
    return at;
  }

 private:
  uint64_t* words_;
  size_t ranks_;
};

struct Compared {
  bool all_fit = true;  // every rank's data follows its head
  size_t largest = 0;   // of what goes from one rank to another
};

// Throws a mismatch, on every rank, unless every rank expects what it is sent.
template <class HeadOf>
Compared compare_sizes(LocalComm& comm, LocalComm::Call& call, HeadOf&& head) {
  const auto ranks = static_cast<size_t>(comm.size());
  Compared found;
  for (size_t from = 0; from < ranks; from++) {
    found.all_fit = found.all_fit && head(from).complete() == 1;
    for (size_t to = 0; to < ranks; to++) {
      const uint64_t sent = head(from).sends(to);
      const uint64_t expected = head(to).expects(from);
      if (sent != expected) {
        Failure failure = call.about;
        failure.kind = Kind::mismatch;
        failure.peer = static_cast<int>(from);
        Error error(failure);
        error.text = "rank " + std::to_string(from) + " sends " + std::to_string(sent) + " bytes to rank " +
                     std::to_string(to) + ", which expects " + std::to_string(expected);
        error.sites = comm.exchange_notes(call);
        throw error;
      }
      if (from != to) found.largest = std::max(found.largest, static_cast<size_t>(sent));
    }
  }
  return found;
}

// Through pieces of the rings that are cut into one cell per rank, until the largest part is through.
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
        for (size_t r = 0; r < ranks; r++) {
          if (r != me) comm.copier().copy(ring.at(comm.rank(), s) + r * cell, ins[r] + s * cell, bytes(in_bytes[r], s));
        }
      },
      [&](size_t s) {
        for (size_t r = 0; r < ranks; r++) {
          if (r == me) continue;
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
  for (size_t r = 0; r < ranks; r++) {
    mine.sends(r) = in_bytes[r];
    mine.expects(r) = out_bytes[r];
  }
  const bool fits = mine.offset(ranks) <= most;
  mine.complete() = fits ? 1 : 0;
  if (fits) {
    for (size_t r = 0; r < ranks; r++) {
      if (r != me) comm.copier().copy(first.at(comm.rank()) + mine.offset(r), ins[r], in_bytes[r]);
    }
  }
  const std::byte* whole = contiguous(ins, [&](size_t r) { return in_bytes[r]; });
  const size_t total = std::accumulate(in_bytes.begin(), in_bytes.end(), size_t{0});
  // Whether what comes from others overwrites what they read here.
  bool overwritten = false;
  for (size_t r = 0; r < ranks; r++) overwritten = overwritten || intersect(outs[r], out_bytes[r], whole, total);
  const auto tensors = comm.arrive_at(call, overwritten ? nullptr : whole, total);

  const Compared sizes = compare_sizes(comm, call, head);
  move_bytes(outs[me], ins[me], in_bytes[me]);
  if (sizes.all_fit) {
    for (size_t r = 0; r < ranks; r++) {
      if (r != me) move_bytes(outs[r], first.at(static_cast<int>(r)) + head(r).offset(me), out_bytes[r]);
    }
    return;
  }
  if (!tensors.empty()) {
    for (size_t r = 0; r < ranks; r++) {
      if (r == me) continue;
      size_t offset = 0;
      for (size_t to = 0; to < me; to++) offset += head(r).sends(to);
      move_bytes(outs[r], tensors[r] + offset, out_bytes[r]);
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
