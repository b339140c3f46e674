// Python tensors as they are: the short way from a torch tensor to a Buffer. Part of the seam.
//
// Most calls pass ordinary tensors, and a handful of attribute look-ups for each would cost more than the
// call. Whatever is out of the ordinary (another device, layout or class, a lazily negated tensor, a
// wrong argument) is left to Python, which copies, or finds the words.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "base/types.h"
#include "python/dlpack.h"

namespace allranks {

struct Shown {
  Buffer buffer;
  uint32_t shape = 0;  // as Fingerprint's
  int64_t rows = 0;    // the first dimension; 0 of a scalar
};

class Tensors {
 public:
  // classes: those whose instances are ordinary tensors; the first has the exchange interface.
  explicit Tensors(const nanobind::list& classes);

  // Whether it is of one of these classes, and not of one derived from them.
  bool has_class(nanobind::handle tensor) const;
  std::optional<Shown> show(nanobind::handle tensor) const;
  // The same of a tensor that was shown before, whose flags do not change.
  std::optional<Shown> memory(nanobind::handle tensor) const;

 private:
  std::vector<nanobind::object> classes_;
  const dlpack::ExchangeApi* api_ = nullptr;  // nullptr: a framework without it; no tensor is ordinary then
  // Whether the memory that a tensor's shape describes lies in its storage, which may have been freed or resized.
  bool in_storage(nanobind::handle tensor, const Buffer& buffer) const;

  nanobind::object is_neg_;  // unbound methods
  nanobind::object is_conj_;
  nanobind::object untyped_storage_;
  nanobind::object storage_offset_;
};

}  // namespace allranks
