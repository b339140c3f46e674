// Description of one collective call: the operation and its operands.
#pragma once

#include <string>
#include <vector>

#include "base/types.h"

namespace allranks {

struct Operation {
  Fingerprint fingerprint;
  Buffer buffer;  // the operand; for reduce_scatter and scatter: the result
  // Inputs and outputs per rank, for verbs that have them: data sent to each rank, data received from each rank.
  std::vector<std::byte*> ins = {};
  std::vector<std::byte*> outs = {};
  // all_to_all: the sizes of `ins` and `outs` in bytes. All sizes may differ.
  std::vector<size_t> in_bytes = {};
  std::vector<size_t> out_bytes = {};
  std::string site = {};  // call site of an asynchronous call; the Caller of a blocking call provides it
};

}  // namespace allranks
