#include "collective/shared.h"

#include <iterator>

namespace allranks {

SharedBlock::SharedBlock(std::shared_ptr<SharedBlocks> blocks, uint64_t number, int rank, size_t bytes,
                         const std::vector<sys::Fd>& parts)
    : blocks_(std::move(blocks)), number_(number), rank_(rank), bytes_(bytes) {
  for (const auto& fd : parts) maps_.emplace_back(fd, bytes, true, true);
  const std::lock_guard lock(blocks_->lock_);
  blocks_->by_address_[mine()] = this;
}

SharedBlock::~SharedBlock() {
  if (forks_ != sys::forks()) return;  // in a forked child: a thread of the parent may have held the lock at the fork
  const std::lock_guard lock(blocks_->lock_);
  blocks_->by_address_.erase(mine());
}

const SharedBlock* SharedBlocks::find(const void* data, size_t nbytes) {
  const std::lock_guard lock(lock_);
  const auto* at = static_cast<const std::byte*>(data);
  const auto after = by_address_.upper_bound(at);
  if (after == by_address_.begin()) return nullptr;
  const SharedBlock* block = std::prev(after)->second;
  return at + nbytes <= block->mine() + block->bytes() ? block : nullptr;
}

}  // namespace allranks
