// Blocks: memory of the user's that all ranks of the group have mapped, so that collectives on it
// read and write it where it lies, without going through the rings.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "sys/sys.h"

namespace allranks {

// One part of `bytes` per rank. Lives as long as a tensor of this rank's part does.
class SharedBlock {
 public:
  // parts[r]: the memory of rank r. number: the same on all ranks, no other block's of the group.
  SharedBlock(uint64_t number, int rank, size_t bytes, const std::vector<sys::Fd>& parts);
  SharedBlock(const SharedBlock&) = delete;

  uint64_t number() const { return number_; }
  size_t bytes() const { return bytes_; }
  std::byte* data(int rank) const { return maps_[static_cast<size_t>(rank)].data(); }
  std::byte* mine() const { return data(rank_); }

 private:
  uint64_t number_;
  int rank_;
  size_t bytes_;
  std::vector<sys::Mapping> maps_;
};

// The blocks of which this rank has tensors. Any thread may call.
class SharedBlocks {
 public:
  struct Found {
    std::shared_ptr<SharedBlock> block;  // nullptr: private memory
    size_t offset = 0;
  };

  void add(const std::shared_ptr<SharedBlock>& block);
  Found find(const void* address);

 private:
  std::mutex lock_;
  std::map<const std::byte*, std::weak_ptr<SharedBlock>> by_address_;
};

}  // namespace allranks
