// Errors of the core as Python receives them: an exception that contains facts. Python writes the text for users
// (allranks/_base/errors.py), because it knows hosts and names.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "base/error.h"
#include "base/forks.h"

namespace allranks {

// The description of a call in Python: verb, dtype, op, root, count.
using CallFacts = std::tuple<std::string, std::string, std::string, int, uint64_t>;

CallFacts describe(const Fingerprint& f);
nanobind::tuple facts(const Error& error);

const Error& forked_error();

// Set the Python exception for an error of the core, unless a signal handler has already set one.
void set_exception(const Error& error);
void set_exception(const sys::Forked& forked);

}  // namespace allranks
