// The binding of the recorder of this process's calls. Comm records the calls of the native engine. For other engines,
// Python calls begin and end.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/binding.h"
#include "python/caller.h"
#include "python/state.h"
#include "trace/recorder.h"

namespace nb = nanobind;

namespace allranks {

namespace {

using trace::Memory;
using trace::Recorder;

// A call in progress of an engine other than the native engine.
struct OtherCall {
  std::shared_ptr<Recorder> recorder;
  Recorder::Call call;
  size_t group;
  Verb verb;
  uint64_t nbytes;
  int64_t entered_ns;

  void set_awaited(const std::string& site) const {
    if (call.record == nullptr || recorder->forked()) return;
    if (call.record->index.load(std::memory_order_relaxed) != call.index) return;  // a later call has the record now
    Recorder::set_awaited(*call.record);
    if (call.record->site == 0) recorder->set_site(call, recorder->site(site));
  }

  void clear_awaited() const {
    if (call.record == nullptr || recorder->forked()) return;
    if (call.record->index.load(std::memory_order_relaxed) != call.index) return;  // a later call has the record now
    Recorder::clear_awaited(*call.record);
  }

  void end(bool succeeded) {
    if (call.record == nullptr || recorder->forked()) return;
    const int64_t now = sys::now_ns();
    recorder->end(call, now, 0, -1, succeeded ? uint8_t{0} : trace::kFailed);
    call.record = nullptr;
    if (!succeeded) return;
    trace::Totals& totals = recorder->group(group).totals[static_cast<size_t>(verb)];
    // Relaxed: the counters are statistics. No reader depends on an order between them.
    totals.calls.fetch_add(1, std::memory_order_relaxed);
    totals.bytes.fetch_add(nbytes, std::memory_order_relaxed);
    totals.ns.fetch_add(static_cast<uint64_t>(now - entered_ns), std::memory_order_relaxed);
  }
};

// Return the recorder, or throw in a forked child: its calls are not calls of the rank and must not be recorded.
Recorder& live(Recorder& recorder) {
  if (recorder.forked()) throw nb::value_error("this recorder belongs to the parent process");
  return recorder;
}

OtherCall begin(const std::shared_ptr<Recorder>& recorder, size_t group, int verb, int dtype, int op, uint64_t count,
                int peer, uint32_t number, uint64_t nbytes, const std::string& site, bool async) {
  const Fingerprint fingerprint{.verb = static_cast<Verb>(verb),
                                .dtype = static_cast<DType>(dtype),
                                .op = static_cast<ReduceOp>(op),
                                .purpose = purpose,
                                .count = count};
  live(*recorder);
  if (verb < static_cast<int>(Verb::send)) recorder->group(group).number.store(number);
  const int64_t now = sys::now_ns();
  uint16_t line = recorder->site(site);
  if (line == 0) {  // Python passed no call site: look it up, as often as kSiteShare (recorder.h) permits
    PythonCaller caller;
    line = recorder->site_of(caller, now);
  }
  return {recorder,
          recorder->begin({.group = group,
                           .number = number,
                           .fingerprint = fingerprint,
                           .peer = peer,
                           .site = line,
                           .async = async,
                           .entered_ns = now}),
          group,
          fingerprint.verb,
          nbytes,
          now};
}

}  // namespace

void bind_trace(nb::module_& m) {
  m.def("trace_bytes", &Memory::bytes, nb::arg("records"), nb::arg("members"),
        "Return the size of the memory for this number of records, in bytes.");
  nb::class_<OtherCall>(m, "OtherCall", "A call in progress of an engine other than the native engine.")
      .def("set_awaited", &OtherCall::set_awaited, nb::arg("site"),
           "Mark the call as awaited by the program at this call site, for some time.")
      .def("clear_awaited", &OtherCall::clear_awaited, "Mark the call as no longer awaited: its wait has timed out.")
      .def("end", &OtherCall::end, nb::arg("succeeded"), "Record the end of the call. A second call does nothing.");
  nb::class_<Recorder>(m, "Recorder", "Records this process's calls in memory that others can read.")
      .def(nb::new_([](int fd, size_t records, int rank, int world_size, size_t members, const std::string& host) {
             const sys::Fd memory(fd);
             return sys::make_owned<Recorder>(
                 std::make_unique<Memory>(memory, records, trace::Identity{rank, world_size, members, host}, false));
           }),
           nb::arg("fd"), nb::arg("records"), nb::arg("rank"), nb::arg("world_size"), nb::arg("members"),
           nb::arg("host"),
           "Take ownership of the descriptor, which has trace_bytes(records, members) bytes. records: a power of two.")
      .def(
          "add_group",
          [](Recorder& r, const std::string& name, const std::string& engine, int rank, const std::vector<int>& ranks) {
            return live(r).add_group(name, engine, rank, ranks);
          },
          nb::arg("name"), nb::arg("engine"), nb::arg("rank"), nb::arg("ranks"),
          "Add a group and return its number, or 0 if the table is full. ranks: its members, as ranks of the world.")
      .def(
          "close_group", [](Recorder& r, size_t group) { live(r).close_group(group); }, nb::arg("group"))
      .def("begin", &begin, nb::arg("group"), nb::arg("verb"), nb::arg("dtype"), nb::arg("op"), nb::arg("count"),
           nb::arg("peer"), nb::arg("number"), nb::arg("nbytes"), nb::arg("site"), nb::arg("async_op"))
      .def(
          "record_to",
          [](Recorder& recorder, int fd, size_t records, int rank, int world_size, size_t members,
             const std::string& host) {
            const sys::Fd file(fd);
            live(recorder).record_to(
                std::make_unique<Memory>(file, records, trace::Identity{rank, world_size, members, host}, true));
          },
          nb::arg("fd"), nb::arg("records"), nb::arg("rank"), nb::arg("world_size"), nb::arg("members"),
          nb::arg("host"), "Also record all later calls in this file. Takes ownership of the descriptor.")
      .def(
          "doing", [](Recorder& recorder) { return reinterpret_cast<uintptr_t>(live(recorder).doing()); },
          "Return the address of the call site of the current operation: a uint32, 0 if there is none.\n\n"
          "The address is valid as long as the recorder exists.")
      .def(
          "site", [](Recorder& recorder, const std::string& text) { return live(recorder).site(text); },
          nb::arg("text"), "Return the number of a call site, or 0 if the table is full.")
      .def(
          "add_commands",
          [](Recorder& recorder, size_t group, uint16_t site, uint64_t count, int64_t entered_ns, int64_t returned_ns) {
            recorder.add_commands({group, site, count, entered_ns, returned_ns});
          },
          nb::arg("group"), nb::arg("site"), nb::arg("count"), nb::arg("entered_ns"), nb::arg("returned_ns"),
          "Record consecutive commands of a worker, only in the file.")
      .def(
          "count_commands",
          [](Recorder& recorder, size_t group, uint64_t count, uint64_t ns) {
            // Relaxed, as in OtherCall::end.
            trace::Totals& totals = recorder.group(group).totals[static_cast<size_t>(Verb::none)];
            totals.calls.fetch_add(count, std::memory_order_relaxed);
            totals.ns.fetch_add(ns, std::memory_order_relaxed);
          },
          nb::arg("group"), nb::arg("count"), nb::arg("ns"))
      .def("stop", [](Recorder& recorder) { live(recorder).record_to(nullptr); }, "Stop recording in a file.");
}

}  // namespace allranks
