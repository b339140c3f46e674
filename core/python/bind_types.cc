// The bindings that belong to no group: constants, names, sizes, memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/sys.h"
#include "channel/heartbeat.h"
#include "channel/shm.h"
#include "collective/reduce.h"
#include "python/binding.h"
#include "python/names.h"
#include "python/operations.h"
#include "python/state.h"

namespace nb = nanobind;

namespace allranks {

namespace {

void bind_names(nb::module_& m) {
  nb::dict dtypes;
  for (size_t i = 0; i < kDTypeNames.size(); i++) dtypes[kDTypeNames[i]] = i;
  m.attr("DTYPES") = dtypes;
  nb::dict ops;
  for (size_t i = 0; i < kReduceOpNames.size(); i++) ops[kReduceOpNames[i]] = i;
  m.attr("REDUCE_OPS") = ops;
  m.attr("ISA") = kernel_isa();
  nb::list purposes;
  for (size_t i = 1; i < kPurposes.size(); i++) purposes.append(kPurposes[i]);
  m.attr("PURPOSES") = nb::frozenset(purposes);
}

void bind_memory(nb::module_& m) {
  nb::class_<Sizes>(m, "Sizes", "Sizes of the parts of a segment, in bytes. They must be equal on all ranks.")
      .def(nb::init<>())
      .def_rw("piece", &Sizes::piece)
      .def_rw("ring", &Sizes::ring)
      .def_rw("small_ring", &Sizes::small_ring)
      .def_rw("pipe", &Sizes::pipe)
      .def_rw("ranks", &Sizes::ranks, "Number of ranks of the group, if it spans hosts; else 0.");

  nb::class_<Tuning>(m, "Tuning", "Sizes and rank counts that select the algorithm of a call within a host.")
      .def(nb::init<>())
      .def_rw("levels_from", &Tuning::levels_from)
      .def_rw("crowded_levels_from", &Tuning::crowded_levels_from)
      .def_rw("group", &Tuning::group)
      .def_rw("one_shot", &Tuning::one_shot)
      .def_rw("one_shot_of_all", &Tuning::one_shot_of_all);

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
      "Return the ranks of other hosts to which a rank is connected when the group is created.");

  m.def(
      "create_segment",
      [](int rank, int size, const Sizes& sizes) { return Shm::create_segment(rank, size, sizes).release(); },
      nb::arg("rank"), nb::arg("size"), nb::arg("sizes"),
      "Create a segment and return its descriptor. The caller closes it.");
  m.def(
      "create_segments", [](int size, const Sizes& sizes) { return Shm::create_segments(size, sizes).release(); },
      nb::arg("size"), nb::arg("sizes"),
      "Create one memory with the segments of all ranks of a host and return its descriptor. The caller closes it.");

  m.def(
      "create_memory",
      [](size_t bytes) {
        const nb::gil_scoped_release release;
        sys::Fd memory = sys::sealed_memory("allranks", bytes);
        sys::allocate(memory, bytes);
        return memory.release();
      },
      nb::arg("bytes"), "Create memory that other processes can map and return its descriptor. The caller closes it.");
}

}  // namespace

void bind_types(nb::module_& m) {
  bind_names(m);
  m.def(
      "shape_hash",
      [](const std::vector<int64_t>& shape, bool every) { return shape_hash(shape.data(), shape.size(), every); },
      nb::arg("shape"), nb::arg("every"),
      "Return a hash of the part of a shape that ranks compare. every: hash ordinary shapes too (debug mode).");

  m.def(
      "reduces",
      [](int dtype, int op) { return kernel_for(static_cast<DType>(dtype), static_cast<ReduceOp>(op)) != nullptr; },
      nb::arg("dtype"), nb::arg("op"), "Return whether all_reduce has a kernel for this dtype and op.");

  m.def(
      "part_of",
      [](const std::string& name) {
        const auto found = std::find(kPurposes.begin(), kPurposes.end(), name);
        if (found == kPurposes.end()) throw nb::value_error("part_of: Purpose has no number for this call");
        const char* before = kPurposes.at(static_cast<size_t>(purpose));
        purpose = static_cast<Purpose>(found - kPurposes.begin());
        return before;
      },
      nb::arg("name"), "Set the user's call that the collectives of this thread belong to. Return the previous one.");
  m.def(
      "divide",
      [](Address address, size_t count, int dtype, int parts) {
        const void* sums[] = {bytes(address)};
        kernel_for(static_cast<DType>(dtype), ReduceOp::avg)(bytes(address), sums, 1, count, parts);
      },
      nb::arg("address"), nb::arg("count"), nb::arg("dtype"), nb::arg("parts"),
      nb::call_guard<nb::gil_scoped_release>(), "Divide sums in place into the averages that all_reduce would return.");
  bind_memory(m);
}

}  // namespace allranks
