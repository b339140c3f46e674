// A collective as it is asked for.
#pragma once

#include <string>
#include <vector>

#include "base/types.h"

namespace allranks {

struct Operation {
  Fingerprint fingerprint;
  Buffer buffer;  // the operand; of reduce_scatter and scatter: the result
  // Pieces by rank, of verbs that have them: what goes to each, what comes from each.
  std::vector<std::byte*> ins = {};
  std::vector<std::byte*> outs = {};
  // all_to_all: their sizes in bytes, which may all differ.
  std::vector<size_t> in_bytes = {};
  std::vector<size_t> out_bytes = {};
  std::string site = {};  // where in the program an asynchronous call stands; of a blocking one the caller has it
};

}  // namespace allranks
