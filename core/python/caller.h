// The Python thread that makes a call: when it holds the GIL, and how it handles signals and forks.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>

#include "base/forks.h"
#include "base/waiting.h"
#include "python/state.h"

namespace allranks {

// Releases the GIL on request and acquires it again when the call returns.
class GilCaller : public Caller {
 public:
  GilCaller() = default;
  GilCaller(const GilCaller&) = delete;
  ~GilCaller() override { acquire(); }
  void release() override {
    if (saved_ == nullptr) saved_ = PyEval_SaveThread();
  }
  bool interrupted() override {
    acquire();
    // If this returns true, the signal handler's exception is set. This thread keeps the GIL, to raise the exception.
    const bool raised = PyErr_CheckSignals() != 0;
    check_process();
    if (raised) return true;
    release();
    return false;
  }

 protected:
  // Throw Forked in a forked child. Callers hold the GIL and call this after Python code has run, because that code may
  // have forked.
  void check_process() const {
    if (forked()) throw sys::Forked{PyErr_Occurred() != nullptr};
  }
  bool forked() const { return forks_ != sys::forks(); }
  // Before Python 3.14, PyEval_RestoreThread calls pthread_exit if the interpreter is finalizing. The forced unwinding
  // terminates the process at the first noexcept frame. So this thread sleeps until the process has exited.
  void acquire() {
    if (saved_ == nullptr) return;
    try {
      PyEval_RestoreThread(std::exchange(saved_, nullptr));
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
  }

 private:
  PyThreadState* saved_ = nullptr;
  const uint32_t forks_ = sys::forks();
};

// A GilCaller that also finds the call site.
class PythonCaller final : public GilCaller {
 public:
  ~PythonCaller() override {
    if (!raised_) return;
    // The call returned before interrupted() could raise the exception. KeyboardInterrupt is made pending again, so
    // that Ctrl-C is not lost.
    acquire();
    if (raised_->matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    raised_->discard_as_unraisable("search for the call site");
  }

  std::string where() override {
    if (state.where == nullptr) return {};
    acquire();
    std::string site;
    try {
      site = nanobind::cast<std::string>(nanobind::borrow(state.where)());
    } catch (nanobind::python_error& error) {
      raised_.emplace(error);  // raised by a signal handler; where() cannot raise it, so interrupted() does
    }
    if (raised_ && forked()) restore();
    check_process();
    return site;
  }

  bool interrupted() override {
    if (!raised_) return GilCaller::interrupted();
    acquire();
    restore();
    return true;
  }

 private:
  void restore() {
    raised_->restore();
    raised_.reset();
  }

  std::optional<nanobind::python_error> raised_;
};

}  // namespace allranks
