// Implementation of the kernels. Each reduce_<isa>.cc includes this file once. It is compiled with the flags of that
// instruction set, and defines ALLRANKS_ISA, the namespace of its kernels.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "collective/reduce.h"
#include "collective/reduce_table.h"

namespace allranks::ALLRANKS_ISA {
namespace {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

inline float widen(bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

inline bf16 narrow_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>(x != x ? nan : rounded)};
}

inline float widen(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  // Shift the exponent field to its position in float32. The multiplication by 2^112 corrects the bias, and also
  // converts subnormals into normals.
  float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  if (magnitude >= 0x7c00u) value = std::bit_cast<float>((magnitude << 13) | 0x7f800000u);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

inline f16 narrow_f16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t out;
  if (magnitude > 0x7f800000u) {
    out = 0x7e00u | ((magnitude >> 13) & 0x3ffu);  // NaN
  } else if (magnitude >= 0x477ff000u) {
    out = 0x7c00u;  // infinity: the value rounds beyond the largest float16
  } else if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 lets the floating-point adder do the shift and the rounding.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    out = std::bit_cast<uint32_t>(shifted) - 0x3f000000u;
  } else {
    const uint32_t odd = (magnitude >> 13) & 1u;
    out = (magnitude + 0xc8000fffu + odd) >> 13;  // rebias by -112 and round to nearest even
  }
  return {static_cast<uint16_t>(sign | out)};
}

// Every byte except 0 is true, as in torch.
struct boolean {
  uint8_t bits;
};

// Accumulator type: the type in which the elements of a dtype are combined.
template <class T>
struct Acc {
  using type = T;
};
template <>
struct Acc<f16> {
  using type = float;
};
template <>
struct Acc<bf16> {
  using type = float;
};

template <>
struct Acc<boolean> {
  using type = uint8_t;
};

template <class T>
inline typename Acc<T>::type load(T x) {
  if constexpr (std::is_same_v<T, f16> || std::is_same_v<T, bf16>) {
    return widen(x);
  } else if constexpr (std::is_same_v<T, boolean>) {
    return x.bits != 0;
  } else {
    return x;
  }
}

template <class T>
inline T store(typename Acc<T>::type x) {
  if constexpr (std::is_same_v<T, f16>) {
    return narrow_f16(x);
  } else if constexpr (std::is_same_v<T, bf16>) {
    return narrow_bf16(x);
  } else if constexpr (std::is_same_v<T, boolean>) {
    return {x};
  } else {
    return x;
  }
}

struct Sum {
  template <class A>
  static A combine(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      using U = std::make_unsigned_t<A>;  // unsigned overflow wraps, as in torch; signed overflow is undefined
      return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
      return a + b;
    }
  }
};
struct Prod {
  template <class A>
  static A combine(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      // Use 64 bits: a product of two uint16 would be promoted to int, and could overflow.
      return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};
struct Min {  // b != b: propagate NaN
  template <class A>
  static A combine(A a, A b) {
    return (b < a || b != b) ? b : a;
  }
};
struct Max {  // b != b: propagate NaN
  template <class A>
  static A combine(A a, A b) {
    return (b > a || b != b) ? b : a;
  }
};

struct And {
  template <class A>
  static A combine(A a, A b) {
    return static_cast<A>(a & b);
  }
};
struct Or {
  template <class A>
  static A combine(A a, A b) {
    return static_cast<A>(a | b);
  }
};
struct Xor {
  template <class A>
  static A combine(A a, A b) {
    return static_cast<A>(a ^ b);
  }
};

// Divide a sum for AVG. Integers as in nccl: the wrapped sum, divided towards zero. For up to 32 bits, double is exact,
// and its division is vectorized.
template <class A>
inline A divide(A sum, int parts) {
  if constexpr (std::is_integral_v<A> && sizeof(A) < 8) {
    return static_cast<A>(static_cast<double>(sum) / parts);
  } else {
    return sum / static_cast<A>(parts);
  }
}

template <class T>
void widen_tile(typename Acc<T>::type* acc, const T* src, size_t n) {
  for (size_t i = 0; i < n; i++) acc[i] = load(src[i]);
}
template <class T>
void narrow_tile(T* dst, const typename Acc<T>::type* acc, size_t n) {
  for (size_t i = 0; i < n; i++) dst[i] = store<T>(acc[i]);
}

#if defined(__F16C__)
template <>
void widen_tile<f16>(float* acc, const f16* src, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(acc + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  }
  for (; i < n; i++) acc[i] = widen(src[i]);
}
template <>
void narrow_tile<f16>(f16* dst, const float* acc, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(acc + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), h);
  }
  for (; i < n; i++) dst[i] = narrow_f16(acc[i]);
}
#endif

constexpr size_t kTile = 1024;  // elements: the accumulators stay in the L1 cache

// Combine the sources in their order, in one pass. A source has the dtype T or the type of its accumulators. dst may be
// one of the sources. ivdep is valid because no iteration reads an element that another iteration writes. Each source
// is a separate argument because GCC 12 does not vectorize a loop over an array of sources: it unrolls and jams that
// loop, and emits scalar code.
template <class T, class Op, bool kAverage, class To, class First, class... More>
void combine(To* dst, size_t n, int parts, const First* first, const More*... more) {
  using A = typename Acc<T>::type;
#pragma GCC ivdep
  for (size_t i = 0; i < n; i++) {
    A x = load(first[i]);
    ((x = Op::template combine<A>(x, load(more[i]))), ...);
    if constexpr (kAverage) x = divide(x, parts);
    if constexpr (std::is_same_v<To, A>) {
      dst[i] = x;
    } else {
      dst[i] = store<T>(x);
    }
  }
}

// Reduce up to four sources in one pass. Each further pass adds three sources to the accumulators of a tile, which stay
// in the L1 cache. More sources per pass were not measured.
template <class T, class Op, bool kAverage>
void reduce_in_fours(T* dst, const void* const* srcs, int nsrcs, size_t count, int parts) {
  const auto at = [&](int s, size_t begin = 0) { return static_cast<const T*>(srcs[s]) + begin; };
  switch (nsrcs) {
    case 1:
      return combine<T, Op, kAverage>(dst, count, parts, at(0));
    case 2:
      return combine<T, Op, kAverage>(dst, count, parts, at(0), at(1));
    case 3:
      return combine<T, Op, kAverage>(dst, count, parts, at(0), at(1), at(2));
    case 4:
      return combine<T, Op, kAverage>(dst, count, parts, at(0), at(1), at(2), at(3));
    default:
      break;
  }
  std::array<typename Acc<T>::type, kTile> acc;
  auto* const sum = acc.data();
  for (size_t b = 0; b < count; b += kTile) {
    const size_t n = std::min(kTile, count - b);
    combine<T, Op, false>(sum, n, parts, at(0, b), at(1, b), at(2, b), at(3, b));
    int s = 4;
    for (; nsrcs - s > 3; s += 3) combine<T, Op, false>(sum, n, parts, sum, at(s, b), at(s + 1, b), at(s + 2, b));
    switch (nsrcs - s) {
      case 1:
        combine<T, Op, kAverage>(dst + b, n, parts, sum, at(s, b));
        break;
      case 2:
        combine<T, Op, kAverage>(dst + b, n, parts, sum, at(s, b), at(s + 1, b));
        break;
      default:
        combine<T, Op, kAverage>(dst + b, n, parts, sum, at(s, b), at(s + 1, b), at(s + 2, b));
    }
  }
}

// Reduce float16. Dedicated instructions (F16C) convert whole tiles, so each source is converted to float32 and then
// added.
template <class Op, bool kAverage>
void reduce_halves(f16* dst, const void* const* srcs, int nsrcs, size_t count, int parts) {
  std::array<float, kTile> acc;
  std::array<float, kTile> operand;
  for (size_t begin = 0; begin < count; begin += kTile) {
    const size_t n = std::min(kTile, count - begin);
    widen_tile<f16>(acc.data(), static_cast<const f16*>(srcs[0]) + begin, n);
    for (int s = 1; s < nsrcs; s++) {
      widen_tile<f16>(operand.data(), static_cast<const f16*>(srcs[s]) + begin, n);
      combine<float, Op, false>(acc.data(), n, parts, acc.data(), operand.data());
    }
    if constexpr (kAverage) {
      for (size_t i = 0; i < n; i++) acc[i] = divide(acc[i], parts);
    }
    narrow_tile<f16>(dst + begin, acc.data(), n);
  }
}

template <class T, class Op, bool kAverage>
void reduce(void* dst, const void* const* srcs, int nsrcs, size_t count, int parts) {
  if constexpr (std::is_same_v<T, f16>) {
    reduce_halves<Op, kAverage>(static_cast<f16*>(dst), srcs, nsrcs, count, parts);
  } else {
    reduce_in_fours<T, Op, kAverage>(static_cast<T*>(dst), srcs, nsrcs, count, parts);
  }
}

// Reduce complex numbers, as pairs of real numbers.
template <class T, class Op, bool kAverage>
void reduce_pairs(void* dst, const void* const* srcs, int nsrcs, size_t count, int parts) {
  reduce<T, Op, kAverage>(dst, srcs, nsrcs, 2 * count, parts);
}

template <class T>
void fill(KernelTable& table, DType dtype) {
  auto& row = table.at(static_cast<size_t>(dtype));
  const auto put = [&row](ReduceOp op, Kernel kernel) { row.at(static_cast<size_t>(op)) = kernel; };
  put(ReduceOp::sum, reduce<T, Sum, false>);
  put(ReduceOp::premul_sum, reduce<T, Sum, false>);
  put(ReduceOp::prod, reduce<T, Prod, false>);
  put(ReduceOp::min, reduce<T, Min, false>);
  put(ReduceOp::max, reduce<T, Max, false>);
  put(ReduceOp::avg, reduce<T, Sum, true>);
  if constexpr (std::is_integral_v<T>) {
    put(ReduceOp::band, reduce<T, And, false>);
    put(ReduceOp::bor, reduce<T, Or, false>);
    put(ReduceOp::bxor, reduce<T, Xor, false>);
  }
}

void fill_boolean(KernelTable& table) {
  auto& row = table.at(static_cast<size_t>(DType::boolean));
  for (const auto op : {ReduceOp::sum, ReduceOp::max, ReduceOp::bor}) {
    row.at(static_cast<size_t>(op)) = reduce<boolean, Or, false>;
  }
  for (const auto op : {ReduceOp::prod, ReduceOp::min, ReduceOp::band}) {
    row.at(static_cast<size_t>(op)) = reduce<boolean, And, false>;
  }
  row.at(static_cast<size_t>(ReduceOp::bxor)) = reduce<boolean, Xor, false>;
}

template <class T>
void fill_complex(KernelTable& table, DType dtype) {
  auto& row = table.at(static_cast<size_t>(dtype));
  row.at(static_cast<size_t>(ReduceOp::sum)) = reduce_pairs<T, Sum, false>;
  row.at(static_cast<size_t>(ReduceOp::premul_sum)) = reduce_pairs<T, Sum, false>;
  row.at(static_cast<size_t>(ReduceOp::avg)) = reduce_pairs<T, Sum, true>;
}

template <class T>
Partials conversion() {
  return {.dtype = DType::f32,
          .widen = [](void* dst, const void* src,
                      size_t count) { widen_tile<T>(static_cast<float*>(dst), static_cast<const T*>(src), count); },
          .narrow = [](void* dst, const void* src,
                       size_t count) { narrow_tile<T>(static_cast<T*>(dst), static_cast<const float*>(src), count); }};
}

}  // namespace

Conversions conversions() { return {conversion<f16>(), conversion<bf16>()}; }

KernelTable kernels() {
  KernelTable table{};
  fill<uint8_t>(table, DType::u8);
  fill<int8_t>(table, DType::i8);
  fill<int16_t>(table, DType::i16);
  fill<int32_t>(table, DType::i32);
  fill<int64_t>(table, DType::i64);
  fill<uint16_t>(table, DType::u16);
  fill<uint32_t>(table, DType::u32);
  fill<uint64_t>(table, DType::u64);
  fill<f16>(table, DType::f16);
  fill<bf16>(table, DType::bf16);
  fill<float>(table, DType::f32);
  fill<double>(table, DType::f64);
  fill_boolean(table);
  fill_complex<f16>(table, DType::c32);
  fill_complex<float>(table, DType::c64);
  fill_complex<double>(table, DType::c128);
  return table;
}

}  // namespace allranks::ALLRANKS_ISA
