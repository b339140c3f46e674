// What a captured step reads from Python, compared with what it was when the step was recorded.
//
// A Watch is a tree that allranks/remote/capture/watch.py describes: each node says what one value is expected to be,
// and how its parts are found from it. It is walked at every replay, so nothing here makes an object unless it has to,
// and its nodes lie in one array, in the order of the walk. It holds numbers, texts and weak references, and so keeps
// nothing of the program alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/binding.h"

namespace nb = nanobind;

namespace {

enum class Kind {
  kIs,     // the object, or a number or text like it
  kEqual,  // what compares equal to the object
  kWeak,   // what the weak reference means
  kType,   // of the class that the weak reference means
  kAll,    // all children hold
  kNamed,  // the child holds; reports give it that name
  kItems,  // a list or tuple: a child for each item
  kDict,   // a dict: a child for each entry, in order
  kKeys,   // a dict: a child for each of some keys
  kVars,   // the child holds for the __dict__
  kClass,  // the child holds for the class
  kAttr,   // the child holds for an attribute
  kCall,   // the child holds for what a function makes of the value
};

constexpr std::pair<std::string_view, Kind> kKinds[] = {
    {"is", Kind::kIs},     {"equal", Kind::kEqual}, {"weak", Kind::kWeak},   {"type", Kind::kType},
    {"all", Kind::kAll},   {"named", Kind::kNamed}, {"items", Kind::kItems}, {"dict", Kind::kDict},
    {"keys", Kind::kKeys}, {"vars", Kind::kVars},   {"class", Kind::kClass}, {"attr", Kind::kAttr},
    {"call", Kind::kCall},
};

struct Node {
  Kind kind = Kind::kIs;
  uint32_t children = 0;
  uint32_t size = 1;  // of this node and all below it, which follow it
  nb::object object;  // what is expected, or the attribute's name, the function, the name in reports
  nb::object key;     // under which a dict has it; None where that is not compared

  const Node* first() const { return this + 1; }
  const Node* next() const { return this + size; }
};

Kind kind_of(std::string_view wanted) {
  for (const auto& [name, kind] : kKinds) {
    if (name == wanted) return kind;
  }
  throw nb::value_error("no such kind of node");
}

// (kind, object, children) or, of a dict, (kind, object, children, keys).
void parse(nb::handle description, nb::object key, std::vector<Node>& nodes) {
  const auto parts = nb::cast<nb::tuple>(description);
  const nb::str name = nb::cast<nb::str>(parts[0]);
  const nb::object keys = nb::len(parts) > 3 ? nb::borrow(parts[3]) : nb::object();
  const size_t at = nodes.size();
  nodes.push_back({kind_of(name.c_str()), 0, 1, nb::borrow(parts[1]), std::move(key)});
  uint32_t children = 0;
  for (const nb::handle each : nb::cast<nb::sequence>(parts[2])) {
    parse(each, keys.is_valid() ? nb::object(keys[children]) : nb::object(), nodes);
    children++;
  }
  nodes[at].children = children;
  nodes[at].size = static_cast<uint32_t>(nodes.size() - at);
}

// Numbers and texts of one type that cannot be told apart: 0.0 and -0.0 can, and nan is like nan.
bool alike(PyObject* one, PyObject* other) {
  if (one == other) return true;
  if (Py_TYPE(one) != Py_TYPE(other)) return false;
  if (PyFloat_Check(one)) {
    const double pair[2] = {PyFloat_AsDouble(one), PyFloat_AsDouble(other)};
    return std::memcmp(&pair[0], &pair[1], sizeof pair[0]) == 0;
  }
  if (PyComplex_Check(one)) {
    const double pair[4] = {PyComplex_RealAsDouble(one), PyComplex_ImagAsDouble(one), PyComplex_RealAsDouble(other),
                            PyComplex_ImagAsDouble(other)};
    return std::memcmp(&pair[0], &pair[2], 2 * sizeof pair[0]) == 0;
  }
  if (!PyLong_Check(one) && !PyUnicode_Check(one) && !PyBytes_Check(one)) return false;
  return PyObject_RichCompareBool(one, other, Py_EQ) == 1;
}

bool equal(PyObject* one, PyObject* other) {
  const int found = PyObject_RichCompareBool(one, other, Py_EQ);
  if (found < 0) PyErr_Clear();  // what cannot be compared is another thing
  return found == 1;
}

struct Report {
  std::string path;
  nb::list changes;  // path, what was expected, what is found; ... where there is nothing
};

std::string text_of(nb::handle key) {
  if (!PyUnicode_Check(key.ptr()) && !PyLong_Check(key.ptr())) return "...";
  return nb::cast<std::string>(nb::repr(key));
}

bool holds(const Node& node, PyObject* found, Report* report);

// Of a part of a value; `place` adds to the path where in the value that is.
template <typename Place>
bool part_holds(const Node& node, PyObject* found, Report* report, Place place) {
  if (report == nullptr && node.children == 0) return holds(node, found, nullptr);
  const nb::object kept = nb::borrow(found);  // a function that is called may let go of it
  if (report == nullptr) return holds(node, found, nullptr);
  const size_t length = report->path.size();
  place(report->path);
  const bool result = holds(node, found, report);
  report->path.resize(length);
  return result;
}

bool differs(Report* report, PyObject* expected, PyObject* found) {
  if (report != nullptr) report->changes.append(nb::make_tuple(report->path, nb::borrow(expected), nb::borrow(found)));
  return false;
}

bool items_hold(const Node& node, PyObject* found, Report* report) {
  const bool is_list = PyList_Check(found) != 0;
  if (!is_list && PyTuple_Check(found) == 0) return differs(report, Py_Ellipsis, found);
  const auto count = static_cast<Py_ssize_t>(node.children);
  const auto size = [&] { return is_list ? PyList_Size(found) : PyTuple_Size(found); };
  if (size() != count) return differs(report, Py_Ellipsis, found);
  bool result = true;
  const Node* part = node.first();
  for (Py_ssize_t i = 0; i < count && i < size(); i++, part = part->next()) {
    PyObject* each = is_list ? PyList_GetItem(found, i) : PyTuple_GetItem(found, i);
    result &= part_holds(*part, each, report,
                         [&](std::string& path) { path.append("[").append(std::to_string(i)).append("]"); });
    if (!result && report == nullptr) return false;
  }
  return result;
}

bool keys_hold(const Node& node, PyObject* found, Report* report) {
  if (PyDict_Check(found) == 0) return differs(report, Py_Ellipsis, found);
  bool result = true;
  for (const Node* part = node.first(); part != node.next(); part = part->next()) {
    PyObject* value = PyDict_GetItemWithError(found, part->key.ptr());
    if (value == nullptr && PyErr_Occurred() != nullptr) PyErr_Clear();
    result &= part_holds(*part, value == nullptr ? Py_Ellipsis : value, report, [&](std::string& path) {
      path.append(".").append(nb::cast<std::string>(nb::str(part->key)));
    });
    if (!result && report == nullptr) return false;
  }
  return result;
}

bool dict_holds(const Node& node, PyObject* found, Report* report) {
  if (PyDict_Check(found) == 0 || PyDict_Size(found) != static_cast<Py_ssize_t>(node.children))
    return differs(report, Py_Ellipsis, found);
  Py_ssize_t at = 0;
  PyObject *key = nullptr, *value = nullptr;
  bool result = true;
  for (const Node* part = node.first(); part != node.next() && PyDict_Next(found, &at, &key, &value) != 0;
       part = part->next()) {
    if (!part->key.is_none() && !alike(part->key.ptr(), key)) return differs(report, Py_Ellipsis, found);
    result &= part_holds(*part, value, report,
                         [&](std::string& path) { path.append("[").append(text_of(nb::borrow(key))).append("]"); });
    if (!result && report == nullptr) return false;
  }
  return result;
}

bool holds(const Node& node, PyObject* found, Report* report) {
  PyObject* object = node.object.ptr();
  switch (node.kind) {
    case Kind::kIs:
      return alike(object, found) || differs(report, object, found);
    case Kind::kEqual:
      return object == found || equal(object, found) || differs(report, object, found);
    case Kind::kWeak:
      return PyWeakref_GetObject(object) == found || differs(report, Py_Ellipsis, found);
    case Kind::kType:
      return PyWeakref_GetObject(object) == reinterpret_cast<PyObject*>(Py_TYPE(found)) ||
             differs(report, Py_Ellipsis, found);
    case Kind::kAll: {
      bool result = true;
      for (const Node* each = node.first(); each != node.next(); each = each->next()) {
        if (holds(*each, found, report)) continue;
        if (report == nullptr || each->kind == Kind::kType) return false;  // what is of another class has other parts
        result = false;
      }
      return result;
    }
    case Kind::kNamed: {
      if (report == nullptr) return holds(*node.first(), found, nullptr);
      std::string path = std::exchange(report->path, nb::cast<std::string>(node.object));
      const bool result = holds(*node.first(), found, report);
      report->path = std::move(path);
      return result;
    }
    case Kind::kItems:
      return items_hold(node, found, report);
    case Kind::kDict:
      return dict_holds(node, found, report);
    case Kind::kKeys:
      return keys_hold(node, found, report);
    case Kind::kVars: {
      const nb::object dict = nb::steal(PyObject_GenericGetDict(found, nullptr));
      if (!dict.is_valid()) PyErr_Clear();
      return dict.is_valid() ? holds(*node.first(), dict.ptr(), report) : differs(report, Py_Ellipsis, found);
    }
    case Kind::kClass:
      return holds(*node.first(), reinterpret_cast<PyObject*>(Py_TYPE(found)), report);
    case Kind::kAttr: {
      nb::object value = nb::steal(PyObject_GetAttr(found, object));
      if (!value.is_valid()) {
        PyErr_Clear();  // an empty cell, or an attribute that is gone
        value = nb::borrow(Py_Ellipsis);
      }
      if (report == nullptr) return holds(*node.first(), value.ptr(), nullptr);
      return part_holds(*node.first(), value.ptr(), report,
                        [&](std::string& path) { path.append(".").append(nb::cast<std::string>(node.object)); });
    }
    case Kind::kCall: {
      const nb::object value = nb::steal(PyObject_CallFunctionObjArgs(object, found, nullptr));
      if (!value.is_valid()) throw nb::python_error();
      return holds(*node.first(), value.ptr(), report);
    }
  }
  return false;
}

class Watch {
 public:
  explicit Watch(nb::handle description) {
    parse(description, nb::object(), nodes_);
    nodes_.shrink_to_fit();
  }
  bool same(nb::handle value) const { return holds(nodes_[0], value.ptr(), nullptr); }
  nb::list changes(nb::handle value) const {
    Report report;
    holds(nodes_[0], value.ptr(), &report);
    return std::move(report.changes);
  }

 private:
  std::vector<Node> nodes_;
};

}  // namespace

void allranks::bind_watch(nb::module_& m) {
  nb::class_<Watch>(m, "Watch",
                    "What a value, and what can be seen from it, was: see allranks/remote/capture/watch.py.")
      .def(nb::init<nb::handle>(), nb::arg("description"))
      .def("same", &Watch::same, nb::arg("value"), "Whether it is still so.")
      .def("changes", &Watch::changes, nb::arg("value"), "What is not: where, what it was, what it is.");
}
