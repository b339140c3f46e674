// Compares the values that a captured step reads from Python with their values in the recording.
//
// A Watch is a tree that allranks/remote/capture/watch.py describes. Each node has the expected value of one object,
// and finds the parts of that object. Every replay walks the tree. So this file creates objects only if necessary, and
// the nodes are in one array, in the order of the walk. The tree contains numbers, texts and weak references only, so
// it keeps no object of the program alive.
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

// PyWeakref_GetObject of the stable ABI, which every Python 3 exports. Its own name is deprecated since Python 3.13,
// and PyWeakref_GetRef is not in the stable ABI of Python 3.10.
extern "C" PyObject* weakref_object(PyObject* reference) __asm__("PyWeakref_GetObject");

namespace {

enum class Kind {
  kIs,     // the value is the object, or an indistinguishable number or text
  kEqual,  // the value compares equal to the object
  kWeak,   // the value is the object that the weak reference refers to
  kType,   // the value's class is the class that the weak reference refers to
  kAll,    // all children match the value
  kNamed,  // the child matches the value; reports use the node's name for it
  kItems,  // a list or tuple: one child matches each item
  kDict,   // a dict: one child matches each entry, in order
  kKeys,   // a dict: one child matches the entry of each of some keys
  kVars,   // the child matches the value's __dict__
  kClass,  // the child matches the value's class
  kAttr,   // the child matches an attribute of the value
  kCall,   // the child matches the result of calling a function with the value
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
  uint32_t size = 1;  // number of nodes in the subtree; its nodes follow this one in the array
  nb::object object;  // the expected object, the attribute's name, the function, or the name in reports
  nb::object key;     // the node's key in a dict; None if the key is not compared

  const Node* first() const { return this + 1; }
  const Node* next() const { return this + size; }
};

Kind kind_of(std::string_view wanted) {
  for (const auto& [name, kind] : kKinds) {
    if (name == wanted) return kind;
  }
  throw nb::value_error("unknown kind of node");
}

// Append a node and its subtree. A description is (kind, object, children), or (kind, object, children, keys) for a
// dict.
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

// Return whether two objects are identical, or numbers or texts of one type that are indistinguishable. Floats are
// compared by their bits: 0.0 and -0.0 differ, and a nan matches a nan with the same bits.
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
  if (found < 0) PyErr_Clear();  // objects that cannot be compared are different
  return found == 1;
}

struct Report {
  std::string path;
  nb::list changes;  // tuples (path, expected value, found value); ... replaces a value that does not exist
};

std::string text_of(nb::handle key) {
  if (!PyUnicode_Check(key.ptr()) && !PyLong_Check(key.ptr())) return "...";
  return nb::cast<std::string>(nb::repr(key));
}

bool holds(const Node& node, PyObject* found, Report* report);

// Return whether a part of a value matches. `place` appends the part's position in the value to the report's path.
template <typename Place>
bool part_holds(const Node& node, PyObject* found, Report* report, Place place) {
  if (report == nullptr && node.children == 0) return holds(node, found, nullptr);
  const nb::object kept = nb::borrow(found);  // Python code that a child calls may delete the last other reference
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
      return weakref_object(object) == found || differs(report, Py_Ellipsis, found);
    case Kind::kType:
      return weakref_object(object) == reinterpret_cast<PyObject*>(Py_TYPE(found)) ||
             differs(report, Py_Ellipsis, found);
    case Kind::kAll: {
      bool result = true;
      for (const Node* each = node.first(); each != node.next(); each = each->next()) {
        if (holds(*each, found, report)) continue;
        // After a mismatch of the class the other children are meaningless: another class has other parts.
        if (report == nullptr || each->kind == Kind::kType) return false;
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
        PyErr_Clear();  // an empty cell, or an attribute that no longer exists
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
  nb::class_<Watch>(m, "Watch", "The expected state of a value and its parts: see allranks/remote/capture/watch.py.")
      .def(nb::init<nb::handle>(), nb::arg("description"))
      .def("same", &Watch::same, nb::arg("value"), "Return whether the value still has the expected state.")
      .def("changes", &Watch::changes, nb::arg("value"),
           "Return the differences as tuples of path, expected value and found value.");
}
