// Reads the Buffer of an ordinary torch tensor without Python code. Part of the binding.
//
// Most calls pass ordinary tensors. A few attribute lookups for each tensor would cost more than the call
// (docs/decisions/021). All other arguments are left to Python: another device, layout or class, a lazily negated
// tensor, a wrong argument. Python copies the tensor or raises the error.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "base/types.h"
#include "python/dlpack.h"

namespace allranks {

struct Shown {
  Buffer buffer;
  uint32_t shape = 0;  // Fingerprint::shape
  int64_t rows = 0;    // size of the first dimension; 0 if the tensor has none
};

class Tensors {
 public:
  // classes: the classes whose instances are ordinary tensors. The first one has the exchange table.
  explicit Tensors(const nanobind::list& classes);

  // Return whether a tensor is an instance of one of these classes itself, not of a derived class.
  bool has_class(nanobind::handle tensor) const;
  // Return the tensor's buffer, or nullopt if the tensor is not ordinary.
  std::optional<Shown> show(nanobind::handle tensor) const;
  // The same without a check of the tensor's flags, which do not change after a first successful show().
  std::optional<Shown> memory(nanobind::handle tensor) const;

 private:
  std::vector<nanobind::object> classes_;
  const dlpack::ExchangeApi* api_ = nullptr;  // nullptr: the framework has no table, so no tensor is ordinary
  // Return whether the memory that a tensor's shape describes is inside its storage. The program may have freed or
  // resized the storage.
  bool in_storage(nanobind::handle tensor, const Buffer& buffer) const;

  nanobind::object is_neg_;  // unbound methods
  nanobind::object is_conj_;
  nanobind::object untyped_storage_;
  nanobind::object storage_offset_;
};

}  // namespace allranks
