// Copies into memory that other cores are about to read, with the kind of store that is faster for these cores.
//
// A plain store first fetches the cache line from the cache that holds it: that of the reader, which read it in the
// previous round. This is fast between cores that share an L3 cache (measured: 10 to 25 GB/s) and slow between other
// cores (5 GB/s). There, non-temporal stores, which bypass the caches, are three times as fast (17 GB/s). Within one L3
// cache they cost the reader up to twice the time. The faster kind cannot be known in advance, because schedulers and
// hypervisors move ranks. Plain copies are therefore timed (docs/decisions/018).
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
  int turns_ = 0;          // number of copies past the caches since the last plain copy
  float ns_per_byte_ = 0;  // moving average of plain copies
};

}  // namespace allranks
