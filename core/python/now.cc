#include "python/now.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collective/algorithms/moves.h"
#include "collective/reduce.h"
#include "python/binding.h"
#include "python/caller.h"
#include "python/errors.h"
#include "python/names.h"
#include "python/operations.h"
#include "python/state.h"

namespace nb = nanobind;

namespace allranks {

namespace {

// Return whether a tensor overlaps none of the pieces, which have its size. A piece at the same address is allowed.
bool beside(const Buffer& tensor, const std::vector<std::byte*>& pieces) {
  const size_t n = tensor.nbytes();
  return std::all_of(pieces.begin(), pieces.end(), [&](const std::byte* piece) {
    return piece == tensor.data || !algorithms::intersect(piece, n, tensor.bytes(), n);
  });
}

// Return whether pieces of `n` bytes share no memory.
bool apart(const std::vector<std::byte*>& pieces, size_t n) {
  const auto in_order = [n](const auto& all) {
    const auto close = [n](const std::byte* a, const std::byte* b) { return b < a + n; };
    return std::adjacent_find(all.begin(), all.end(), close) == all.end();
  };
  if (in_order(pieces)) return true;
  auto sorted = pieces;
  std::sort(sorted.begin(), sorted.end());
  return in_order(sorted);
}

// Set the piece of each rank of an all_to_all: the input and the output are tensors of equal pieces. Return false if
// the arguments are unusual.
bool pieces_of_all_to_all(Operation& op, const Shown& in, nb::handle output, size_t ranks) {
  const auto out = state.ordinary->show(output);
  const Buffer& b = in.buffer;
  if (!out || out->buffer.dtype != b.dtype || out->buffer.count != b.count) return false;
  const auto size = static_cast<int64_t>(ranks);
  if (in.rows == 0 || in.rows % size != 0 || out->rows == 0 || out->rows % size != 0) return false;
  if (out->buffer.data != b.data && algorithms::intersect(out->buffer.bytes(), b.nbytes(), b.bytes(), b.nbytes()))
    return false;
  const size_t each = b.nbytes() / ranks;
  for (size_t r = 0; r < ranks; r++) {
    op.ins.push_back(b.bytes() + r * each);
    op.outs.push_back(out->buffer.bytes() + r * each);
  }
  op.in_bytes.assign(ranks, each);
  op.out_bytes.assign(ranks, each);
  op.buffer = {};
  // Other ranks may make this call through bind_comm.cc, so the fingerprint must be equal to the one there.
  op.fingerprint.count = 0;
  op.fingerprint.shape = 0;
  return true;
}

// Set the pieces of any other verb: `pieces` is one tensor of all pieces in order, or a list by rank. `keep` receives
// references to the tensors of the list, because another thread may change the list during the call.
bool pieces_of_others(Operation& op, const Buffer& b, nb::handle pieces, size_t ranks, std::vector<nb::object>& keep) {
  std::vector<std::byte*> addresses;
  addresses.reserve(ranks);
  if (nb::isinstance<nb::list>(pieces)) {
    const auto list = nb::borrow<nb::list>(pieces);
    if (list.size() != ranks) return false;
    for (const nb::handle piece : list) {
      const auto shown = state.ordinary->show(piece);
      if (!shown || shown->buffer.dtype != b.dtype || shown->buffer.count != b.count) return false;
      addresses.push_back(shown->buffer.bytes());
      keep.push_back(nb::borrow(piece));
    }
  } else {
    const auto whole = state.ordinary->show(pieces);
    if (!whole || whole->buffer.dtype != b.dtype || whole->buffer.count != b.count * ranks) return false;
    for (size_t r = 0; r < ranks; r++) addresses.push_back(whole->buffer.bytes() + r * b.nbytes());
  }
  const Verb verb = op.fingerprint.verb;
  const bool gathers = verb == Verb::all_gather || verb == Verb::gather;
  // Python copies operands that overlap in another way, or raises an error.
  if (!beside(b, addresses) || (gathers && !apart(addresses, b.nbytes()))) return false;
  (gathers ? op.outs : op.ins) = std::move(addresses);
  return true;
}

// Read a collective from the user's arguments. Return false if an argument is unusual or wrong.
//
// pieces: None, one tensor of all pieces in order, or a list by rank; the output of an all_to_all.
// keep: receives references to the tensors of the list.
bool read(Operation& op, const Comm& comm, Verb verb, nb::handle tensor, nb::handle pieces, nb::handle op_object,
          nb::handle root_object, std::vector<nb::object>& keep) {
  if (verb == Verb::barrier) {
    op = operation(Verb::barrier, {}, 0);
    return true;
  }
  const auto mine = state.ordinary->show(tensor);
  if (!mine || !PyLong_Check(root_object.ptr())) return false;
  const auto ranks = static_cast<size_t>(comm.size());
  const Buffer& b = mine->buffer;
  const bool reduces = verb == Verb::all_reduce || verb == Verb::reduce || verb == Verb::reduce_scatter;
  int op_code = 0;
  if (reduces) {
    if (op_object.type().ptr() != state.reduce_op_class) return false;
    op_code = static_cast<int>(PyLong_AsLong(op_object.ptr()));
    const auto reduce_op = static_cast<ReduceOp>(op_code);
    if (reduce_op == ReduceOp::premul_sum || kernel_for(b.dtype, reduce_op) == nullptr) return false;
  }
  const long root = PyLong_AsLong(root_object.ptr());
  if (root == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool rooted = verb == Verb::reduce || verb == Verb::broadcast || verb == Verb::gather || verb == Verb::scatter;
  if (rooted && (root < 0 || root >= comm.size())) return false;
  if ((verb == Verb::gather || verb == Verb::scatter) && pieces.is_none() == (root == comm.rank())) return false;
  if ((verb == Verb::all_gather || verb == Verb::reduce_scatter) && pieces.is_none()) return false;
  op = operation(verb, b, mine->shape, op_code, static_cast<int>(root));
  if (verb == Verb::all_to_all) return pieces_of_all_to_all(op, *mine, pieces, ranks);
  return pieces.is_none() || pieces_of_others(op, b, pieces, ranks, keep);
}

// The group of a call: its Comm, and the function explain(failure, verb), which returns the error for the user.
struct Group {
  std::shared_ptr<Comm> comm;
  nb::object explain;

  template <class Body>
  auto call(nb::handle verb, Body&& body) const {
    try {
      return body();
    } catch (const Error& error) {
      if (error.signalled) throw nb::python_error();
      raise(error, verb);
    } catch (const sys::Forked& forked) {
      if (forked.signalled) throw nb::python_error();
      raise(forked_error(), verb);
    }
  }

  void run(const Operation& op) const {
    PythonCaller caller;
    comm->run(op, caller);
  }

 private:
  [[noreturn]] void raise(const Error& error, nb::handle verb) const {
    const nb::object failure = nb::borrow(state.failure_type)(*facts(error));
    const nb::object explained = explain(failure, verb);
    PyErr_SetObject(explained.type().ptr(), explained.ptr());
    throw nb::python_error();
  }
};

// A call whose arguments have been read once, for many executions.
class Prepared {
 public:
  Prepared(Group group, nb::object verb, Operation op, const std::vector<nb::object>& tensors)
      : group_(std::move(group)), verb_(std::move(verb)), op_(std::move(op)) {
    for (const nb::object& tensor : tensors) {
      tensors_.push_back({tensor, state.ordinary->memory(tensor).value_or(Shown{}).buffer});
    }
  }

  // Execute the call. Return false if nothing was done, because the memory of a tensor has moved. The program can move
  // it by `resize_` or `.data =`, so each execution checks the addresses (docs/decisions/105).
  bool operator()() const {
    if (!in_place()) return false;
    group_.call(verb_, [this] { group_.run(op_); });
    return true;
  }

 private:
  struct Placed {
    nb::object tensor;
    Buffer buffer;
  };

  bool in_place() const {
    return std::all_of(tensors_.begin(), tensors_.end(), [](const Placed& placed) {
      const auto now = state.ordinary->memory(placed.tensor);
      return now && now->buffer.data == placed.buffer.data && now->buffer.count == placed.buffer.count &&
             now->buffer.dtype == placed.buffer.dtype;
    });
  }

  Group group_;
  nb::object verb_;
  Operation op_;
  std::vector<Placed> tensors_;
};

// Calls whose tensors the core may still use, although the program may have deleted all references to them.
//
// calls: a Python set. tidy(): removes completed calls that the program has not waited for. It returns the size of the
// set from which it must be called again.
struct Pending {
  nb::object calls;
  nb::object tidy;
};

// An asynchronous call with the user's tensors. Python uses it like a Request.
class Started {
 public:
  Started(Group group, nb::object pending, nb::object verb, nb::object tensor, nb::object pieces)
      : group_(std::move(group)),
        pending_(std::move(pending)),
        verb_(std::move(verb)),
        tensor_(std::move(tensor)),
        pieces_(std::move(pieces)) {}

  // Start the call. The set `pending` must reference the tensors before the core uses them. Otherwise an exception in
  // between could free a tensor that the core writes to.
  void start(nb::handle self, Operation op) {
    code_ = op.fingerprint.verb;
    if (PySet_Add(pending_.ptr(), self.ptr()) != 0) nb::raise_python_error();
    try {
      request_ = group_.call(verb_, [&] { return group_.comm->start(std::move(op)); });
    } catch (...) {
      forget(self);
      throw;
    }
  }

  void wait(nb::handle self, double timeout_s) {
    try {
      group_.call(verb_, [&] {
        PythonCaller caller;
        group_.comm->wait(request_, caller, timeout_s < 0 ? -1 : static_cast<int64_t>(timeout_s * 1e9));
      });
    } catch (...) {
      // A wait that has timed out may be repeated: until the call is done, the core uses the tensors.
      if (done()) forget(self);
      throw;
    }
    forget(self);
    // Release the operand that is not the result. The core no longer uses it.
    (shows_pieces() ? tensor_ : pieces_) = nb::none();
  }

  // Acquire: if the call is done, this thread also sees the results that another thread has written.
  bool done() const { return request_ != nullptr && request_->done.load(std::memory_order_acquire); }
  Request& request() const { return *request_; }
  bool inherited() const { return forks_ != sys::forks(); }
  // Return the verb, the tensor and the pieces. After a wait, the one of the two that is not the result is None.
  nb::tuple about() const { return nb::make_tuple(verb_, tensor_, pieces_); }

 private:
  void forget(nb::handle self) const {
    if (PySet_Discard(pending_.ptr(), self.ptr()) < 0) nb::raise_python_error();
  }
  bool shows_pieces() const { return code_ == Verb::all_gather || code_ == Verb::gather || code_ == Verb::all_to_all; }

  Group group_;
  nb::object pending_;
  nb::object verb_;
  Verb code_ = Verb::none;
  nb::object tensor_;
  nb::object pieces_;
  std::shared_ptr<Request> request_;
  uint32_t forks_ = sys::forks();
};

}  // namespace

// The base class of Python's plans, which implements their __call__. In Python it would take a third of a small call
// (docs/decisions/105).
class Planned {
 public:
  void set(nb::object prepared) { prepared_ = std::move(prepared); }

  nb::object operator()(nb::handle self, nb::handle async_op) const {
    const int async = PyObject_IsTrue(async_op.ptr());
    if (async < 0) nb::raise_python_error();
    if (async == 0 && prepared_.is_valid() && !prepared_.is_none()) {
      const nb::object prepared = prepared_;  // Python code that runs during the call may replace prepared_
      const bool made =
          nb::isinstance<Prepared>(prepared) ? (*nb::inst_ptr<Prepared>(prepared))() : nb::cast<bool>(prepared());
      if (made) return nb::none();
    }
    return self.attr("_make")(async_op);
  }

 private:
  nb::object prepared_;
};

class Now {
 public:
  Now(std::shared_ptr<Comm> comm, nb::object explain, Pending pending)
      : group_{std::move(comm), std::move(explain)}, pending_(std::move(pending)) {
    for (const char* name : kVerbs) verbs_.push_back(nb::steal(PyUnicode_InternFromString(name)));
  }

  bool operator()(nb::handle verb, nb::handle tensor, nb::handle pieces, nb::handle op, nb::handle root) const {
    Operation call;
    std::vector<nb::object> keep;
    if (!read(call, verb, tensor, pieces, op, root, keep)) return false;
    group_.call(verb, [&] { group_.run(call); });
    return true;
  }

  // Start an asynchronous collective and return a Started. Return None if nothing was done.
  nb::object start(nb::handle verb, nb::handle tensor, nb::handle pieces, nb::handle op, nb::handle root,
                   const Sites& sites, int depth) const {
    Operation call;
    std::vector<nb::object> keep;
    if (!read(call, verb, tensor, pieces, op, root, keep)) return nb::none();
    call.site = sites.behind(depth);
    if (PySet_Size(pending_.calls.ptr()) > many_) many_ = nb::cast<Py_ssize_t>(pending_.tidy());
    nb::object kept = nb::borrow(pieces);
    if (PyList_Check(pieces.ptr())) {  // a copy: the program may change its list before the call is done
      kept = nb::steal(PyList_GetSlice(pieces.ptr(), 0, PyList_Size(pieces.ptr())));
      if (!kept.is_valid()) nb::raise_python_error();
    }
    nb::object made = nb::cast(Started(group_, pending_.calls, nb::borrow(verb), nb::borrow(tensor), std::move(kept)));
    nb::inst_ptr<Started>(made)->start(made, std::move(call));
    return made;
  }

  std::optional<Prepared> prepare(nb::handle verb, nb::handle tensor, nb::handle pieces, nb::handle op,
                                  nb::handle root) const {
    Operation call;
    std::vector<nb::object> keep;
    if (!read(call, verb, tensor, pieces, op, root, keep)) return {};
    for (const nb::handle each : {tensor, pieces}) {
      if (!each.is_none() && !nb::isinstance<nb::list>(each)) keep.push_back(nb::borrow(each));
    }
    return Prepared(group_, nb::borrow(verb), std::move(call), keep);
  }

 private:
  bool read(Operation& call, nb::handle verb, nb::handle tensor, nb::handle pieces, nb::handle op, nb::handle root,
            std::vector<nb::object>& keep) const {
    size_t code = 0;
    // Comparing identities suffices: Python interns the literals that its code passes, and verbs_ is interned, too.
    while (code < verbs_.size() && !verbs_[code].is(verb)) code++;
    return code < verbs_.size() &&
           allranks::read(call, *group_.comm, static_cast<Verb>(code), tensor, pieces, op, root, keep);
  }

  Group group_;
  Pending pending_;
  mutable Py_ssize_t many_ = 0;
  std::vector<nb::object> verbs_;
};

namespace {

// Execute a blocking collective. The arguments are positional: verb, tensor, pieces = None, op = None, root = -1.
//
// A C function with METH_FASTCALL receives the arguments on the interpreter's stack. nanobind's __call__ would also
// create a tuple, look up the method and match keywords, which costs a tenth of a small call.
PyObject* call_now(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  constexpr Py_ssize_t kLeast = 2;
  constexpr Py_ssize_t kMost = 5;
  if (count < kLeast || count > kMost) {
    PyErr_SetString(PyExc_TypeError, "expected a verb, a tensor, and at most pieces, op and root");
    return nullptr;
  }
  static PyObject* const no_root = PyLong_FromLong(-1);
  std::array<nb::handle, kMost> arguments{nb::handle{}, nb::handle{}, Py_None, Py_None, no_root};
  std::copy_n(given, count, arguments.begin());
  const auto& [verb, tensor, pieces, op, root] = arguments;
  try {
    return PyBool_FromLong(static_cast<long>((*nb::inst_ptr<Now>(self))(verb, tensor, pieces, op, root)));
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const Error& error) {
    set_exception(error);
  } catch (const sys::Forked& forked) {
    set_exception(forked);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef now_function = {"now", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_now)), METH_FASTCALL,
                            "Execute a blocking collective. Return False, and do nothing, if an argument is unusual."};

}  // namespace

const Now* now_of(nb::handle function) {
  const bool is_now =
      PyCFunction_Check(function.ptr()) != 0 && PyCFunction_GetFunction(function.ptr()) == now_function.ml_meth;
  return is_now ? nb::inst_ptr<Now>(PyCFunction_GetSelf(function.ptr())) : nullptr;
}

bool run_now(const Now& now, nb::handle verb, nb::handle tensor, nb::handle pieces, nb::handle op, nb::handle root) {
  return now(verb, tensor, pieces, op, root);
}

nb::object start_now(const Now& now, nb::handle verb, nb::handle tensor, nb::handle pieces, nb::handle op,
                     nb::handle root, const Sites& sites, int depth) {
  return now.start(verb, tensor, pieces, op, root, sites, depth);
}

bool send_now(Comm& comm, nb::handle tensor, int to, int tag) {
  const auto shown = state.ordinary->show(tensor);
  if (!shown) return false;
  PythonCaller caller;
  comm.send(shown->buffer, to, tag, caller);
  return true;
}

int recv_now(Comm& comm, nb::handle tensor, int from, int tag) {
  const auto shown = state.ordinary->show(tensor);
  if (!shown) return -1;
  PythonCaller caller;
  return comm.recv(shown->buffer, from, tag, caller);
}

void bind_now(nb::module_& m) {
  m.def(
      "set_ordinary",
      [](const nb::list& classes, const nb::object& reduce_op) {
        delete std::exchange(state.ordinary, new Tensors(classes));
        Py_XDECREF(std::exchange(state.reduce_op_class, nb::object(reduce_op).release().ptr()));
      },
      nb::arg("classes"), nb::arg("reduce_op"),
      "Set the classes of tensors that the fast path accepts, and the class of reduce ops.");
  nb::class_<Prepared>(m, "Prepared", "A collective that is prepared once and executed many times.")
      .def("__call__", &Prepared::operator(),
           "Execute the collective. Return False, and do nothing, if the memory of a tensor has moved.");
  nb::class_<Started>(m, "Started", "An asynchronous call of ordinary tensors.")
      .def(
          "wait", [](nb::handle self, double timeout_s) { nb::inst_ptr<Started>(self)->wait(self, timeout_s); },
          nb::arg("timeout_s"),
          "Block until the core no longer uses the tensors. timeout_s < 0: the timeout of the group applies.")
      .def("done", &Started::done)
      .def(
          "watch", [](Started& s, uint64_t ticket) { s.request().watch(ticket, *state.completions); },
          nb::arg("ticket"))
      .def("source", [](const Started&) { return -1; })
      .def_prop_ro("inherited", &Started::inherited, "Whether this object is a copy in a forked child.")
      .def_prop_ro("about", &Started::about,
                   "The verb, the tensor and the pieces. After a wait, the one that is not the result is None.");
  nb::class_<Planned>(m, "Planned", "Executes a prepared call. If that does nothing, it calls self._make(async_op).")
      .def(nb::init<>())
      .def("_set", &Planned::set, nb::arg("prepared").none())
      .def(
          "__call__",
          [](nb::handle self, nb::handle async_op) { return (*nb::inst_ptr<Planned>(self))(self, async_op); },
          nb::arg("async_op") = false,
          "Execute the call. Other ranks may use a plan or the method of the group.\n\n"
          "Args:\n    async_op: Return a Work immediately.\n\n"
          "Returns:\n    A Work if ``async_op`` is True, else None.\n\n"
          "Raises:\n    AllranksError: For the same reasons as the method of the group.");
  nb::class_<Now>(
      m, "Now",
      "The fast path: executes collectives with the user's arguments. Does nothing if an argument is unusual.")
      .def(
          "__init__",
          [](Now* self, std::shared_ptr<Comm> comm, nb::object explain, nb::object pending, nb::object tidy) {
            new (self) Now(std::move(comm), std::move(explain), {std::move(pending), std::move(tidy)});
          },
          nb::arg("comm"), nb::arg("explain"), nb::arg("pending"), nb::arg("tidy"),
          "Create the fast path of a group.\n\n"
          "Args:\n"
          "    comm: The group.\n"
          "    explain: Returns the exception for a failure.\n"
          "    pending: A set that contains started calls until they have finished.\n"
          "    tidy: Removes finished calls from the set, and returns the size of the set for its next execution.")
      .def_prop_ro(
          "function", [](nb::handle self) { return nb::steal(PyCFunction_New(&now_function, self.ptr())); },
          "The function that executes a blocking collective.")
      .def("start", &Now::start, nb::arg("verb"), nb::arg("tensor").none(), nb::arg("pieces").none(),
           nb::arg("op").none(), nb::arg("root").none(), nb::arg("sites"), nb::arg("depth"),
           "Start an asynchronous collective. Return None, and do nothing, if an argument is unusual.\n\n"
           "depth: the number of frames to skip before the call site is searched (Sites.behind).")
      .def("prepare", &Now::prepare, nb::arg("verb"), nb::arg("tensor").none(), nb::arg("pieces").none(),
           nb::arg("op").none(), nb::arg("root").none(),
           "Prepare a collective. Return None if an argument is unusual.");
}

}  // namespace allranks
