// Blocks: memory of the user that all ranks of the group have mapped. Collectives read and write it in place, without
// the rings.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/sys.h"

namespace allranks {

class SharedBlock;

// The blocks of which this rank has tensors. Any thread may call.
class SharedBlocks {
 public:
  // The block in which all of these bytes lie; nullptr: private memory. Lives as long as the tensor there.
  const SharedBlock* find(const void* data, size_t nbytes);

 private:
  friend class SharedBlock;

  std::mutex lock_;
  std::map<const std::byte*, const SharedBlock*> by_address_;
};

// One part of `bytes` per rank. Its owner is whoever keeps this rank's tensors on it.
class SharedBlock {
 public:
  // parts[r]: the memory of rank r. number: the same on all ranks, no other block's of the group.
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
