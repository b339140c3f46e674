// The only file that knows Python: raw addresses in, exceptions with facts out.
//
// Tensors are turned into addresses in Python (allranks/_engines/native.py), so that this module
// links with no torch and one build works with every version of it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <tuple>

#include "comm.h"
#include "reduce.h"

namespace nb = nanobind;
using namespace allranks;  // NOLINT: this file is the seam

namespace {

// Releases the GIL on demand and takes it back at the end of the call.
class PythonCaller final : public Caller {
 public:
  PythonCaller() = default;
  PythonCaller(const PythonCaller&) = delete;
  ~PythonCaller() override {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
  }
  void release() override {
    if (saved_ == nullptr) saved_ = PyEval_SaveThread();
  }
  bool interrupted() override {
    if (saved_ != nullptr) PyEval_RestoreThread(std::exchange(saved_, nullptr));
    // On true the exception of the signal handler is set, and the GIL stays with us to raise it.
    if (PyErr_CheckSignals() != 0) return true;
    release();
    return false;
  }

 private:
  PyThreadState* saved_ = nullptr;
};

constexpr std::array kVerbs = {"none", "all_reduce", "broadcast", "barrier", "send", "recv"};
constexpr std::array kDTypeNames = {"uint8",      "int8",          "int16",       "int32",           "int64",
                                    "float16",    "bfloat16",      "float32",     "float64",         "bool",
                                    "uint16",     "uint32",        "uint64",      "complex32",       "complex64",
                                    "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"};
static_assert(kDTypeNames.size() == kDTypes);
constexpr std::array kReduceOpNames = {"SUM", "AVG", "PROD", "MIN", "MAX"};
static_assert(kReduceOpNames.size() == kReduceOps);
constexpr std::array kKinds = {"", "timeout", "died", "left", "interrupted", "mismatch", "closed", "system"};

PyObject* failure_type = nullptr;  // allranks._core.Failure; lives as long as the module

using Call = std::tuple<std::string, std::string, std::string, int, uint64_t>;

Call describe(const Fingerprint& f) {
  return {kVerbs.at(static_cast<size_t>(f.verb)), kDTypeNames.at(static_cast<size_t>(f.dtype)),
          kReduceOpNames.at(static_cast<size_t>(f.op)), f.root, f.count};
}

void raise(const Error& error) {
  const Failure& f = error.failure;
  if (error.signalled) return;  // KeyboardInterrupt, or what the signal's handler raised, is set
  std::vector<Call> calls;
  for (const auto& fingerprint : error.calls) calls.push_back(describe(fingerprint));
  const nb::tuple args = nb::make_tuple(kKinds.at(static_cast<size_t>(f.kind)), f.peer, f.reporter, f.call,
                                        describe(f.fingerprint), f.seconds, calls, error.waiting_for, error.text);
  PyErr_SetObject(failure_type, args.ptr());
}

std::vector<sys::Fd> own(const std::vector<int>& fds) { return {fds.begin(), fds.end()}; }

Operation operation(Verb verb, uintptr_t data, size_t count, int dtype, int op, int root) {
  const auto d = static_cast<DType>(dtype);
  return {{.verb = verb, .dtype = d, .op = static_cast<ReduceOp>(op), .root = root, .count = count},
          {reinterpret_cast<void*>(data), count, d}};
}

Operation all_reduce(uintptr_t data, size_t count, int dtype, int op) {
  return operation(Verb::all_reduce, data, count, dtype, op, -1);
}
Operation broadcast(uintptr_t data, size_t count, int dtype, int root) {
  return operation(Verb::broadcast, data, count, dtype, 0, root);
}
Operation barrier() { return operation(Verb::barrier, 0, 0, 0, 0, -1); }

void run(Comm& comm, const Operation& op) {
  PythonCaller caller;
  comm.run(op, caller);
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The C++ core of allranks: one rank of one group, over shared memory.";

  failure_type = PyErr_NewException("allranks._core.Failure", PyExc_Exception, nullptr);
  m.attr("Failure") = nb::borrow(failure_type);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& error) {
      raise(error);
    }
  });

  nb::dict dtypes;
  for (size_t i = 0; i < kDTypeNames.size(); i++) dtypes[kDTypeNames[i]] = i;
  m.attr("DTYPES") = dtypes;
  nb::dict ops;
  for (size_t i = 0; i < kReduceOpNames.size(); i++) ops[kReduceOpNames[i]] = i;
  m.attr("REDUCE_OPS") = ops;
  m.attr("ISA") = kernel_isa();

  m.def(
      "reduces",
      [](int dtype, int op) { return kernel_for(static_cast<DType>(dtype), static_cast<ReduceOp>(op)) != nullptr; },
      nb::arg("dtype"), nb::arg("op"), "Whether all_reduce has a kernel for this pair.");

  nb::class_<Sizes>(m, "Sizes", "Bytes of the parts of a segment; all ranks must agree.")
      .def(nb::init<>())
      .def_rw("slot", &Sizes::slot)
      .def_rw("chunk", &Sizes::chunk)
      .def_rw("chunks", &Sizes::chunks)
      .def_rw("pipe", &Sizes::pipe);

  m.def(
      "create_segment",
      [](int rank, int size, const Sizes& sizes) { return Shm::create_segment(rank, size, sizes).release(); },
      nb::arg("rank"), nb::arg("size"), nb::arg("sizes"), "A file descriptor of a new segment; the caller closes it.");

  nb::class_<Request>(m, "Request").def("done", [](const Request& r) {
    return r.done.load(std::memory_order_acquire);
  });

  nb::class_<Comm>(m, "Comm")
      .def(
          "__init__",
          [](Comm* self, int rank, const Sizes& sizes, const std::vector<int>& segments,
             const std::vector<int>& liveness, double timeout_s, double spin_us, double spin_progress_us) {
            auto shm = std::make_unique<Shm>(rank, sizes, Shm::map(sizes, own(segments)), own(liveness));
            new (self) Comm(std::move(shm), Settings{.timeout_s = timeout_s,
                                                     .spin_ns = static_cast<int64_t>(spin_us * 1e3),
                                                     .spin_progress_ns = static_cast<int64_t>(spin_progress_us * 1e3)});
          },
          nb::arg("rank"), nb::arg("sizes"), nb::arg("segments"), nb::arg("liveness"), nb::arg("timeout_s"),
          nb::arg("spin_us"), nb::arg("spin_progress_us"), "Takes over the descriptors.")
      .def("all_reduce",
           [](Comm& c, uintptr_t data, size_t n, int dtype, int op) { run(c, all_reduce(data, n, dtype, op)); })
      .def("broadcast",
           [](Comm& c, uintptr_t data, size_t n, int dtype, int root) { run(c, broadcast(data, n, dtype, root)); })
      .def("barrier", [](Comm& c) { run(c, barrier()); })
      .def("start_all_reduce",
           [](Comm& c, uintptr_t data, size_t n, int dtype, int op) { return c.start(all_reduce(data, n, dtype, op)); })
      .def("start_broadcast", [](Comm& c, uintptr_t data, size_t n, int dtype,
                                 int root) { return c.start(broadcast(data, n, dtype, root)); })
      .def("start_barrier", [](Comm& c) { return c.start(barrier()); })
      .def("wait",
           [](Comm& c, const std::shared_ptr<Request>& r, double timeout_s) {
             PythonCaller caller;
             c.wait(r, caller, timeout_s < 0 ? -1 : static_cast<int64_t>(timeout_s * 1e9));
           })
      .def("send",
           [](Comm& c, uintptr_t data, size_t n, int dtype, int to, int tag) {
             PythonCaller caller;
             c.send({reinterpret_cast<void*>(data), n, static_cast<DType>(dtype)}, to, tag, caller);
           })
      .def("recv",
           [](Comm& c, uintptr_t data, size_t n, int dtype, int from, int tag) {
             PythonCaller caller;
             return c.recv({reinterpret_cast<void*>(data), n, static_cast<DType>(dtype)}, from, tag, caller);
           })
      .def("last_calls",
           [](Comm& c) {
             std::vector<std::pair<uint32_t, Call>> calls;
             for (const auto& [number, fingerprint] : c.last_calls()) calls.emplace_back(number, describe(fingerprint));
             return calls;
           })
      .def("stats",
           [](const Comm& c) {
             const Stats s = c.stats();
             return std::tuple(s.calls, s.bytes, s.seconds);
           })
      .def("close",
           [](Comm& c) {
             nb::gil_scoped_release release;
             c.close();
           })
      .def("abandon", &Comm::abandon);
}
