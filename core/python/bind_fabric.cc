// The library of a fabric: its devices, and a test of one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "base/sys.h"
#include "channel/fabric.h"
#include "python/binding.h"

namespace nb = nanobind;

namespace allranks {

namespace {

// Move bytes from one link to the other. Return whether all have arrived before the deadline.
bool carry(FabricLink& from, FabricLink& to, const std::vector<std::byte>& data, int64_t deadline_ns) {
  std::vector<std::byte> received(data.size());
  size_t put = 0;
  size_t got = 0;
  while (got < data.size()) {
    if (sys::now_ns() > deadline_ns) throw Error("no data for some seconds");
    for (FabricLink* link : {&from, &to}) {
      if (std::string error = link->error(); !error.empty()) throw Error(error);
    }
    const iovec part{const_cast<std::byte*>(data.data()) + put, data.size() - put};
    if (put < data.size()) put += from.put(&part, 1);
    got += to.get(received.data() + got, data.size() - got);
    from.get(nullptr, 0);  // credits
  }
  return received == data;
}

// Return the seconds that one message needs in each direction, in `rounds` rounds between two endpoints of this
// process.
double ping(const FabricChoice& choice, size_t nbytes, int rounds, double timeout_s) {
  std::array<int, 2> fds{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()) != 0) throw Error("socketpair failed");
  const std::array<sys::Fd, 2> sockets{sys::Fd(fds[0]), sys::Fd(fds[1])};
  Fabric one(choice);
  Fabric other(choice);
  FabricLink& here = one.connect(sockets[0].get());
  FabricLink& there = other.connect(sockets[1].get());
  std::vector<std::byte> data(nbytes);
  for (size_t i = 0; i < nbytes; i++) data[i] = static_cast<std::byte>(i * 7 + i / 251);
  const int64_t deadline = sys::now_ns() + static_cast<int64_t>(timeout_s * 1e9);
  int64_t began = 0;
  for (int i = 0; i <= rounds; i++) {
    if (i == 1) began = sys::now_ns();  // the first round connects
    if (!carry(here, there, data, deadline) || !carry(there, here, data, deadline)) throw Error("wrong data arrived");
  }
  return static_cast<double>(sys::now_ns() - began) / 1e9 / rounds / 2;
}

}  // namespace

void bind_fabric(nb::module_& m) {
  nb::class_<FabricChoice>(m, "FabricChoice", "The network between the hosts of a group (core/channel/fabric.h).")
      .def(nb::init<>())
      .def(
          "__init__",
          [](FabricChoice* made, std::vector<std::string> libraries, std::string provider,
             std::vector<std::string> sources, int place) {
            new (made) FabricChoice{.libraries = std::move(libraries),
                                    .provider = std::move(provider),
                                    .sources = std::move(sources),
                                    .place = place};
          },
          nb::arg("libraries"), nb::arg("provider"), nb::arg("sources") = std::vector<std::string>(),
          nb::arg("place") = 0,
          "Args:\n"
          "    libraries: The libraries to try, in this order.\n"
          "    provider: The provider of libfabric. Empty: TCP without libfabric.\n"
          "    sources: The IP addresses of this host that other hosts reach.\n"
          "    place: The number of the rank on its host, which selects one of several devices.");
  m.def("fabric_version", &fabric_version, nb::arg("choice"), "Return the version of libfabric that is loaded.");
  m.def(
      "fabric_devices",
      [](const FabricChoice& choice) {
        std::vector<std::tuple<std::string, std::string, std::string>> all;
        for (const FabricDevice& each : fabric_devices(choice)) {
          all.emplace_back(each.provider, each.domain, each.fabric);
        }
        return all;
      },
      nb::arg("choice"), nb::call_guard<nb::gil_scoped_release>(),
      "Return the provider, the domain and the fabric of each usable device.");
  m.def("fabric_ping", &ping, nb::arg("choice"), nb::arg("nbytes"), nb::arg("rounds"), nb::arg("timeout_s"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Return the seconds that a message takes between two endpoints of this process.");
}

}  // namespace allranks
