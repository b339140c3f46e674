#include "channel/copier.h"

#include <algorithm>
#include <cstring>

#include "base/sys.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace allranks {

#if defined(__x86_64__)

namespace {

constexpr size_t kLeast = 16 << 10;  // bytes; for smaller copies, latency matters and not bandwidth
constexpr float kSlow = 1.0f / 6;    // ns per byte (6 GB/s); slower plain copies are replaced by copies past the caches
constexpr float kFast = 1.0f / 8;    // 8 GB/s; differs from kSlow, so that the choice does not alternate
constexpr int kTurns = 32;           // one of 32 copies is plain, to detect that ranks have moved
constexpr size_t kVector = sizeof(__m128i);
constexpr size_t kStride = 4 * kVector;

void copy_past_caches(std::byte* to, const std::byte* from, size_t n) {
  const size_t head = (kVector - reinterpret_cast<uintptr_t>(to) % kVector) % kVector;
  std::memcpy(to, from, head);
  size_t done = head;
  for (; done + kStride <= n; done += kStride) {
    const auto* s = reinterpret_cast<const __m128i*>(from + done);
    auto* t = reinterpret_cast<__m128i*>(to + done);
    const __m128i a = _mm_loadu_si128(s);
    const __m128i b = _mm_loadu_si128(s + 1);
    const __m128i c = _mm_loadu_si128(s + 2);
    const __m128i d = _mm_loadu_si128(s + 3);
    _mm_stream_si128(t, a);
    _mm_stream_si128(t + 1, b);
    _mm_stream_si128(t + 2, c);
    _mm_stream_si128(t + 3, d);
  }
  std::memcpy(to + done, from + done, n - done);
  _mm_sfence();  // non-temporal stores are weakly ordered: without it, a reader could see the flag before the data
}

}  // namespace

void Copier::copy(std::byte* to, const std::byte* from, size_t n) {
  if (n < kLeast) {
    if (n > 0) std::memcpy(to, from, n);
    return;
  }
  if (past_caches_ && ++turns_ < kTurns) {
    copy_past_caches(to, from, n);
    return;
  }
  turns_ = 0;
  const int64_t began = sys::now_ns();
  std::memcpy(to, from, n);
  // Limited, because the time of a copy that was interrupted shows nothing about the caches.
  const float took = std::min(static_cast<float>(sys::now_ns() - began) / static_cast<float>(n), 2 * kSlow);
  ns_per_byte_ += (took - ns_per_byte_) / 4;
  past_caches_ = ns_per_byte_ > (past_caches_ ? kFast : kSlow);
}

#else

void Copier::copy(std::byte* to, const std::byte* from, size_t n) {
  if (n > 0) std::memcpy(to, from, n);
}

#endif

}  // namespace allranks
