// Shared blocks: user memory that all ranks of the group have mapped. Collectives read and write it in place, without
// the rings.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/sys.h"

namespace allranks {

class SharedBlock;

// The blocks in which this rank has tensors. Thread-safe.
class SharedBlocks {
 public:
  // Return the block that contains all of these bytes; nullptr: the memory is private. The block exists as long as the
  // tensor in it.
  const SharedBlock* find(const void* data, size_t nbytes);

 private:
  friend class SharedBlock;

  std::mutex lock_;
  std::map<const std::byte*, const SharedBlock*> by_address_;
};

// A block with one part of `bytes` bytes per rank. The owner of this rank's tensors in the block owns the block.
class SharedBlock {
 public:
  // parts[r]: the memory of rank r. number: identifies the block in the group; the same on all ranks.
  SharedBlock(std::shared_ptr<SharedBlocks> blocks, uint64_t number, int rank, size_t bytes,
              const std::vector<sys::Fd>& parts);
  SharedBlock(const SharedBlock&) = delete;
  ~SharedBlock();

  uint64_t number() const { return number_; }
  size_t bytes() const { return bytes_; }
  std::byte* data(int rank) const { return maps_[static_cast<size_t>(rank)].data(); }
  std::byte* mine() const { return data(rank_); }

 private:
  std::shared_ptr<SharedBlocks> blocks_;
  const uint32_t forks_ = sys::forks();
  uint64_t number_;
  int rank_;
  size_t bytes_;
  std::vector<sys::Mapping> maps_;
};

}  // namespace allranks
