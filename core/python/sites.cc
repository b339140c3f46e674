#include "python/sites.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "python/binding.h"

namespace nb = nanobind;

namespace allranks {

namespace {

constexpr int kWrapped = 2;  // frames from a function to the caller of its wrapper

nb::object attribute(nb::handle object, const nb::object& name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) nb::raise_python_error();
  return nb::steal(value);
}

}  // namespace

Sites::Sites(nb::object text_of, std::string nowhere, const nb::list& passed)
    : text_of_(std::move(text_of)),
      nowhere_(std::move(nowhere)),
      get_frame_(nb::module_::import_("sys").attr("_getframe")),
      back_name_(nb::steal(PyUnicode_InternFromString("f_back"))),
      code_name_(nb::steal(PyUnicode_InternFromString("f_code"))),
      instruction_name_(nb::steal(PyUnicode_InternFromString("f_lasti"))) {
  for (const nb::handle code : passed) passed_.push_back(nb::borrow(code));
}

std::string Sites::behind(int depth) const {
  // Python creates an object for each frame that is read, which takes as long as other parts of the call. So frames of
  // known wrappers are skipped without reading them.
  nb::object frame = frame_at(depth);
  if (!frame.is_none() && is_passed(frame)) frame = frame_at(depth + kWrapped);
  for (; !frame.is_none(); frame = attribute(frame, back_name_)) {
    const std::string& found = text(frame);
    if (!found.empty()) return found;
  }
  return nowhere_;
}

nb::object Sites::frame_at(int depth) const {
  PyObject* const found = PyObject_CallFunctionObjArgs(get_frame_.ptr(), nb::int_(depth).ptr(), nullptr);
  if (found != nullptr) return nb::steal(found);
  if (PyErr_ExceptionMatches(PyExc_ValueError) == 0) nb::raise_python_error();
  PyErr_Clear();  // the thread has fewer frames
  return nb::none();
}

bool Sites::is_passed(nb::handle frame) const {
  if (passed_.empty()) return false;
  const nb::object code = attribute(frame, code_name_);
  return std::any_of(passed_.begin(), passed_.end(), [&](const nb::object& each) { return each.is(code); });
}

const std::string& Sites::text(nb::handle frame) const {
  const nb::object code = attribute(frame, code_name_);
  const long instruction = PyLong_AsLong(attribute(frame, instruction_name_).ptr());
  if (instruction == -1 && PyErr_Occurred() != nullptr) PyErr_Clear();  // -1 without an error: the frame has not begun
  // A cache with one entry per index. Addresses of objects are multiples of 16, so the hash omits the low four bits.
  const auto mixed = (reinterpret_cast<uintptr_t>(code.ptr()) >> 4) * 31 + static_cast<uintptr_t>(instruction);
  Text& kept = texts_.at(mixed % kTexts);
  if (!code.is(kept.code) || kept.instruction != instruction) {
    std::string made = nb::cast<std::string>(text_of_(frame));
    kept = {code, instruction, std::move(made)};
  }
  return kept.text;
}

void bind_sites(nb::module_& m) {
  nb::class_<Sites>(m, "Sites", "Finds the call sites of asynchronous calls, as text.")
      .def(nb::init<nb::object, std::string, const nb::list&>(), nb::arg("text_of"), nb::arg("nowhere"),
           nb::arg("passed"),
           "Args:\n"
           "    text_of: Returns the call site of a frame, or '' if the frame does not belong to the program.\n"
           "    nowhere: The result if no frame of the thread belongs to the program.\n"
           "    passed: Code objects of functions that only their wrapper calls. Their frames are skipped.")
      .def("behind", &Sites::behind, nb::arg("depth"),
           "Return the call site of the innermost frame of the program. `depth` frames are skipped before the search.");
}

}  // namespace allranks
