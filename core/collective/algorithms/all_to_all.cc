// all_to_all: rank q receives the part that rank r sends to it. All sizes may differ.
//
// Every rank posts the sizes that it sends and expects, in a head at the start of a chunk of its ring. It compares the
// sizes sent to it with the sizes that it expects. A sum over the posted sizes of all ranks shows any other
// disagreement. A disagreement between two ranks is therefore an error on every rank. In spite of this, a rank reads
// only one or two cache lines of each other rank.
//
// If the data of a rank fits into the same chunk, it follows the head. If this holds for all ranks, the call is
// complete after one exchange. Otherwise, if the data of all ranks is in a shared block, the ranks read it there.
// Otherwise further chunks of the rings are divided into one cell per rank, until the largest part is transferred.
//
// Cost: one latency (one per chunk of the ring); each byte sent is written once, each byte received is read once.
#include <numeric>
#include <string>

#include "collective/algorithms/moves.h"

namespace allranks::algorithms {

namespace {

// The part of the data that one rank sends to another.
struct Part {
  uint64_t bytes;
  uint64_t at;      // offset in the chunk, if the data follows the head
  uint64_t before;  // bytes of all previous parts: the offset in a shared block
};

// The head of a chunk: fields for all ranks, one Part per receiver, and the size expected from each sender.
class Head {
 public:
  struct ForAll {
    uint64_t complete;  // 1: the data follows the head
    uint64_t largest;   // the largest part for another rank
    uint64_t sum;       // sum over the sizes sent minus sum over the sizes expected; adds up to 0 over all ranks
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

// Return a hash of a size and its two ranks. The sums of such hashes differ if any size differs. Source: the finalizer
// of splitmix64.
uint64_t mixed(size_t from, size_t to, uint64_t bytes) {
  uint64_t x = bytes * 0x9e3779b97f4a7c15 + (from << 32 | to) + 1;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// Write the head of a rank. Returns the offset at which its data would end.
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
  bool all_fit = true;  // the data of every rank follows its head
  size_t largest = 0;   // the largest part of any rank for another
};

// Throw an error for the first disagreement between two ranks. All ranks find the same one.
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

// Compare the sizes of all ranks. Throws a mismatch on every rank if any rank expects another size than it is sent.
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

// Transfer the data through chunks of the rings, divided into one cell per rank. Each rank starts with a different
// peer, so that the ranks do not all read the same ring at the same time.
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
  // All ranks must take the same chunk size, and the sizes of the other ranks are not known yet: take the maximum.
  const size_t most = comm.shm().sizes().piece;
  const auto first = comm.take(most);
  const auto head = [&](size_t r) { return Head(first.at(static_cast<int>(r)), comm.size()); };

  Head mine = head(me);
  if (mine.bytes() > most) throw Error("all_to_all: too many ranks for a chunk of the ring");
  const bool fits = fill(mine, me, in_bytes, out_bytes) <= most;
  mine.for_all().complete = fits ? 1 : 0;
  if (fits) {
    for (size_t r = 0; r < ranks; r++) {
      if (r != me) comm.copier().copy(first.at(comm.rank()) + mine.part(r).at, ins[r], in_bytes[r]);
    }
  }
  const std::byte* whole = contiguous(ins, [&](size_t r) { return in_bytes[r]; });
  const size_t total = std::accumulate(in_bytes.begin(), in_bytes.end(), size_t{0});
  // Whether the outputs of this rank overlap its inputs. If so, other ranks must not read the inputs in place.
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
