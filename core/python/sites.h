// Finds the call sites of asynchronous calls, as text.
//
// Every asynchronous call needs its call site when it starts: when it fails, its frames may no longer exist. Creating
// the text takes as long as a small call, because Python counts line numbers from the beginning of the function. So the
// texts are cached by code object and instruction (docs/decisions/126).
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <string>
#include <vector>

namespace allranks {

class Sites {
 public:
  // text_of(frame): returns a frame's call site, or "" if the frame is not the program's.
  // nowhere: the result if no frame of the thread is the program's.
  // passed: code objects of functions that are only called by their own wrapper. Their frames are skipped.
  Sites(nanobind::object text_of, std::string nowhere, const nanobind::list& passed);
  Sites(const Sites&) = delete;

  // Return the call site of the innermost frame of the program. The search begins `depth` frames outside the current
  // Python frame.
  std::string behind(int depth) const;

 private:
  struct Text {
    nanobind::object code;  // a reference, so that no other code object gets this address
    long instruction = 0;
    std::string text;
  };
  static constexpr size_t kTexts = 256;

  nanobind::object frame_at(int depth) const;
  bool is_passed(nanobind::handle frame) const;
  const std::string& text(nanobind::handle frame) const;

  nanobind::object text_of_;
  std::string nowhere_;
  std::vector<nanobind::object> passed_;
  nanobind::object get_frame_;
  nanobind::object back_name_;
  nanobind::object code_name_;
  nanobind::object instruction_name_;
  mutable std::array<Text, kTexts> texts_;
};

}  // namespace allranks
