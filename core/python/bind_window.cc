// Shared memory of one-sided windows, and their signals.
#include <nanobind/nanobind.h>

#include "base/signal_counter.h"
#include "python/binding.h"
#include "python/operations.h"

namespace allranks {

namespace nb = nanobind;

namespace {

SignalCounter& counter_at(Address address) { return *reinterpret_cast<SignalCounter*>(address); }

}  // namespace

void bind_window(nb::module_& m) {
  nb::class_<sys::Mapping>(m, "Mapping", "A mapping of memory that processes share.", nb::is_weak_referenceable())
      .def(
          "__init__",
          [](sys::Mapping* made, int fd, size_t bytes) {
            sys::Fd memory(fd);
            try {
              new (made) sys::Mapping(memory, bytes, true);
            } catch (...) {
              memory.release();  // it belongs to the caller
              throw;
            }
            memory.release();
          },
          nb::arg("fd"), nb::arg("bytes"), "Map the memory of a descriptor, which the caller may close then.")
      .def_prop_ro("address", [](const sys::Mapping& mapping) { return reinterpret_cast<Address>(mapping.data()); });
  m.attr("SIGNAL_BYTES") = sizeof(SignalCounter);
  m.def("add_signal", [](Address counter) { counter_at(counter).add(); }, nb::arg("counter"));
  m.def(
      "wait_signal",
      [](Address counter, uint32_t seen, double timeout_s) {
        const nb::gil_scoped_release release;
        return counter_at(counter).wait_beyond(seen, static_cast<int64_t>(timeout_s * 1e9));
      },
      nb::arg("counter"), nb::arg("seen"), nb::arg("timeout_s"),
      "Wait until the count differs from `seen`. Return False after the timeout or a signal of the system.");
  m.def(
      "count_of_signals", [](Address counter) { return counter_at(counter).count.load(std::memory_order_acquire); },
      nb::arg("counter"));
}

}  // namespace allranks
