// The algorithms of a group on one host. Each has a file in this folder and a row in this table.
//
// A call runs the first row of its verb whose condition is true. A condition may depend only on the operation and on
// values that all ranks of the group share. Otherwise ranks would select different algorithms. The table is a
// compile-time constant: the selection costs a few comparisons and a direct call.
#pragma once

#include <array>
#include <utility>

#include "base/error.h"
#include "collective/local_comm.h"
#include "collective/operation.h"

// ROW(verb, function, condition). The condition is `always` or a function of the algorithm's file.
#define ALLRANKS_ALGORITHMS(ROW)              \
  ROW(all_reduce, all_reduce, always)         \
  ROW(broadcast, broadcast, always)           \
  ROW(barrier, barrier, always)               \
  ROW(reduce, reduce, always)                 \
  ROW(all_gather, all_gather, always)         \
  ROW(gather, gather, always)                 \
  ROW(scatter, scatter, always)               \
  ROW(reduce_scatter, reduce_scatter, always) \
  ROW(all_to_all, all_to_all, always)

namespace allranks::algorithms {

struct Algorithm {
  Verb verb;
  void (*run)(LocalComm& comm, LocalComm::Call& call, const Operation& operation);
  bool (*applies)(const LocalComm& comm, const Operation& operation);
};

inline bool always(const LocalComm&, const Operation&) { return true; }

#define ALLRANKS_DECLARE(verb, function, condition)                                  \
  void function(LocalComm& comm, LocalComm::Call& call, const Operation& operation); \
  bool condition(const LocalComm& comm, const Operation& operation);
ALLRANKS_ALGORITHMS(ALLRANKS_DECLARE)
#undef ALLRANKS_DECLARE

#define ALLRANKS_ROW(verb, function, condition) Algorithm{Verb::verb, function, condition},
inline constexpr std::array kAlgorithms{ALLRANKS_ALGORITHMS(ALLRANKS_ROW)};
#undef ALLRANKS_ROW

// Run the first algorithm of a table that applies to an operation. Throws Error if none does.
template <const auto& table>
void run_first(LocalComm& comm, LocalComm::Call& call, const Operation& operation) {
  const auto runs = [&]<size_t row>() {
    constexpr Algorithm each = table[row];
    if (operation.fingerprint.verb != each.verb || !each.applies(comm, operation)) return false;
    each.run(comm, call, operation);
    return true;
  };
  const auto any_runs = [&]<size_t... rows>(std::index_sequence<rows...>) {
    return (runs.template operator()<rows>() || ...);
  };
  if (!any_runs(std::make_index_sequence<table.size()>())) throw Error("not a collective");
}

}  // namespace allranks::algorithms
