// Copies into memory that other cores are about to read, in the way that is faster where they run.
//
// A plain store first fetches its line from whichever cache holds it: the reader's, which read it
// last time round. That is quick between cores that share an L3 cache (10 to 25 GB/s were measured),
// and slow between cores that do not (5 GB/s), where stores that go past the caches are three times faster
// (17 GB/s) but, within one L3, cost the reader up to twice the time. Which of the two it is cannot be known
// beforehand: schedulers and hypervisors move ranks. So plain copies are timed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace allranks {

// Used by one thread at a time.
class Copier {
 public:
  void copy(std::byte* to, const std::byte* from, size_t n);

 private:
  bool past_caches_ = false;
  int turns_ = 0;          // of copies past the caches since a plain one was tried
  float ns_per_byte_ = 0;  // of plain copies, lately
};

}  // namespace allranks
