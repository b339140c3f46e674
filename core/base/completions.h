// Requests that have ended, for a thread that waits for the ends of many.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace allranks {

class Completions {
 public:
  void add(uint64_t ticket);
  // Waits until there are some, but no longer than timeout_ns (< 0: without limit). Takes all, in their order.
  std::vector<uint64_t> take(int64_t timeout_ns);

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<uint64_t> tickets_;
};

}  // namespace allranks
