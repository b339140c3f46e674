#include "python/errors.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "base/forks.h"
#include "python/binding.h"
#include "python/names.h"
#include "python/state.h"

namespace nb = nanobind;

namespace allranks {

CallFacts describe(const Fingerprint& f) {
  const bool whole = f.purpose == Purpose::none;
  return {whole ? kVerbs.at(static_cast<size_t>(f.verb)) : kPurposes.at(static_cast<size_t>(f.purpose)),
          kDTypeNames.at(static_cast<size_t>(f.dtype)), kReduceOpNames.at(static_cast<size_t>(f.op)), f.root, f.count};
}

nb::tuple facts(const Error& error) {
  const Failure& f = error.failure;
  std::vector<CallFacts> calls;
  for (const auto& fingerprint : error.calls) calls.push_back(describe(fingerprint));
  std::vector<std::tuple<int, int, std::string, std::string>> waits;
  for (const Wait& w : error.waits) waits.emplace_back(w.rank, w.peer, kVerbs.at(static_cast<size_t>(w.verb)), w.site);
  std::vector<std::tuple<int, int, CallFacts, size_t>> unasked;
  for (const Unasked& u : error.unasked) unasked.emplace_back(u.from, u.tag, describe(u.first), u.count);
  return nb::make_tuple(kKinds.at(static_cast<size_t>(f.kind)), f.peer, f.reporter, f.call, describe(f.fingerprint),
                        f.seconds, calls, error.waiting_for, error.sites, error.text, waits, unasked);
}

const Error& forked_error() {
  static const Error error(Failure{.kind = Kind::forked});
  return error;
}

// If `signalled` is true, KeyboardInterrupt or another exception of a signal handler is already set. It must not be
// replaced.
void set_exception(const Error& error) {
  if (!error.signalled) PyErr_SetObject(state.failure_type, facts(error).ptr());
}

void set_exception(const sys::Forked& forked) {
  if (!forked.signalled) PyErr_SetObject(state.failure_type, facts(forked_error()).ptr());
}

void bind_errors(nb::module_& m) {
  state.failure_type = PyErr_NewException("allranks._core.Failure", PyExc_Exception, nullptr);
  m.attr("Failure") = nb::borrow(state.failure_type);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& error) {
      set_exception(error);
    } catch (const sys::Forked& forked) {
      set_exception(forked);
    }
  });
}

}  // namespace allranks
