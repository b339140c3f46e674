// Where in the program asynchronous calls stand, as text.
//
// Every one of them is asked for it, as an error may come when its frames are gone. To make the text takes as long as a
// small call: the number of a line is counted from the beginning of its function. So texts are kept by the instruction.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <string>
#include <vector>

namespace allranks {

class Sites {
 public:
  // text_of(frame): the line that a frame is at, "" if that is not the program's. nowhere: the text where the thread
  // runs none of it. passed: code of functions that only a wrapper of their own calls.
  Sites(nanobind::object text_of, std::string nowhere, const nanobind::list& passed);
  Sites(const Sites&) = delete;

  // Of the innermost frame of the program, so many frames behind the one that runs or more.
  std::string behind(int depth) const;

 private:
  struct Text {
    nanobind::object code;  // kept, so that no other gets its address
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
