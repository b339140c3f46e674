// The thread of Python that makes a call: when it holds the GIL, and how signals and forks reach it.
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

// Releases the GIL on demand and takes it back at the end of the call.
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
    // On true the exception of the signal handler is set, and the GIL stays with us to raise it.
    const bool raised = PyErr_CheckSignals() != 0;
    check_process();
    if (raised) return true;
    release();
    return false;
  }

 protected:
  // To be called with the GIL after Python code has run, which may have forked.
  void check_process() const {
    if (forked()) throw sys::Forked{PyErr_Occurred() != nullptr};
  }
  bool forked() const { return forks_ != sys::forks(); }
  // Before 3.14 a thread that comes back while Python ends is ended by pthread_exit, whose unwinding ends the
  // process at the first noexcept frame. It may as well stay here.
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

// Also finds where in the program the call stands.
class PythonCaller final : public GilCaller {
 public:
  ~PythonCaller() override {
    if (!raised_) return;  // else the call has ended before the exception could be raised
    acquire();
    if (raised_->matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    raised_->discard_as_unraisable("where a call stands");
  }

  std::string where() override {
    if (state.where == nullptr) return {};
    acquire();
    std::string site;
    try {
      site = nanobind::cast<std::string>(nanobind::borrow(state.where)());
    } catch (nanobind::python_error& error) {
      raised_.emplace(error);  // by a signal handler: interrupted() raises it
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
