// Reads the arguments that torch.distributed passes to a backend: tensors, lists of one tensor or of pieces, and an
// options object.
//
// Python would need 4 us for this, while a small call takes 1 us (docs/decisions/106). If the arguments are unusual,
// this code does nothing and leaves the call to Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "python/binding.h"
#include "python/now.h"
#include "python/sites.h"
#include "python/state.h"

namespace nb = nanobind;

namespace allranks {

namespace {

nb::object interned(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }

nb::object attribute(nb::handle object, const nb::object& name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) nb::raise_python_error();
  return nb::steal(value);
}

bool truth(nb::handle object) {
  const int is = PyObject_IsTrue(object.ptr());
  if (is < 0) nb::raise_python_error();
  return is > 0;
}

bool is_list_of(nb::handle object, Py_ssize_t length) {
  return PyList_CheckExact(object.ptr()) && PyList_Size(object.ptr()) == length;
}

class TorchCall {
 public:
  // The location of an operand: the argument's position, and whether the argument is a list with the operand as its
  // only item.
  using Where = std::optional<std::pair<Py_ssize_t, bool>>;

  TorchCall(nb::object verb, Py_ssize_t arguments, Where tensor, Where pieces, nb::object options, const nb::dict& ops,
            bool rooted, const nb::list& watchers, nb::object sites)
      : verb_(std::move(verb)),
        arguments_(arguments),
        tensor_(tensor),
        pieces_(pieces),
        options_(std::move(options)),
        rooted_(rooted),
        sites_object_(std::move(sites)),
        sites_(nb::cast<const Sites&>(sites_object_)),
        zero_(nb::module_::import_("datetime").attr("timedelta")(0)) {
    for (const auto [kind, op] : ops) ops_.emplace_back(PyObject_Hash(nb::handle(kind).ptr()), nb::borrow(op));
    for (const nb::handle watcher : watchers) watchers_.push_back(nb::borrow(watcher));
  }

  nb::object operator()(nb::handle now, nb::handle given) const {
    nb::object nothing = nb::none();
    if (!PyTuple_CheckExact(given.ptr()) || PyTuple_Size(given.ptr()) != arguments_) return nothing;
    const nb::handle options = PyTuple_GetItem(given.ptr(), arguments_ - 1);
    if (!options.type().is(options_)) return nothing;
    for (Py_ssize_t i = kSplits; i < arguments_ - 1; i++) {
      if (!is_list_of(PyTuple_GetItem(given.ptr(), i), 0)) return nothing;
    }
    nb::handle tensor = nothing;
    nb::handle pieces = nothing;
    if (!find(tensor_, given, tensor) || !find(pieces_, given, pieces)) return nothing;
    for (const nb::object& watcher : watchers_) {
      if (truth(watcher())) return nothing;
    }
    const int limited = PyObject_RichCompareBool(attribute(options, timeout_).ptr(), zero_.ptr(), Py_GE);
    if (limited < 0) nb::raise_python_error();
    if (limited > 0) return nothing;
    nb::object op = nb::none();
    if (!ops_.empty()) {
      const Py_hash_t kind = PyObject_Hash(attribute(options, reduce_op_).ptr());
      if (kind == -1 && PyErr_Occurred() != nullptr) nb::raise_python_error();
      const auto known =
          std::find_if(ops_.begin(), ops_.end(), [kind](const auto& each) { return each.first == kind; });
      if (known == ops_.end()) return nothing;
      op = known->second;
    }
    if (rooted_ && truth(attribute(options, root_tensor_))) return nothing;
    const nb::object root = rooted_ ? attribute(options, root_) : nobody_;
    const Now* const short_way = now_of(now);
    if (truth(attribute(options, async_))) {
      if (!plain(tensor) || !plain(pieces)) return nothing;
      if (short_way == nullptr) return nothing;
      return start_now(*short_way, verb_, tensor, pieces, op, root, sites_, kTorchs);
    }
    const bool made = short_way == nullptr ? truth(now(verb_, tensor, pieces, op, root))
                                           : run_now(*short_way, verb_, tensor, pieces, op, root);
    return made ? nb::object(nb::bool_(true)) : nothing;
  }

 private:
  static constexpr int kTorchs = 1;         // the frame outside the method's, usually that of torch's function
  static constexpr Py_ssize_t kSplits = 2;  // position of the first argument after the tensors, if the verb has more

  // Return whether a value is None, an ordinary tensor, or a list of them. Instances of subclasses are not ordinary:
  // a subclass may interpret its data in its own way.
  static bool plain(nb::handle value) {
    if (state.ordinary == nullptr) return false;  // the process uses only engines of torch
    if (!PyList_CheckExact(value.ptr())) return value.is_none() || state.ordinary->has_class(value);
    for (Py_ssize_t i = 0; i < PyList_Size(value.ptr()); i++) {
      if (!state.ordinary->has_class(PyList_GetItem(value.ptr(), i))) return false;
    }
    return true;
  }

  // Find an operand. Return false if the arguments do not have this form.
  static bool find(const Where& where, nb::handle given, nb::handle& found) {
    if (!where) return true;
    found = PyTuple_GetItem(given.ptr(), where->first);
    if (!where->second) return true;
    if (!is_list_of(found, 1)) return false;
    found = PyList_GetItem(found.ptr(), 0);
    return true;
  }

  nb::object verb_;
  Py_ssize_t arguments_;
  Where tensor_;
  Where pieces_;
  nb::object options_;
  std::vector<std::pair<Py_hash_t, nb::object>> ops_;  // by hash: to compare torch's ops is slower (0.5 us)
  bool rooted_;
  nb::object sites_object_;
  const Sites& sites_;
  nb::object zero_;
  std::vector<nb::object> watchers_;
  nb::object nobody_ = nb::int_(-1);
  nb::object timeout_ = interned("timeout");
  nb::object async_ = interned("asyncOp");
  nb::object reduce_op_ = interned("reduceOp");
  nb::object root_ = interned("rootRank");
  nb::object root_tensor_ = interned("rootTensor");
};

}  // namespace

void bind_torch_call(nb::module_& m) {
  nb::class_<TorchCall>(m, "TorchCall", "A collective as torch.distributed passes it to a backend.")
      .def(nb::init<nb::object, Py_ssize_t, TorchCall::Where, TorchCall::Where, nb::object, const nb::dict&, bool,
                    const nb::list&, nb::object>(),
           nb::arg("verb"), nb::arg("arguments"), nb::arg("tensor").none(), nb::arg("pieces").none(),
           nb::arg("options"), nb::arg("ops"), nb::arg("rooted"), nb::arg("watchers"), nb::arg("sites"),
           "Args:\n"
           "    verb: The name of the collective.\n"
           "    arguments: The number of arguments of torch's method.\n"
           "    tensor, pieces: The position of the operand, and whether it is the only item of a list there.\n"
           "    options: The class of the options, torch's last argument.\n"
           "    ops: The ops of allranks by those of torch, whose hashes differ.\n"
           "    rooted: The options have a root.\n"
           "    watchers: Functions. If one returns a true value, the call does nothing.\n"
           "    sites: Finds the call sites of asynchronous calls.")
      .def("__call__", &TorchCall::operator(), nb::arg("now"), nb::arg("given"),
           "Execute the call. Return True for a blocking call, a Started for an asynchronous one, and None if nothing "
           "was done.");
}

}  // namespace allranks
