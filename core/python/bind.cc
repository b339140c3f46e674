// The seam with Python (tensors.cc is its other half): addresses in, exceptions with facts out.
//
// Ordinary tensors are read through DLPack's table, others in Python (allranks/_engines/native/engine.py), so
// that this module links with no torch and one build works with every version of it.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <tuple>

#include "collective/algorithms/moves.h"
#include "collective/reduce.h"
#include "group/comm.h"
#include "python/binding.h"
#include "python/tensors.h"

NB_MAKE_OPAQUE(allranks::Liveness)

namespace nb = nanobind;
using namespace allranks;  // NOLINT: this file is the seam

namespace {

// What Python gives to tell where in the program a call stands; lives as long as the module.
PyObject* where_function = nullptr;

class PythonCaller final : public GilCaller {
 public:
  ~PythonCaller() override {
    if (!raised_) return;  // else the call has ended before the exception could be raised
    acquire();
    if (raised_->matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    raised_->discard_as_unraisable("where a call stands");
  }

  std::string where() override {
    acquire();
    std::string site;
    try {
      site = nb::cast<std::string>(nb::borrow(where_function)());
    } catch (nb::python_error& error) {
      raised_.emplace(error);  // by a signal handler: interrupted() raises it
    }
    if (raised_ && forked()) restore();
    check_process();
    return site;
  }

  bool interrupted() override {
    if (!raised_) return GilCaller::interrupted();
    acquire();
    restore();
    return true;
  }

 private:
  void restore() {
    raised_->restore();
    raised_.reset();
  }

  std::optional<nb::python_error> raised_;
};

constexpr std::array kVerbs = {"none",    "all_reduce",     "reduce",     "broadcast", "all_gather", "gather",
                               "scatter", "reduce_scatter", "all_to_all", "barrier",   "send",       "recv"};
constexpr std::array kDTypeNames = {"uint8",      "int8",          "int16",       "int32",           "int64",
                                    "uint16",     "uint32",        "uint64",      "float16",         "bfloat16",
                                    "float32",    "float64",       "bool",        "complex32",       "complex64",
                                    "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"};
static_assert(kDTypeNames.size() == kDTypes);
constexpr std::array kReduceOpNames = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
static_assert(kReduceOpNames.size() == kReduceOps);
constexpr std::array kKinds = {"",       "timeout", "died",        "left",   "interrupted", "mismatch",
                               "closed", "system",  "unreachable", "memory", "forked"};

const Error kForked(Failure{.kind = Kind::forked});

constexpr std::array kPurposes = {"",
                                  "new_group",
                                  "split_group",
                                  "all_gather_object",
                                  "gather_object",
                                  "broadcast_object_list",
                                  "scatter_object_list",
                                  "empty_shared"};

thread_local Purpose purpose = Purpose::none;  // of the calls that this thread starts

PyObject* failure_type = nullptr;  // allranks._core.Failure; lives as long as the module

using Call = std::tuple<std::string, std::string, std::string, int, uint64_t>;

Call describe(const Fingerprint& f) {
  const bool whole = f.purpose == Purpose::none;
  return {whole ? kVerbs.at(static_cast<size_t>(f.verb)) : kPurposes.at(static_cast<size_t>(f.purpose)),
          kDTypeNames.at(static_cast<size_t>(f.dtype)), kReduceOpNames.at(static_cast<size_t>(f.op)), f.root, f.count};
}

nb::tuple facts(const Error& error) {
  const Failure& f = error.failure;
  std::vector<Call> calls;
  for (const auto& fingerprint : error.calls) calls.push_back(describe(fingerprint));
  std::vector<std::tuple<int, int, std::string, std::string>> waits;
  for (const Wait& w : error.waits) waits.emplace_back(w.rank, w.peer, kVerbs.at(static_cast<size_t>(w.verb)), w.site);
  std::vector<std::tuple<int, int, Call, size_t>> unasked;
  for (const Unasked& u : error.unasked) unasked.emplace_back(u.from, u.tag, describe(u.first), u.count);
  return nb::make_tuple(kKinds.at(static_cast<size_t>(f.kind)), f.peer, f.reporter, f.call, describe(f.fingerprint),
                        f.seconds, calls, error.waiting_for, error.sites, error.text, waits, unasked);
}

std::vector<sys::Fd> own(const std::vector<int>& fds) { return {fds.begin(), fds.end()}; }

// Asks those who connect (native/tcp.py), whose thread reads this from a pipe.
Net::Opener asking(int pipe, uint32_t number) {
  auto own = std::make_shared<sys::Fd>(fcntl(pipe, F_DUPFD_CLOEXEC, 0));
  if (own->get() < 0) throw Error(std::string("dup of a pipe: ") + std::strerror(errno));
  return [own, number](int rank, Connection kind) {
    const std::array<uint32_t, 3> wanted{number, static_cast<uint32_t>(rank), static_cast<uint32_t>(kind)};
    if (write(own->get(), wanted.data(), sizeof wanted) != sizeof wanted) {
      throw Error(std::string("cannot ask for a connection: ") + std::strerror(errno));
    }
  };
}

using Address = uintptr_t;
using MaybeRequest = std::shared_ptr<Request>;  // None where the call has blocked

std::byte* bytes(Address address) { return reinterpret_cast<std::byte*>(address); }

Buffer buffer(Address data, size_t count, int dtype) { return {bytes(data), count, static_cast<DType>(dtype)}; }

using Mark = uint64_t;                       // a fingerprint's shape, and above it its site
using Started = std::optional<std::string>;  // of an asynchronous call: where in the program it stands

std::vector<std::byte*> pieces(const std::vector<Address>& addresses) {
  std::vector<std::byte*> all;
  for (const Address a : addresses) all.push_back(bytes(a));
  return all;
}

Operation operation(Verb verb, Buffer buffer, Mark mark, int op = 0, int root = -1) {
  return {.fingerprint = {.verb = verb,
                          .dtype = buffer.dtype,
                          .op = static_cast<ReduceOp>(op),
                          .purpose = purpose,
                          .root = root,
                          .count = buffer.count,
                          .shape = static_cast<uint32_t>(mark),
                          .site = static_cast<uint32_t>(mark >> 32)},
          .buffer = buffer};
}

MaybeRequest call(Comm& comm, Operation op, const Started& started) {
  if (started) {
    op.site = *started;
    return comm.start(std::move(op));
  }
  PythonCaller caller;
  comm.run(op, caller);
  return nullptr;
}

MaybeRequest all_reduce(Comm& comm, Address data, size_t n, int dtype, Mark mark, int op, const Started& started) {
  return call(comm, operation(Verb::all_reduce, buffer(data, n, dtype), mark, op), started);
}

MaybeRequest reduce(Comm& comm, Address data, size_t n, int dtype, Mark mark, int op, int root,
                    const Started& started) {
  return call(comm, operation(Verb::reduce, buffer(data, n, dtype), mark, op, root), started);
}

MaybeRequest broadcast(Comm& comm, Address data, size_t n, int dtype, Mark mark, int root, const Started& started) {
  return call(comm, operation(Verb::broadcast, buffer(data, n, dtype), mark, 0, root), started);
}

MaybeRequest all_gather(Comm& comm, Address data, size_t n, int dtype, Mark mark, const std::vector<Address>& outs,
                        const Started& started) {
  Operation op = operation(Verb::all_gather, buffer(data, n, dtype), mark);
  op.outs = pieces(outs);
  return call(comm, std::move(op), started);
}

MaybeRequest gather(Comm& comm, Address data, size_t n, int dtype, Mark mark, const std::vector<Address>& outs,
                    int root, const Started& started) {
  Operation op = operation(Verb::gather, buffer(data, n, dtype), mark, 0, root);
  op.outs = pieces(outs);
  return call(comm, std::move(op), started);
}

MaybeRequest scatter(Comm& comm, Address data, size_t n, int dtype, Mark mark, const std::vector<Address>& ins,
                     int root, const Started& started) {
  Operation op = operation(Verb::scatter, buffer(data, n, dtype), mark, 0, root);
  op.ins = pieces(ins);
  return call(comm, std::move(op), started);
}

MaybeRequest reduce_scatter(Comm& comm, Address data, size_t n, int dtype, Mark mark, const std::vector<Address>& ins,
                            int reduce_op, const Started& started) {
  Operation op = operation(Verb::reduce_scatter, buffer(data, n, dtype), mark, reduce_op);
  op.ins = pieces(ins);
  return call(comm, std::move(op), started);
}

// The element counts may differ from rank to rank, so that they are no part of the fingerprint.
MaybeRequest all_to_all(Comm& comm, int dtype, Mark mark, const std::vector<Address>& ins,
                        const std::vector<size_t>& in_bytes, const std::vector<Address>& outs,
                        const std::vector<size_t>& out_bytes, const Started& started) {
  Operation op = operation(Verb::all_to_all, buffer(0, 0, dtype), mark);
  op.ins = pieces(ins);
  op.outs = pieces(outs);
  op.in_bytes = in_bytes;
  op.out_bytes = out_bytes;
  for (const size_t given : {ins.size(), in_bytes.size(), outs.size(), out_bytes.size()}) {
    if (given != static_cast<size_t>(comm.size())) throw Error("all_to_all: not one piece per rank");
  }
  return call(comm, std::move(op), started);
}

MaybeRequest barrier(Comm& comm, Mark mark, const Started& started) {
  return call(comm, operation(Verb::barrier, {}, mark), started);
}

// What Python calls ordinary tensors, and its ReduceOp; they live as long as the module.
const Tensors* ordinary = nullptr;
PyObject* reduce_op_class = nullptr;

// Whether a tensor overlaps no piece of its size, or lies exactly where one does.
bool beside(const Buffer& tensor, const std::vector<std::byte*>& pieces) {
  const size_t n = tensor.nbytes();
  return std::all_of(pieces.begin(), pieces.end(), [&](const std::byte* piece) {
    return piece == tensor.data || !algorithms::intersect(piece, n, tensor.bytes(), n);
  });
}

// Whether pieces of `n` bytes share no memory.
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

// A blocking collective with arguments as the user gave them, and errors as the user is to see them:
// what explain(failure, verb) returns. False: nothing was done, because something is out of the
// ordinary, or wrong. `pieces`: None, one tensor of all pieces in turn, or a
// list by rank; of all_to_all: the output.
bool try_now(Comm& comm, Verb verb, nb::handle tensor, nb::handle pieces, nb::handle op_object,
             nb::handle root_object) {
  if (verb == Verb::barrier) {
    PythonCaller caller;
    comm.run(operation(Verb::barrier, {}, 0), caller);
    return true;
  }
  const auto mine = ordinary->show(tensor);
  if (!mine || !PyLong_Check(root_object.ptr())) return false;
  const auto ranks = static_cast<size_t>(comm.size());
  const Buffer& b = mine->buffer;
  const bool reduces = verb == Verb::all_reduce || verb == Verb::reduce || verb == Verb::reduce_scatter;
  int op_code = 0;
  if (reduces) {
    if (op_object.type().ptr() != reduce_op_class) return false;
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
  std::vector<nb::object> keep;  // the list may change meanwhile
  Operation op = operation(verb, b, mine->shape, op_code, static_cast<int>(root));
  if (verb == Verb::all_to_all) {
    const auto out = ordinary->show(pieces);
    if (!out || out->buffer.dtype != b.dtype || out->buffer.count != b.count) return false;
    if (mine->rows == 0 || mine->rows % comm.size() != 0 || out->rows == 0 || out->rows % comm.size() != 0)
      return false;
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
    op.fingerprint.count = 0;  // as all_to_all's
    op.fingerprint.shape = 0;
  } else if (!pieces.is_none()) {
    std::vector<std::byte*> addresses;
    addresses.reserve(ranks);
    if (nb::isinstance<nb::list>(pieces)) {
      const auto list = nb::borrow<nb::list>(pieces);
      if (list.size() != ranks) return false;
      for (const nb::handle piece : list) {
        const auto shown = ordinary->show(piece);
        if (!shown || shown->buffer.dtype != b.dtype || shown->buffer.count != b.count) return false;
        addresses.push_back(shown->buffer.bytes());
        keep.push_back(nb::borrow(piece));
      }
    } else {
      const auto whole = ordinary->show(pieces);
      if (!whole || whole->buffer.dtype != b.dtype || whole->buffer.count != b.count * ranks) return false;
      for (size_t r = 0; r < ranks; r++) addresses.push_back(whole->buffer.bytes() + r * b.nbytes());
    }
    const bool gathers = verb == Verb::all_gather || verb == Verb::gather;
    // What overlaps otherwise is copied, or refused.
    if (!beside(b, addresses) || (gathers && !apart(addresses, b.nbytes()))) return false;
    (gathers ? op.outs : op.ins) = std::move(addresses);
  }
  PythonCaller caller;
  comm.run(op, caller);
  return true;
}

MaybeRequest send(Comm& comm, Address data, size_t n, int dtype, int to, int tag, bool async_op) {
  PythonCaller caller;
  if (async_op) return comm.start_send(buffer(data, n, dtype), to, tag, caller);
  comm.send(buffer(data, n, dtype), to, tag, caller);
  return nullptr;
}

class Now {
 public:
  Now(std::shared_ptr<Comm> comm, nb::object explain) : comm_(std::move(comm)), explain_(std::move(explain)) {
    for (const char* name : kVerbs) verbs_.push_back(nb::steal(PyUnicode_InternFromString(name)));
  }

  bool operator()(nb::handle verb, nb::handle tensor, nb::handle pieces, nb::handle op, nb::handle root) const {
    size_t code = 0;
    while (code < verbs_.size() && !verbs_[code].is(verb)) code++;  // literals of Python are interned
    if (code == verbs_.size()) return false;
    try {
      return try_now(*comm_, static_cast<Verb>(code), tensor, pieces, op, root);
    } catch (const Error& error) {
      if (error.signalled) throw nb::python_error();
      raise(error, verb);
    } catch (const sys::Forked& forked) {
      if (forked.signalled) throw nb::python_error();
      raise(kForked, verb);
    }
  }

 private:
  [[noreturn]] void raise(const Error& error, nb::handle verb) const {
    const nb::object failure = nb::borrow(failure_type)(*facts(error));
    const nb::object explained = explain_(failure, verb);
    PyErr_SetObject(explained.type().ptr(), explained.ptr());
    throw nb::python_error();
  }

  std::shared_ptr<Comm> comm_;
  nb::object explain_;
  std::vector<nb::object> verbs_;
};

// A blocking message of an ordinary tensor, as `now`.
bool send_now(Comm& comm, nb::handle tensor, int to, int tag) {
  const auto shown = ordinary->show(tensor);
  if (!shown) return false;
  PythonCaller caller;
  comm.send(shown->buffer, to, tag, caller);
  return true;
}

// The sender, or -1 if nothing was done.
int recv_now(Comm& comm, nb::handle tensor, int from, int tag) {
  const auto shown = ordinary->show(tensor);
  if (!shown) return -1;
  PythonCaller caller;
  return comm.recv(shown->buffer, from, tag, caller);
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // a rank that ends with a live traceback still holds its group
  m.doc() = "The C++ core of allranks: one rank of one group, over shared memory.";

  failure_type = PyErr_NewException("allranks._core.Failure", PyExc_Exception, nullptr);
  m.attr("Failure") = nb::borrow(failure_type);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& error) {
      // When signalled KeyboardInterrupt, or what the signal's handler raised, is set.
      if (!error.signalled) PyErr_SetObject(failure_type, facts(error).ptr());
    } catch (const sys::Forked& forked) {
      if (!forked.signalled) PyErr_SetObject(failure_type, facts(kForked).ptr());
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
      "set_where",
      [](const nb::object& function) {
        PyObject* before = std::exchange(where_function, nb::object(function).release().ptr());
        Py_XDECREF(before);
      },
      nb::arg("function"), "function(): where in the program the present call stands, for errors.");

  m.def(
      "set_ordinary",
      [](const nb::list& classes, const nb::object& reduce_op) {
        delete std::exchange(ordinary, new Tensors(classes));
        Py_XDECREF(std::exchange(reduce_op_class, nb::object(reduce_op).release().ptr()));
      },
      nb::arg("classes"), nb::arg("reduce_op"), "The classes of tensors that Now takes, and that of its op.");
  m.def(
      "shape_hash", [](const std::vector<int64_t>& shape) { return shape_hash(shape.data(), shape.size()); },
      nb::arg("shape"), "What ranks compare of a tensor's shape.");

  m.def(
      "reduces",
      [](int dtype, int op) { return kernel_for(static_cast<DType>(dtype), static_cast<ReduceOp>(op)) != nullptr; },
      nb::arg("dtype"), nb::arg("op"), "Whether all_reduce has a kernel for this pair.");

  m.def(
      "part_of",
      [](const std::string& name) {
        const auto found = std::find(kPurposes.begin(), kPurposes.end(), name);
        if (found == kPurposes.end()) throw nb::value_error("part_of: this call has no number in Purpose");
        const char* before = kPurposes.at(static_cast<size_t>(purpose));
        purpose = static_cast<Purpose>(found - kPurposes.begin());
        return before;
      },
      nb::arg("name"), "The call of the program that this thread's collectives are parts of; returns the one before.");
  nb::list purposes;
  for (size_t i = 1; i < kPurposes.size(); i++) purposes.append(kPurposes[i]);
  m.attr("PURPOSES") = nb::frozenset(purposes);

  m.def(
      "divide",
      [](Address address, size_t count, int dtype, int parts) {
        const void* sums[] = {bytes(address)};
        kernel_for(static_cast<DType>(dtype), ReduceOp::avg)(bytes(address), sums, 1, count, parts);
      },
      nb::arg("address"), nb::arg("count"), nb::arg("dtype"), nb::arg("parts"),
      nb::call_guard<nb::gil_scoped_release>(), "Makes sums the averages that all_reduce makes, in place.");

  nb::class_<Sizes>(m, "Sizes", "Bytes of the parts of a segment; all ranks must agree.")
      .def(nb::init<>())
      .def_rw("piece", &Sizes::piece)
      .def_rw("ring", &Sizes::ring)
      .def_rw("pipe", &Sizes::pipe)
      .def_rw("ranks", &Sizes::ranks, "Of a group that spans hosts: how many it has.");

  m.def(
      "neighbours",
      [](int rank, const std::vector<int>& host_of) {
        const Hosts hosts(host_of);
        std::vector<int> ranks;
        if (hosts.place(rank) != 0) return ranks;
        for (const int h : Heartbeat::neighbours(hosts.of(rank), hosts.count())) ranks.push_back(hosts.leader(h));
        return ranks;
      },
      nb::arg("rank"), nb::arg("host_of"),
      "The ranks of other hosts that a rank is connected with from the beginning.");

  m.def(
      "create_segment",
      [](int rank, int size, const Sizes& sizes) { return Shm::create_segment(rank, size, sizes).release(); },
      nb::arg("rank"), nb::arg("size"), nb::arg("sizes"), "A file descriptor of a new segment; the caller closes it.");

  m.def(
      "create_memory",
      [](size_t bytes) {
        const nb::gil_scoped_release release;
        sys::Fd memory = sys::sealed_memory("allranks", bytes);
        sys::allocate(memory, bytes);
        return memory.release();
      },
      nb::arg("bytes"), "A file descriptor of new memory that other processes can map; the caller closes it.");

  m.def(
      "take_completions",
      [](double timeout_s) {
        const nb::gil_scoped_release release;
        return completions().take(timeout_s < 0 ? -1 : static_cast<int64_t>(timeout_s * 1e9));
      },
      nb::arg("timeout_s"),
      "Waits so long (< 0: without limit) for watched requests to end. Returns the tickets of those that have.");
  m.def(
      "add_completion", [](uint64_t ticket) { completions().add(ticket); }, nb::arg("ticket"),
      "Lets take_completions return it.");
  m.def("renew_completions", renew_completions, "In a forked child: forgets the parent's.");

  nb::class_<SharedBlock>(m, "SharedBlock", "One part of memory per rank, mapped by all of them.")
      .def_prop_ro("address", [](const SharedBlock& b) { return reinterpret_cast<Address>(b.mine()); });

  nb::class_<Request>(m, "Request")
      .def("done", [](const Request& r) { return r.done.load(std::memory_order_acquire); })
      .def("watch", &Request::watch, nb::arg("ticket"), "take_completions() returns the ticket when it has ended.")
      .def(
          "source",
          [](const Request& r) {
            const auto* message = dynamic_cast<const Message*>(&r);
            return message != nullptr ? message->peer.load() : -1;
          },
          "The rank that sent, of a recv that is done.");

  nb::class_<Liveness>(m, "Liveness", "Sockets that end with the processes of a host's ranks; groups share them.")
      .def(nb::new_([](const std::vector<int>& fds) {
             Liveness sockets;
             for (sys::Fd& fd : own(fds)) sockets.push_back(std::make_shared<const sys::Fd>(std::move(fd)));
             return sockets;
           }),
           nb::arg("fds"), "Takes over the descriptors, by rank; -1 for this rank.");

  nb::class_<Comm>(m, "Comm")
      .def(nb::new_([](int rank, const Sizes& sizes, const std::vector<int>& segments, const Liveness& liveness,
                       double timeout_s, double spin_us, double spin_progress_us, size_t eager) {
             auto shm = std::make_unique<Shm>(rank, sizes, Shm::map(sizes, own(segments)), liveness);
             return sys::make_owned<Comm>(std::move(shm),
                                          Settings{.timeout_s = timeout_s,
                                                   .spin_ns = static_cast<int64_t>(spin_us * 1e3),
                                                   .spin_progress_ns = static_cast<int64_t>(spin_progress_us * 1e3),
                                                   .eager = eager});
           }),
           nb::arg("rank"), nb::arg("sizes"), nb::arg("segments"), nb::arg("liveness"), nb::arg("timeout_s"),
           nb::arg("spin_us"), nb::arg("spin_progress_us"), nb::arg("eager"), "Takes over the descriptors.")
      .def_static(
          "across_hosts",
          [](int rank, const std::vector<int>& host_of, const Sizes& sizes, const std::vector<int>& segments,
             const Liveness& liveness, const std::vector<int>& heartbeats, int asking_pipe, uint32_t number,
             double timeout_s, double spin_us, double spin_progress_us, size_t eager) {
            // Owned before anything can fail.
            auto memories = own(segments);
            auto signs = own(heartbeats);
            const Hosts hosts(host_of);
            auto shm = std::make_unique<Shm>(hosts.place(rank), sizes, Shm::map(sizes, memories), liveness,
                                             hosts.on(hosts.of(rank)));
            return sys::make_owned<Comm>(std::move(shm), rank, hosts, std::move(signs), asking(asking_pipe, number),
                                         Settings{.timeout_s = timeout_s,
                                                  .spin_ns = static_cast<int64_t>(spin_us * 1e3),
                                                  .spin_progress_ns = static_cast<int64_t>(spin_progress_us * 1e3),
                                                  .eager = eager});
          },
          nb::arg("rank"), nb::arg("host_of"), nb::arg("sizes"), nb::arg("segments"), nb::arg("liveness"),
          nb::arg("heartbeats"), nb::arg("asking_pipe"), nb::arg("number"), nb::arg("timeout_s"), nb::arg("spin_us"),
          nb::arg("spin_progress_us"), nb::arg("eager"),
          "Takes over the descriptors: of this host's ranks, and, of a host's first rank, by rank of the group those "
          "of "
          "`neighbours` (else -1). For other connections it writes the number, the rank and the kind into the pipe.")
      .def(
          "adopt",
          [](Comm& c, int rank, int kind, int fd, const std::string& greeting) {
            c.adopt(rank, static_cast<Connection>(kind), sys::Fd(fd), greeting);
          },
          nb::arg("rank"), nb::arg("kind"), nb::arg("fd"), nb::arg("greeting"),
          "Takes over a connection with a rank of another host, on which it first sends the greeting.")
      .def(
          "liveness",
          [](Comm& c, const std::vector<int>& ranks) -> std::optional<Liveness> {
            Liveness sockets = c.liveness(ranks);
            return sockets.empty() ? std::nullopt : std::optional(std::move(sockets));
          },
          nb::arg("ranks"), nb::call_guard<nb::gil_scoped_release>(),
          "The liveness sockets of these ranks. None where one is on another host, and where the group is closed.")
      .def("give_up", &Comm::give_up, nb::arg("rank"),
           "A rank of another host cannot be reached: the group has failed.")
      .def("all_reduce", all_reduce)
      .def("reduce", reduce)
      .def("broadcast", broadcast)
      .def("all_gather", all_gather)
      .def("gather", gather)
      .def("scatter", scatter)
      .def("reduce_scatter", reduce_scatter)
      .def("all_to_all", all_to_all)
      .def("barrier", barrier)
      .def(
          "share",
          [](Comm& c, uint64_t number, size_t bytes, const std::vector<int>& parts) {
            const nb::gil_scoped_release release;
            return c.share(number, bytes, own(parts));
          },
          "Takes over the descriptors.")
      .def("send", send)
      .def("send_now", send_now, nb::arg().none(), nb::arg(), nb::arg())
      .def("recv_now", recv_now, nb::arg().none(), nb::arg(), nb::arg())
      .def("recv",
           [](Comm& c, Address data, size_t n, int dtype, int from, int tag) {
             PythonCaller caller;
             return c.recv(buffer(data, n, dtype), from, tag, caller);
           })
      .def("start_recv",
           [](Comm& c, Address data, size_t n, int dtype, int from, int tag) {
             PythonCaller caller;
             return c.start_recv(buffer(data, n, dtype), from, tag, caller);
           })
      .def("wait",
           [](Comm& c, const std::shared_ptr<Request>& r, double timeout_s) {
             PythonCaller caller;
             c.wait(r, caller, timeout_s < 0 ? -1 : static_cast<int64_t>(timeout_s * 1e9));
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
             return std::tuple(s.calls, s.bytes, s.seconds, s.shared);
           })
      .def("close", [](Comm& c) {
        nb::gil_scoped_release release;
        c.close();
      });

  nb::class_<Now>(m, "Now", "A blocking collective with arguments as the user gave them.")
      .def(nb::init<std::shared_ptr<Comm>, nb::object>(), nb::arg("comm"), nb::arg("explain"))
      .def("__call__", &Now::operator(), nb::arg("verb"), nb::arg("tensor").none(),
           nb::arg("pieces").none() = nb::none(), nb::arg("op").none() = nb::none(), nb::arg("root").none() = -1);

  bind_calls(m);
  bind_outbox(m);
  bind_watch(m);
}
