// What the files of the seam with Python share.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <utility>

#include "base/forks.h"
#include "base/waiting.h"

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

void bind_calls(nanobind::module_& m);   // bind_calls.cc
void bind_outbox(nanobind::module_& m);  // bind_outbox.cc
void bind_watch(nanobind::module_& m);   // bind_watch.cc

}  // namespace allranks
