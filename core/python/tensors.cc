#include "python/tensors.h"

#include <algorithm>

namespace nb = nanobind;

namespace allranks {

namespace {

// Return the number of a DType, or -1 if the core does not support the type.
int dtype_of(const dlpack::DataType& type) {
  if (type.lanes != 1) return -1;
  const auto by_bits = [&](int b8, int b16, int b32, int b64, int b128 = -1) {
    switch (type.bits) {
      case 8:
        return b8;
      case 16:
        return b16;
      case 32:
        return b32;
      case 64:
        return b64;
      case 128:
        return b128;
      default:
        return -1;
    }
  };
  const auto code = [](DType dtype) { return static_cast<int>(dtype); };
  switch (type.code) {
    case dlpack::kInt:
      return by_bits(code(DType::i8), code(DType::i16), code(DType::i32), code(DType::i64));
    case dlpack::kUInt:
      return by_bits(code(DType::u8), code(DType::u16), code(DType::u32), code(DType::u64));
    case dlpack::kFloat:
      return by_bits(-1, code(DType::f16), code(DType::f32), code(DType::f64));
    case dlpack::kBfloat:
      return by_bits(-1, code(DType::bf16), -1, -1);
    case dlpack::kComplex:
      return by_bits(-1, -1, code(DType::c32), code(DType::c64), code(DType::c128));
    case dlpack::kBool:
      return by_bits(code(DType::boolean), -1, -1, -1);
    case dlpack::kFloat8_e4m3fn:
      return by_bits(code(DType::f8_e4m3fn), -1, -1, -1);
    case dlpack::kFloat8_e4m3fnuz:
      return by_bits(code(DType::f8_e4m3fnuz), -1, -1, -1);
    case dlpack::kFloat8_e5m2:
      return by_bits(code(DType::f8_e5m2), -1, -1, -1);
    case dlpack::kFloat8_e5m2fnuz:
      return by_bits(code(DType::f8_e5m2fnuz), -1, -1, -1);
    case dlpack::kFloat8_e8m0fnu:
      return by_bits(code(DType::f8_e8m0fnu), -1, -1, -1);
    default:
      return -1;
  }
}

}  // namespace

Tensors::Tensors(const nb::list& classes) {
  for (const nb::handle type : classes) classes_.push_back(nb::borrow(type));
  const nb::object capsule = nb::getattr(classes_.front(), "__dlpack_c_exchange_api__", nb::none());
  if (!capsule.is_none()) {
    const auto* api =
        static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) nb::raise_python_error();
    if (api->version.major == dlpack::kMajor && api->show != nullptr) api_ = api;
  }
  is_neg_ = nb::getattr(classes_.front(), "is_neg");
  is_conj_ = nb::getattr(classes_.front(), "is_conj");
  untyped_storage_ = nb::getattr(classes_.front(), "untyped_storage");
  storage_offset_ = nb::getattr(classes_.front(), "storage_offset");
}

bool Tensors::has_class(nb::handle tensor) const {
  const nb::handle type = tensor.type();
  return std::any_of(classes_.begin(), classes_.end(), [type](const nb::object& known) { return type.is(known); });
}

std::optional<Shown> Tensors::memory(nb::handle tensor) const {
  if (api_ == nullptr || !has_class(tensor)) return {};
  dlpack::Tensor t;
  if (api_->show(tensor.ptr(), &t) != 0) {
    PyErr_Clear();
    return {};
  }
  const int dtype = t.device.type == dlpack::kCpu ? dtype_of(t.dtype) : -1;
  if (dtype < 0) return {};
  int64_t count = 1;
  bool contiguous = true;
  for (int32_t d = t.ndim - 1; d >= 0; d--) {
    if (t.strides != nullptr && t.shape[d] != 1 && t.strides[d] != count) contiguous = false;
    count *= t.shape[d];
  }
  if (!contiguous && count != 0) return {};
  const Buffer buffer{static_cast<std::byte*>(t.data) + t.byte_offset, static_cast<size_t>(count),
                      static_cast<DType>(dtype)};
  if (!in_storage(tensor, buffer)) return {};
  return Shown{
      .buffer = buffer, .shape = shape_hash(t.shape, static_cast<size_t>(t.ndim)), .rows = t.ndim > 0 ? t.shape[0] : 0};
}

bool Tensors::in_storage(nb::handle tensor, const Buffer& buffer) const {
  // Reading the storage takes 0.3 us, so most small tensors are not checked. A freed storage has the address 0: the
  // address of its tensor is only the offset in it. As a rule, no memory in use is below 4 GiB, so such an address
  // requires the check. A large tensor is always checked, because moving it takes 100 times as long.
  constexpr size_t kLarge = 1 << 18;
  const size_t n = buffer.nbytes();
  if (n == 0 || (n < kLarge && reinterpret_cast<uintptr_t>(buffer.data) >> 32 != 0)) return true;
  if (buffer.data == nullptr) return false;  // a tensor of zeros that torch has not materialized
  const auto size = nb::cast<size_t>(untyped_storage_(tensor).attr("nbytes")());
  return nb::cast<size_t>(storage_offset_(tensor)) * size_of(buffer.dtype) + n <= size;
}

std::optional<Shown> Tensors::show(nb::handle tensor) const {
  const auto shown = memory(tensor);
  if (!shown) return {};
  // DLPack does not describe these flags. Only views of complex tensors and of their real or imaginary parts can have
  // them, so other dtypes need no check.
  const DType dtype = shown->buffer.dtype;
  const bool complex = dtype == DType::c32 || dtype == DType::c64 || dtype == DType::c128;
  const bool part = dtype == DType::f16 || dtype == DType::f32 || dtype == DType::f64;
  if ((part || complex) && nb::cast<bool>(is_neg_(tensor))) return {};
  if (complex && nb::cast<bool>(is_conj_(tensor))) return {};
  return shown;
}

}  // namespace allranks
