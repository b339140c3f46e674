// Queues known operations on handles in C++: from torch's dispatcher to the outbox, without Python code in between.
//
// This file does what `run` of allranks/remote/torch_device/dispatch.py does, for ordinary calls only. It leaves every
// other call to that function before it queues anything. So all rules and errors are in `run` (docs/decisions/061).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "python/binding.h"
#include "python/caller.h"
#include "python/state.h"

namespace nb = nanobind;
using namespace allranks;  // NOLINT: this file is the binding

// The objects that Python passes once (set_handles). They are never freed: a thread may still use previous ones.
struct allranks::Handles {
  PyObject *handle, *place, *make, *here, *dispatch, *in_inference_mode;  // classes and functions
  PyObject *true_mark, *false_mark, *int_mark, *float_mark;               // entries of a key for such values
  PyObject *ref, *sig, *at, *off, *looks, *calls, *call, *target, *lazy, *brief, *build;  // names of attributes
  PyObject* one;
  struct Kind {
    PyTypeObject* type;
    char code;
  };
  std::vector<Kind> kinds;               // the kinds of allranks/remote/protocol/arguments.py that C++ supports
  char list_code, int_code, float_code;  // values of all other kinds are entries of a key themselves
};

namespace {

// Facts about one operator.
struct Operator {
  nb::object op;  // keeps the operator alive: its address is the key in `known`
  nb::object facts;
  nb::object number_names;    // names of the keyword arguments that are numbers
  uint64_t number_positions;  // one bit for each positional argument that is a number
  bool floats_matter;
};
}  // namespace

struct allranks::Operators {
  std::unordered_map<PyObject*, Operator> known;
};

namespace {

nb::object attribute(PyObject* object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object, name);
  if (found == nullptr) throw nb::python_error();
  return nb::steal(found);
}

bool is_true(const nb::object& value) {
  if (!value.is_valid()) throw nb::python_error();
  return value.is(nb::handle(Py_True));
}

// Collects objects for a tuple. It owns a reference to each object until tuple() passes them on.
class Objects {
 public:
  Objects() { all_.reserve(24); }
  Objects(const Objects&) = delete;
  ~Objects() {
    for (PyObject* each : all_) Py_DECREF(each);
  }
  void add(PyObject* borrowed) { all_.push_back(Py_NewRef(borrowed)); }
  void add(nb::object owned) { all_.push_back(owned.release().ptr()); }
  nb::object tuple() {
    PyObject* made = PyTuple_New(static_cast<Py_ssize_t>(all_.size()));
    if (made == nullptr) throw nb::python_error();
    for (size_t i = 0; i < all_.size(); i++) PyTuple_SetItem(made, static_cast<Py_ssize_t>(i), all_[i]);
    all_.clear();
    return nb::steal(made);
  }

 private:
  std::vector<PyObject*> all_;
};

// The key, operands and numbers of a call. `_scan` in dispatch.py must build equal keys: both look up the same
// dictionary.
struct Scan {
  const Operator& about;
  Objects key;
  Objects refs;
  std::string values;
  nb::object place;

  explicit Scan(const Operator& known) : about(known) { key.add(known.facts.ptr()); }

  // Add one argument. Return false if Python must handle the call.
  bool take(PyObject* value, bool is_number) {
    const Handles& known = *state.handles;
    PyTypeObject* type = Py_TYPE(value);
    if (reinterpret_cast<PyObject*>(type) == known.handle) {
      key.add(attribute(value, known.sig));
      refs.add(attribute(value, known.ref));
      if (!place.is_valid()) place = attribute(value, known.at);
      return true;
    }
    const char code = code_of(type);
    if (code == 0) return false;
    if (code == known.list_code) return take_all(value, is_number);
    if (code == known.int_code && is_number) {
      int beyond = 0;
      const int64_t number = PyLong_AsLongLongAndOverflow(value, &beyond);
      if (beyond != 0) return false;
      key.add(known.int_mark);
      append(number);
    } else if (code == known.float_code) {
      if (about.floats_matter) return false;
      key.add(known.float_mark);
      append(PyFloat_AsDouble(value));
    } else if (PyBool_Check(value)) {
      key.add(value == Py_True ? known.true_mark : known.false_mark);
    } else {
      key.add(value);
    }
    return true;
  }

 private:
  // Return the code of a type, or 0 if C++ does not support it.
  static char code_of(PyTypeObject* type) {
    for (const Handles::Kind& each : state.handles->kinds) {
      if (each.type == type) return each.code;
    }
    return 0;
  }

  bool take_all(PyObject* values_of, bool is_number) {
    const bool is_list = PyList_CheckExact(values_of);
    const Py_ssize_t count = is_list ? PyList_Size(values_of) : PyTuple_Size(values_of);
    key.add(nb::steal(PyLong_FromSsize_t(count)));
    for (Py_ssize_t i = 0; i < count; i++) {
      if (!take(is_list ? PyList_GetItem(values_of, i) : PyTuple_GetItem(values_of, i), is_number)) return false;
    }
    return true;
  }

  template <typename T>
  void append(T number) {
    char bytes[sizeof number];
    std::memcpy(bytes, &number, sizeof number);
    values.append(bytes, sizeof number);
  }
};

// Create a handle of a tensor on the workers of `place`.
nb::object make_handle(nb::handle place, nb::handle sig, nb::handle ref, nb::handle offset) {
  // The arguments of `_make_wrapper_subclass`, by position: torch parses positions faster than keywords. `looks` has
  // all arguments except the class (0), the offset (3) and the device (7).
  const nb::object looks = attribute(sig.ptr(), state.handles->looks);
  const nb::object lazy = attribute(place.ptr(), state.handles->lazy);
  const Py_ssize_t count = PyTuple_Size(looks.ptr()) + 3;
  const nb::object given = nb::steal(PyTuple_New(count));
  if (!given.is_valid()) throw nb::python_error();
  for (Py_ssize_t at = 0, look = 0; at < count; at++) {
    PyObject* each = at == 0   ? state.handles->handle
                     : at == 3 ? offset.ptr()
                     : at == 7 ? lazy.ptr()
                               : PyTuple_GetItem(looks.ptr(), look++);
    PyTuple_SetItem(given.ptr(), at, Py_NewRef(each));
  }
  nb::object made = nb::steal(PyObject_Call(state.handles->make, given.ptr(), nullptr));
  if (!made.is_valid() || PyObject_SetAttr(made.ptr(), state.handles->ref, ref.ptr()) != 0 ||
      PyObject_SetAttr(made.ptr(), state.handles->sig, sig.ptr()) != 0 ||
      PyObject_SetAttr(made.ptr(), state.handles->at, place.ptr()) != 0 ||
      PyObject_SetAttr(made.ptr(), state.handles->off, offset.ptr()) != 0) {
    throw nb::python_error();
  }
  return made;
}

// Queue a call and return the operation's result. Return an invalid object if Python must handle the call.
nb::object queue(const Operator& about, PyObject* args, PyObject* kwargs) {
  Scan scan(about);
  const Py_ssize_t count = PyTuple_Size(args);
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!scan.take(PyTuple_GetItem(args, i), i < 64 && (about.number_positions >> i & 1) != 0)) return {};
  }
  if (kwargs != Py_None) {
    Py_ssize_t at = 0;
    PyObject *name = nullptr, *value = nullptr;
    while (PyDict_Next(kwargs, &at, &name, &value) != 0) {
      scan.key.add(name);
      if (!scan.take(value, PySet_Contains(about.number_names.ptr(), name) == 1)) return {};
    }
  }
  PyObject* place = scan.place.ptr();
  if (place == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(place)) != state.handles->place) return {};
  const nb::object calls = attribute(place, state.handles->calls);
  if (!PyDict_CheckExact(calls.ptr())) return {};  // the worker is lost
  const nb::object key = scan.key.tuple();
  const nb::object known = nb::borrow(PyDict_GetItemWithError(calls.ptr(), key.ptr()));
  if (!known.is_valid()) {
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return {};
  }
  const nb::object brief = attribute(known.ptr(), state.handles->brief);
  if (brief.is_none()) return {};
  // The template's number, the number of outputs, the result, the shift, and whether the result is a view of the first
  // argument: `brief` of KnownCall in handle.py.
  const auto field = [&](Py_ssize_t i) { return PyTuple_GetItem(brief.ptr(), i); };

  const nb::object line = nb::steal(PyObject_CallFunctionObjArgs(state.handles->here, state.handles->one, nullptr));
  if (!line.is_valid()) throw nb::python_error();
  nb::object values = nb::none();
  if (!scan.values.empty()) {
    values = nb::steal(PyBytes_FromStringAndSize(scan.values.data(), static_cast<Py_ssize_t>(scan.values.size())));
  }
  const nb::object refs = scan.refs.tuple();
  const nb::object target = attribute(place, state.handles->target);
  const nb::object call = attribute(place, state.handles->call);
  const nb::object made = nb::steal(PyObject_CallFunctionObjArgs(call.ptr(), target.ptr(), line.ptr(), field(0),
                                                                 refs.ptr(), field(1), values.ptr(), nullptr));
  if (!made.is_valid()) {
    // The operands are on different workers. The outbox has queued nothing, so Python can report the error.
    if (PyErr_Occurred() != PyExc_ValueError) throw nb::python_error();
    PyErr_Clear();
    return {};
  }
  PyObject* result = field(2);
  if (result == Py_None) return nb::none();
  const bool is_argument = PyLong_CheckExact(result) != 0;
  if (is_argument && PyLong_AsSsize_t(result) < count) {
    return nb::borrow(PyTuple_GetItem(args, PyLong_AsSsize_t(result)));
  }
  if (!is_argument && result != Py_True) {
    if (field(4) != Py_True) return make_handle(place, result, made, field(3));
    // In inference mode the result would be an inference tensor, but a view of an ordinary tensor must be ordinary.
    // `build` leaves inference mode for this case.
    if (count > 0 && !is_true(nb::steal(PyObject_CallNoArgs(state.handles->in_inference_mode)))) {
      const nb::object before = attribute(PyTuple_GetItem(args, 0), state.handles->off);
      const nb::object offset = nb::steal(PyNumber_Add(before.ptr(), field(3)));
      if (!offset.is_valid()) throw nb::python_error();
      return make_handle(place, result, made, offset);
    }
  }
  const nb::object build = attribute(known.ptr(), state.handles->build);
  const nb::object by_name = kwargs != Py_None ? nb::borrow(kwargs) : nb::steal(PyDict_New());
  nb::object built =
      nb::steal(PyObject_CallFunctionObjArgs(build.ptr(), place, made.ptr(), args, by_name.ptr(), nullptr));
  if (!built.is_valid()) throw nb::python_error();
  return built;
}

// Remove the traceback of an error that the program caused, so that Python prints only frames of the program.
void leave_out_frames() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value != nullptr && PyObject_HasAttrString(value, "_without_frames") != 0) {
    Py_CLEAR(trace);
    PyException_SetTraceback(value, Py_None);
  }
  PyErr_Restore(type, value, trace);
}

// Implement `RemoteTensor.__torch_dispatch__`.
nb::object dispatch(nb::handle op, nb::handle types, nb::handle args, nb::handle kwargs) {
  (void)types;
  auto& operators = state.operators->known;
  const auto found = operators.find(op.ptr());
  if (found != operators.end() && PyTuple_CheckExact(args.ptr())) {
    const Operator& about = found->second;  // insertions into an unordered_map keep references to its elements valid
    nb::object done = queue(about, args.ptr(), kwargs.ptr());
    if (done.is_valid()) return done;
  }
  PyObject* done = PyObject_CallFunctionObjArgs(state.handles->dispatch, op.ptr(), args.ptr(), kwargs.ptr(), nullptr);
  if (done == nullptr) {
    leave_out_frames();
    throw nb::python_error();
  }
  return nb::steal(done);
}

void set_handles(nb::handle handle, nb::handle place, nb::handle make, nb::handle here, nb::handle dispatch,
                 nb::handle in_inference_mode, nb::tuple marks, const nb::dict& kinds, const nb::tuple& codes,
                 const nb::dict& numbers) {
  // Scan::append packs numbers as 64-bit integers and IEEE doubles. The workers must unpack the same formats.
  if (nb::cast<std::string>(numbers[codes[1]]) != "q" || nb::cast<std::string>(numbers[codes[2]]) != "d") {
    throw nb::value_error("integers are packed as q and floats as d");
  }
  const auto code = [](nb::handle text) { return nb::cast<std::string>(text).at(0); };
  const auto kept = [](nb::handle object) { return Py_NewRef(object.ptr()); };
  const auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
  auto* given = new Handles{
      .handle = kept(handle),
      .place = kept(place),
      .make = kept(make),
      .here = kept(here),
      .dispatch = kept(dispatch),
      .in_inference_mode = kept(in_inference_mode),
      .true_mark = kept(marks[0]),
      .false_mark = kept(marks[1]),
      .int_mark = kept(marks[2]),
      .float_mark = kept(marks[3]),
      .ref = name("_ref"),
      .sig = name("_sig"),
      .at = name("_place"),
      .off = name("_off"),
      .looks = name("looks"),
      .calls = name("calls"),
      .call = name("call"),
      .target = name("target"),
      .lazy = name("lazy"),
      .brief = name("brief"),
      .build = name("build"),
      .one = PyLong_FromLong(1),
      .kinds = {},
      .list_code = code(codes[0]),
      .int_code = code(codes[1]),
      .float_code = code(codes[2]),
  };
  for (const auto& [type, kind] : kinds) {
    given->kinds.push_back({reinterpret_cast<PyTypeObject*>(kept(type)), code(kind)});
  }
  state.handles = given;  // the previous object is not deleted: a thread may still use it
}

}  // namespace

void allranks::bind_calls(nb::module_& m) {
  state.operators = new Operators;
  m.def("set_handles", set_handles, nb::arg("handle"), nb::arg("place"), nb::arg("make"), nb::arg("here"),
        nb::arg("dispatch"), nb::arg("in_inference_mode"), nb::arg("marks"), nb::arg("kinds"), nb::arg("codes"),
        nb::arg("numbers"),
        "Set the Python objects that the dispatch in C++ uses.\n\n"
        "Args:\n"
        "    handle, place, make, here, dispatch: Classes and functions of allranks.remote.torch_device.\n"
        "    in_inference_mode: torch.is_inference_mode_enabled.\n"
        "    marks: The entries of a call's key for true, false, an integer and a float.\n"
        "    kinds: The code of each type of value, from allranks.remote.protocol.arguments.\n"
        "    codes: The codes of lists, integers and floats.\n"
        "    numbers: The struct format of each code of a number.\n\n"
        "Raises:\n"
        "    ValueError: Integers are not packed as q, or floats are not packed as d.");
  m.def(
      "know_operator",
      [](nb::handle op, nb::handle facts, nb::handle numbers, bool floats_matter) {
        uint64_t positions = 0;
        for (const nb::handle each : nb::iter(numbers)) {
          const long at = PyLong_Check(each.ptr()) ? PyLong_AsLong(each.ptr()) : -1;
          if (at >= 64) return;  // positions are bits of a uint64_t; no operator of torch has 64 arguments
          if (at >= 0) positions |= uint64_t{1} << at;
        }
        state.operators->known[op.ptr()] = {nb::borrow(op), nb::borrow(facts), nb::borrow(numbers), positions,
                                            floats_matter};
      },
      nb::arg("op"), nb::arg("facts"), nb::arg("numbers"), nb::arg("floats_matter"),
      "Add an operator whose known calls run without Python code.\n\n"
      "Args:\n"
      "    op: The operator.\n"
      "    facts: The first entry of the key of its calls.\n"
      "    numbers: Positions and names of the arguments that are numbers.\n"
      "    floats_matter: A shape may depend on a float, so Python executes calls with floats.");
  m.def(
      "forget_operators", [] { state.operators->known.clear(); },
      "Remove all operators that `know_operator` has added.");
  m.def("dispatch", dispatch, nb::arg("op"), nb::arg("types"), nb::arg("args") = nb::tuple(),
        nb::arg("kwargs").none() = nb::none(), "Execute an operator. Implements `RemoteTensor.__torch_dispatch__`.");
  m.def("make_handle", make_handle, nb::arg("place"), nb::arg("sig"), nb::arg("ref"), nb::arg("offset"),
        "Create a handle of a tensor whose data is on the workers of `place`.");
}
