// The binding of the outbox (outbox.h): Refs, which free their ids when they are deallocated.
//
// A program creates and deallocates a Ref for each operation that it queues. Its cost therefore matters, and it is a
// plain CPython type instead of a nanobind class.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>
#include <structmember.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "python/binding.h"
#include "python/caller.h"
#include "python/state.h"
#include "remote/inbox.h"
#include "remote/outbox.h"

namespace nb = nanobind;
using namespace allranks;  // NOLINT: this file is the binding

namespace {

// A caller that runs a Python function while it waits for room in the outbox. That function receives the workers'
// answers. Without it a worker could block in sending an answer while this caller waits for that worker: a deadlock.
class WaitingCaller final : public GilCaller {
 public:
  bool interrupted() override {
    if (GilCaller::interrupted()) return true;
    if (state.while_waiting == nullptr) return false;
    acquire();
    waited_++;  // the outbox calls this function every 0.1 s (kInterruptible of outbox.cc)
    try {
      nb::borrow(state.while_waiting)(0.1 * waited_);
    } catch (nb::python_error& error) {
      error.restore();  // handled like an exception of a signal handler: the binding raises it when the call returns
      check_process();
      return true;
    }
    check_process();
    release();
    return false;
  }

 private:
  int waited_ = 0;
};

struct Ref {
  PyObject ob_base;
  PyObject* weak;
  PyObject* keeps;  // of a view: the Ref that owns the id; else: the outbox's Python object; nullptr: no id to free
  Outbox* outbox;
  uint32_t id;
  int target;
};

bool is_ref(PyObject* object) { return Py_TYPE(object) == state.ref_type; }
Ref* as_ref(PyObject* object) { return reinterpret_cast<Ref*>(object); }

// Create a Ref without an id. All allocations must precede the queueing of the call, which cannot be undone.
nb::object blank_ref() {
  Ref* self = PyObject_New(Ref, state.ref_type);
  if (self == nullptr) throw nb::python_error();
  self->weak = self->keeps = nullptr;
  return nb::steal(reinterpret_cast<PyObject*>(self));
}

void fill(PyObject* blank, PyObject* keeps, Outbox& outbox, int target, uint32_t id) {
  Ref* self = as_ref(blank);
  self->keeps = Py_NewRef(keeps);
  self->outbox = &outbox;
  self->id = id;
  self->target = target;
}

void ref_dealloc(PyObject* object) {
  Ref* self = as_ref(object);
  if (self->weak != nullptr) PyObject_ClearWeakRefs(object);
  if (self->keeps != nullptr && !is_ref(self->keeps)) self->outbox->free(self->target, self->id);
  Py_XDECREF(self->keeps);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

PyObject* ref_id(PyObject* self, void*) { return PyLong_FromUnsignedLong(as_ref(self)->id); }
PyObject* ref_target(PyObject* self, void*) { return PyLong_FromLong(as_ref(self)->target); }
PyObject* ref_whole(PyObject* self, void*) {
  while (is_ref(as_ref(self)->keeps)) self = as_ref(self)->keeps;
  return Py_NewRef(self);
}

void make_ref_type() {
  static std::array<PyMemberDef, 2> members{{
      {"__weaklistoffset__", T_PYSSIZET, offsetof(Ref, weak), READONLY, nullptr},
      {},
  }};
  static std::array<PyGetSetDef, 4> properties{{
      {"id", ref_id, nullptr, nullptr, nullptr},
      {"target", ref_target, nullptr, nullptr, nullptr},
      {"whole", ref_whole, nullptr, nullptr, nullptr},
      {},
  }};
  std::array<PyType_Slot, 5> slots{{
      {Py_tp_dealloc, reinterpret_cast<void*>(ref_dealloc)},
      {Py_tp_members, members.data()},
      {Py_tp_getset, properties.data()},
      {Py_tp_doc,
       const_cast<char*>(
           "An id that the workers of an outbox use for a value. The id is freed when this object is deleted.")},
      {},
  }};
  PyType_Spec spec{.name = "allranks._core.Ref",
                   .basicsize = sizeof(Ref),
                   .itemsize = 0,
                   .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                   .slots = slots.data()};
  state.ref_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (state.ref_type == nullptr) throw nb::python_error();
}

std::span<const std::byte> view(nb::handle object) {
  return {reinterpret_cast<const std::byte*>(PyBytes_AsString(object.ptr())),
          static_cast<size_t>(PyBytes_Size(object.ptr()))};
}

// The ids of one call. Up to kFew ids need no heap allocation.
class Ids {
 public:
  explicit Ids(size_t count)
      : many_(count > kFew ? count : 0), ids_(count > kFew ? many_.data() : few_.data(), count) {}
  Ids(const Ids&) = delete;
  std::span<uint32_t> all() const { return ids_; }

 private:
  static constexpr size_t kFew = 32;
  std::array<uint32_t, kFew> few_;
  std::vector<uint32_t> many_;
  std::span<uint32_t> ids_;
};

uint32_t input_id(const Outbox& outbox, int target, PyObject* input) {
  if (!is_ref(input)) throw nb::type_error("an input of a call is not a Ref");
  const Ref* ref = as_ref(input);
  if (ref->outbox != &outbox) throw nb::value_error("an input of a call belongs to another outbox");
  if (ref->target != target) {
    throw std::invalid_argument("an input of a call to target " + std::to_string(target) + " belongs to target " +
                                std::to_string(ref->target));
  }
  return ref->id;
}

nb::object filled_list(nb::handle self, Outbox& outbox, int target, std::span<const uint32_t> ids, nb::list blanks) {
  for (size_t i = 0; i < ids.size(); i++) {
    fill(PyList_GetItem(blanks.ptr(), static_cast<Py_ssize_t>(i)), self.ptr(), outbox, target, ids[i]);
  }
  return blanks;
}

nb::list blank_list(size_t count) {
  nb::list blanks;
  for (size_t i = 0; i < count; i++) blanks.append(blank_ref());
  return blanks;
}

nb::object call(nb::handle self, int target, uint32_t line, uint16_t code, nb::handle inputs, size_t outputs,
                std::optional<nb::bytes> values) {
  Outbox& outbox = *nb::inst_ptr<Outbox>(self);
  // Copy a list: while the call waits for room it releases the GIL, and another thread may change the list.
  const nb::object given = PyTuple_Check(inputs.ptr()) ? nb::borrow(inputs) : nb::steal(PySequence_Tuple(inputs.ptr()));
  if (!given.is_valid()) throw nb::python_error();
  const auto count = static_cast<size_t>(PyTuple_Size(given.ptr()));
  const Ids in(count);
  for (size_t i = 0; i < count; i++) {
    in.all()[i] = input_id(outbox, target, PyTuple_GetItem(given.ptr(), static_cast<Py_ssize_t>(i)));
  }
  const Ids out(outputs);
  const nb::object blanks = outputs == 0 ? nb::none() : outputs == 1 ? blank_ref() : blank_list(outputs);
  {
    WaitingCaller caller;
    outbox.call(target, line, code, in.all(), out.all(), values ? view(*values) : std::span<const std::byte>(), caller);
  }
  if (outputs > 1) return filled_list(self, outbox, target, out.all(), nb::borrow<nb::list>(blanks));
  if (outputs == 1) fill(blanks.ptr(), self.ptr(), outbox, target, out.all()[0]);
  return blanks;
}

nb::object reserve(nb::handle self, int target, size_t count) {
  Outbox& outbox = *nb::inst_ptr<Outbox>(self);
  const Ids ids(count);
  nb::list blanks = blank_list(count);
  outbox.reserve(target, ids.all());
  return filled_list(self, outbox, target, ids.all(), std::move(blanks));
}

void put(Outbox& outbox, int target, nb::bytes head, nb::object payload, bool bulk) {
  WaitingCaller caller;
  if (payload.is_none()) return outbox.put(target, view(head), {}, bulk, caller);
  if (PyBytes_Check(payload.ptr())) return outbox.put(target, view(head), view(payload), bulk, caller);
  // CPython's stable ABI has the buffer protocol only since 3.11. nanobind reads buffers and arrays in 3.10, too.
  nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> array;
  if (!nb::try_cast(payload, array)) throw nb::type_error("a payload must be bytes, or a contiguous buffer on the CPU");
  outbox.put(target, view(head), {static_cast<const std::byte*>(array.data()), array.nbytes()}, bulk, caller);
}

nb::object view_as(nb::handle ref, int target) {
  if (!is_ref(ref.ptr())) throw nb::type_error("only a Ref can be viewed on another target");
  const Ref* whole = as_ref(ref.ptr());
  if (!whole->outbox->within(target, whole->target)) {
    throw std::invalid_argument("target " + std::to_string(target) + " has workers that are not in target " +
                                std::to_string(whole->target));
  }
  nb::object blank = blank_ref();
  fill(blank.ptr(), ref.ptr(), *whole->outbox, target, whole->id);
  return blank;
}

void bind_class(nb::module_& m) {
  nb::class_<Outbox>(m, "Outbox",
                     "Queues of frames for many workers. A separate thread sends them: see core/remote/outbox.h.")
      .def(nb::new_([](double delay_us, size_t chunk_bytes, size_t limit_bytes) {
             return sys::make_owned<Outbox>(static_cast<int64_t>(delay_us * 1e3), chunk_bytes, limit_bytes);
           }),
           nb::arg("delay_us") = 100, nb::arg("chunk_bytes") = 16384, nb::arg("limit_bytes") = 8 << 20)
      .def("add", &Outbox::add, nb::arg("fd"),
           "Add a worker and return its number. The caller must keep the socket open.")
      .def("replace", &Outbox::replace, nb::arg("worker"), nb::arg("fd"),
           "Start a new stream and drop the pending bytes of the old one.")
      .def("lose", &Outbox::lose, nb::arg("worker"), "Drop the pending bytes of a worker and all its later frames.")
      .def("target", &Outbox::target, nb::arg("workers"),
           "Add a destination for frames, a set of workers, and return its number.")
      .def("call", call, nb::arg("target"), nb::arg("line"), nb::arg("template"), nb::arg("inputs"), nb::arg("outputs"),
           nb::arg("values").none() = nb::none(),
           "Queue a call. Return None, a Ref or a list of Refs, for zero, one or more outputs.")
      .def("reserve", reserve, nb::arg("target"), nb::arg("count"), "Return new Refs without queueing a frame.")
      .def("put", put, nb::arg("target"), nb::arg("head"), nb::arg("payload").none() = nb::none(),
           nb::arg("bulk") = false,
           "Queue a message. bulk: the limit of 1 GiB per worker applies instead of limit_bytes.")
      .def(
          "view", [](const Outbox&, nb::handle ref, int target) { return view_as(ref, target); }, nb::arg("ref"),
          nb::arg("target"),
          "Return a Ref with the same id for a subset of its workers. It keeps the original Ref alive.")
      .def(
          "flush",
          [](Outbox& outbox) {
            GilCaller caller;
            outbox.flush(caller);
          },
          "Write as many bytes as the sockets accept without blocking. The thread writes the rest.")
      .def(
          "echo",
          [](Outbox& outbox, int target, uint32_t number) {
            GilCaller caller;
            outbox.echo(target, number, caller);
          },
          nb::arg("target"), nb::arg("number"),
          "Request that each worker of the target sends the number back, and flush.")
      .def("pending", &Outbox::pending, nb::arg("worker"), "Return the number of bytes that have not been sent.")
      .def("sent", &Outbox::sent, nb::arg("worker"),
           "Return the number of bytes sent to all processes that have been this worker.")
      .def("failure", &Outbox::failure, nb::arg("worker"), "Return the errno of the worker's socket, or 0.")
      .def_prop_ro("live", &Outbox::live, "Number of ids that are not free.")
      .def_prop_ro("calls", &Outbox::calls, "Number of calls that have been queued.")
      .def(
          "close",
          [](Outbox& outbox) {
            const nb::gil_scoped_release release;
            outbox.close();
          },
          "Stop the thread and drop all pending bytes.");
}

}  // namespace

void allranks::bind_outbox(nb::module_& m) {
  m.def(
      "while_waiting",
      [](nb::object function) {
        PyObject* before = std::exchange(state.while_waiting, function.is_none() ? nullptr : function.release().ptr());
        Py_XDECREF(before);
      },
      nb::arg("function").none(),
      "Set a function that runs ten times per second while a caller waits for room.\n\n"
      "The function receives the seconds that the caller has waited. The waiting call raises its exceptions.");
  m.def(
      "receive",
      [](int fd, nb::bytearray buffer, size_t at, bool echoes) {
        if (at >= buffer.size()) throw std::invalid_argument("there is no room in the buffer");
        std::byte* room = static_cast<std::byte*>(buffer.data()) + at;
        GilCaller caller;
        return receive(fd, {room, buffer.size() - at}, echoes, caller);
      },
      nb::arg("fd"), nb::arg("buffer"), nb::arg("at"), nb::arg("echoes"),
      "Wait for bytes, write them to the buffer, and return their number, or 0 at the end of the stream.\n\n"
      "echoes: answer ECHO frames that arrive alone (core/remote/inbox.h).");
  make_ref_type();
  m.attr("Ref") = nb::borrow(reinterpret_cast<PyObject*>(state.ref_type));
  bind_class(m);
}
