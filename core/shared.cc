#include "shared.h"

#include <iterator>

namespace allranks {

SharedBlock::SharedBlock(uint64_t number, int rank, size_t bytes, const std::vector<sys::Fd>& parts)
    : number_(number), rank_(rank), bytes_(bytes) {
  for (const auto& fd : parts) maps_.emplace_back(fd, bytes);
}

void SharedBlocks::add(const std::shared_ptr<SharedBlock>& block) {
  const std::lock_guard lock(lock_);
  std::erase_if(by_address_, [](const auto& entry) { return entry.second.expired(); });
  by_address_[block->mine()] = block;
}

SharedBlocks::Found SharedBlocks::find(const void* address) {
  const std::lock_guard lock(lock_);
  const auto* at = static_cast<const std::byte*>(address);
  auto it = by_address_.upper_bound(at);
  if (it == by_address_.begin()) return {};
  const auto block = std::prev(it)->second.lock();
  if (block == nullptr || at >= block->mine() + block->bytes()) return {};
  return {block, static_cast<size_t>(at - block->mine())};
}

}  // namespace allranks
