// The binding of a group: Comm and its requests. Python passes addresses of memory. Errors leave as facts (errors.h).
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "group/comm.h"
#include "python/binding.h"
#include "python/caller.h"
#include "python/errors.h"
#include "python/now.h"
#include "python/operations.h"
#include "python/state.h"

NB_MAKE_OPAQUE(allranks::Liveness)

namespace nb = nanobind;

namespace allranks {

namespace {

using MaybeRequest = std::shared_ptr<Request>;  // None if the call has blocked
using Started = std::optional<std::string>;     // the call site of an asynchronous call; nullopt: the call blocks

std::vector<sys::Fd> own(const std::vector<int>& fds) { return {fds.begin(), fds.end()}; }

// Return a function that requests a connection from Python (native/tcp.py). A thread there reads the requests from a
// pipe, because connecting needs addresses and secrets that the core does not have.
Net::Opener asking(int pipe, uint32_t number) {
  auto own = std::make_shared<sys::Fd>(fcntl(pipe, F_DUPFD_CLOEXEC, 0));
  if (own->get() < 0) throw Error(std::string("dup of a pipe: ") + std::strerror(errno));
  return [own, number](int rank, Connection kind) {
    const std::array<uint32_t, 3> wanted{number, static_cast<uint32_t>(rank), static_cast<uint32_t>(kind)};
    // 12 bytes are less than PIPE_BUF: the write is atomic, so requests of several threads do not mix.
    if (write(own->get(), wanted.data(), sizeof wanted) != sizeof wanted) {
      throw Error(std::string("cannot request a connection: ") + std::strerror(errno));
    }
  };
}

std::vector<std::byte*> pieces(const std::vector<Address>& addresses) {
  std::vector<std::byte*> all;
  for (const Address a : addresses) all.push_back(bytes(a));
  return all;
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

// The element counts may differ between ranks. So they are not part of the fingerprint, which must be equal.
MaybeRequest all_to_all(Comm& comm, int dtype, Mark mark, const std::vector<Address>& ins,
                        const std::vector<size_t>& in_bytes, const std::vector<Address>& outs,
                        const std::vector<size_t>& out_bytes, const Started& started) {
  Operation op = operation(Verb::all_to_all, buffer(0, 0, dtype), mark);
  op.ins = pieces(ins);
  op.outs = pieces(outs);
  op.in_bytes = in_bytes;
  op.out_bytes = out_bytes;
  for (const size_t given : {ins.size(), in_bytes.size(), outs.size(), out_bytes.size()}) {
    if (given != static_cast<size_t>(comm.size())) throw Error("all_to_all: expected one chunk per rank");
  }
  return call(comm, std::move(op), started);
}

MaybeRequest barrier(Comm& comm, Mark mark, const Started& started) {
  return call(comm, operation(Verb::barrier, {}, mark), started);
}

MaybeRequest send(Comm& comm, Address data, size_t n, int dtype, int to, int tag, bool async_op) {
  PythonCaller caller;
  if (async_op) return comm.start_send(buffer(data, n, dtype), to, tag, caller);
  comm.send(buffer(data, n, dtype), to, tag, caller);
  return nullptr;
}

// Lists of CPUs that are near each other. An empty topology selects the kernel's.
using Topology = std::vector<std::vector<int>>;

Place place_in(const Topology& topology) {
  return topology.empty() ? this_place() : place_among(this_place(), topology);
}

using Us = std::pair<double, double>;

Polling in_ns(Us us) { return {static_cast<int64_t>(us.first * 1e3), static_cast<int64_t>(us.second * 1e3)}; }

void bind_making(nb::class_<Comm>& comm) {
  comm.def(nb::new_([](int rank, const Sizes& sizes, const std::vector<int>& segments, const Liveness& liveness,
                       double timeout_s, Us polling, Us progress_polling, size_t eager, const Tuning& tuning,
                       const Topology& topology) {
             auto shm = std::make_unique<Shm>(
                 rank, sizes, Shm::map(static_cast<int>(liveness.size()), sizes, own(segments)), liveness);
             return sys::make_owned<Comm>(std::move(shm), Settings{.tuning = tuning,
                                                                   .place = place_in(topology),
                                                                   .timeout_s = timeout_s,
                                                                   .polling = in_ns(polling),
                                                                   .progress_polling = in_ns(progress_polling),
                                                                   .eager = eager});
           }),
           nb::arg("rank"), nb::arg("sizes"), nb::arg("segments"), nb::arg("liveness"), nb::arg("timeout_s"),
           nb::arg("polling_us"), nb::arg("progress_polling_us"), nb::arg("eager"), nb::arg("tuning"),
           nb::arg("topology") = Topology(),
           "Create this rank of a group whose ranks share this host.\n\n"
           "Takes ownership of the descriptors in `segments`.\n\n"
           "Args:\n"
           "    rank: This rank.\n"
           "    sizes: The sizes of a segment, equal on all ranks.\n"
           "    segments: One memory per rank, or one memory with all segments.\n"
           "    liveness: The sockets to the processes of the other ranks.\n"
           "    timeout_s: The timeout of the group.\n"
           "    polling_us: How long a caller spins, and then yields, before it sleeps.\n"
           "    progress_polling_us: The same for the progress threads.\n"
           "    eager: Bytes of messages that a rank may send to another rank without a recv.\n"
           "    tuning: The sizes and rank counts that select an algorithm.\n"
           "    topology: Lists of CPUs that are near each other. Empty: the kernel's topology.")
      .def_static(
          "across_hosts",
          [](int rank, const std::vector<int>& host_of, const Sizes& sizes, const std::vector<int>& segments,
             const Liveness& liveness, const std::vector<int>& heartbeats, int asking_pipe, uint32_t number,
             double timeout_s, Us polling, Us progress_polling, size_t eager, const Tuning& tuning,
             const Topology& topology, const FabricChoice& fabric) {
            // Take ownership of all descriptors before any statement can throw. Otherwise an exception would leak them.
            auto memories = own(segments);
            auto signs = own(heartbeats);
            const Hosts hosts(host_of);
            auto shm = std::make_unique<Shm>(hosts.place(rank), sizes,
                                             Shm::map(static_cast<int>(liveness.size()), sizes, memories), liveness,
                                             hosts.on(hosts.of(rank)));
            return sys::make_owned<Comm>(std::move(shm), rank, hosts, std::move(signs), asking(asking_pipe, number),
                                         Settings{.tuning = tuning,
                                                  .place = place_in(topology),
                                                  .timeout_s = timeout_s,
                                                  .polling = in_ns(polling),
                                                  .progress_polling = in_ns(progress_polling),
                                                  .eager = eager,
                                                  .fabric = fabric});
          },
          nb::arg("rank"), nb::arg("host_of"), nb::arg("sizes"), nb::arg("segments"), nb::arg("liveness"),
          nb::arg("heartbeats"), nb::arg("asking_pipe"), nb::arg("number"), nb::arg("timeout_s"), nb::arg("polling_us"),
          nb::arg("progress_polling_us"), nb::arg("eager"), nb::arg("tuning"), nb::arg("topology") = Topology(),
          nb::arg("fabric") = FabricChoice(),
          "Create this rank of a group that spans hosts.\n\n"
          "Takes ownership of the descriptors in `segments` and `heartbeats`. The other arguments are those of the\n"
          "constructor; segments and liveness are those of the ranks of this host.\n\n"
          "Args:\n"
          "    host_of: The host of each rank. Ranks of one host have the same number.\n"
          "    heartbeats: On the first rank of a host, the connections to the ranks that `neighbours` returns, by\n"
          "        rank, and -1 for all other ranks. Empty on all other ranks.\n"
          "    asking_pipe: The pipe for requests of connections. A request has the number, the rank and the kind.\n"
          "    number: The number of this group in these requests.\n"
          "    fabric: The network between the hosts. Without a provider, it is TCP.");
}

void bind_connections(nb::class_<Comm>& comm) {
  comm.def(
          "adopt",
          [](Comm& c, int rank, int kind, int fd, const std::string& greeting) {
            c.adopt(rank, static_cast<Connection>(kind), sys::Fd(fd), greeting);
          },
          nb::arg("rank"), nb::arg("kind"), nb::arg("fd"), nb::arg("greeting"),
          "Take ownership of a connection to a rank of another host, and send the greeting on it.")
      .def(
          "liveness",
          [](Comm& c, const std::vector<int>& ranks) -> std::optional<Liveness> {
            Liveness sockets = c.liveness(ranks);
            return sockets.empty() ? std::nullopt : std::optional(std::move(sockets));
          },
          nb::arg("ranks"), nb::call_guard<nb::gil_scoped_release>(),
          "Return the liveness sockets of these ranks, or None if a rank is on another host or the group is closed.")
      .def("give_up", &Comm::give_up, nb::arg("rank"),
           "Mark the group as failed, because a rank of another host cannot be reached.")
      .def("fabric_error", &Comm::fabric_error, nb::arg("rank"),
           "Return the error of the fabric in the connections with a rank, after its provider, or an empty text.");
}

void bind_collectives(nb::class_<Comm>& comm) {
  comm.def("all_reduce", all_reduce)
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
          "Create a block from one memory per rank. Takes ownership of the descriptors.");
}

void bind_messages(nb::class_<Comm>& comm) {
  comm.def("send", send)
      .def("send_now", send_now, nb::arg().none(), nb::arg(), nb::arg())
      .def("recv_now", recv_now, nb::arg().none(), nb::arg(), nb::arg())
      .def("recv",
           [](Comm& c, Address data, size_t n, int dtype, int from, int tag) {
             PythonCaller caller;
             return c.recv(buffer(data, n, dtype), from, tag, caller);
           })
      .def("start_recv", [](Comm& c, Address data, size_t n, int dtype, int from, int tag) {
        PythonCaller caller;
        return c.start_recv(buffer(data, n, dtype), from, tag, caller);
      });
}

void bind_rest(nb::class_<Comm>& comm) {
  comm.def("wait",
           [](Comm& c, const std::shared_ptr<Request>& r, double timeout_s) {
             PythonCaller caller;
             c.wait(r, caller, timeout_s < 0 ? -1 : static_cast<int64_t>(timeout_s * 1e9));
           })
      .def("last_calls",
           [](Comm& c) {
             std::vector<std::pair<uint32_t, CallFacts>> calls;
             for (const auto& [number, fingerprint] : c.last_calls()) calls.emplace_back(number, describe(fingerprint));
             return calls;
           })
      .def("record_in", &Comm::record_in, nb::arg("recorder"), nb::arg("group"),
           "Record the calls of this group in `recorder`. Must be called before the first call.")
      .def("stats",
           [](const Comm& c) {
             const Stats s = c.stats();
             return std::tuple(s.calls, s.bytes, s.seconds, s.shared);
           })
      .def("set_timeout", &Comm::set_timeout, nb::arg("timeout_s"), "Change the timeout of calls that begin later.")
      .def("abort", &Comm::abort, nb::call_guard<nb::gil_scoped_release>(),
           "End all calls of the group on every rank, pending and later ones, with an error.")
      .def(
          "near", [](Comm& c) { return c.local_comm().groups(); },
          "Return the groups in which the ranks of this host synchronize after the first call. Empty: there are no "
          "groups. Must not be called during a call.")
      .def("lost", &Comm::lost, nb::call_guard<nb::gil_scoped_release>(),
           "Return the ranks that this rank knows to be dead, unreachable, or no longer in the group.")
      .def("close", [](Comm& c) {
        nb::gil_scoped_release release;
        c.close();
      });
}

void bind_completions(nb::module_& m) {
  state.completions = new Completions;
  m.def(
      "take_completions",
      [](double timeout_s) {
        Completions& completions = *state.completions;
        const nb::gil_scoped_release release;
        return completions.take(timeout_s < 0 ? -1 : static_cast<int64_t>(timeout_s * 1e9));
      },
      nb::arg("timeout_s"), "Wait for watched requests to finish and return their tickets. timeout_s < 0: no limit.");
  m.def(
      "add_completion", [](uint64_t ticket) { state.completions->add(ticket); }, nb::arg("ticket"),
      "Add a ticket that take_completions returns.");
  // The child does not delete the parent's object: a thread of the parent may have held its lock during the fork.
  m.def(
      "renew_completions", [] { state.completions = new Completions; },
      "Drop the tickets and requests of the parent process. For a forked child.");
}

void bind_parts(nb::module_& m) {
  nb::class_<SharedBlock>(m, "SharedBlock", "Memory with one part per rank. All ranks map all parts.")
      .def_prop_ro("address", [](const SharedBlock& b) { return reinterpret_cast<Address>(b.mine()); });

  nb::class_<Request>(m, "Request")
      // Acquire: if the request is done, this thread also sees the results that another thread has written.
      .def("done", [](const Request& r) { return r.done.load(std::memory_order_acquire); })
      .def(
          "watch", [](Request& r, uint64_t ticket) { r.watch(ticket, *state.completions); }, nb::arg("ticket"),
          "Let take_completions return the ticket when the request is done.")
      .def(
          "source",
          [](const Request& r) {
            const auto* message = dynamic_cast<const Message*>(&r);
            return message != nullptr ? message->peer.load() : -1;
          },
          "Return the rank of the sender of a recv that is done, and -1 for a collective.");

  nb::class_<Liveness>(
      m, "Liveness",
      "Sockets that are closed when the processes of a host's ranks exit. Several groups may share them.")
      .def(nb::new_([](const std::vector<int>& fds) {
             Liveness sockets;
             for (sys::Fd& fd : own(fds)) sockets.push_back(std::make_shared<const sys::Fd>(std::move(fd)));
             return sockets;
           }),
           nb::arg("fds"), "Take ownership of one descriptor per rank; -1 for this rank.");
}

}  // namespace

void bind_comm(nb::module_& m) {
  m.def(
      "set_where",
      [](const nb::object& function) {
        PyObject* before = std::exchange(state.where, nb::object(function).release().ptr());
        Py_XDECREF(before);
      },
      nb::arg("function"), "Set the function that returns the call site of the current call, for errors and records.");

  bind_completions(m);
  bind_parts(m);
  nb::class_<Comm> comm(m, "Comm");
  bind_making(comm);
  bind_connections(comm);
  bind_collectives(comm);
  bind_messages(comm);
  bind_rest(comm);
}

}  // namespace allranks
