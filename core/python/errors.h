// Errors of the core as Python gets them: an exception with facts. The text for users is written in Python
// (allranks/_base/errors.py), which knows hosts and names.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "base/error.h"
#include "base/forks.h"

namespace allranks {

// A call as Python describes it: verb, dtype, op, root, count.
using CallFacts = std::tuple<std::string, std::string, std::string, int, uint64_t>;

CallFacts describe(const Fingerprint& f);
nanobind::tuple facts(const Error& error);

const Error& forked_error();

// Sets Python's exception for an error of the core, unless a signal handler has set one.
void set_exception(const Error& error);
void set_exception(const sys::Forked& forked);

}  // namespace allranks
