// One thread at a time uses a storage.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace rlstore {

namespace nb = nanobind;

// A reentrant lock. Its state is read and written only while the GIL is held, so that taking a free guard is a comparison and
// two stores, a fraction of what threading.RLock costs. Threads that wait get it in the order in which they came: one that
// releases it and takes it again in a loop cannot keep the others out.
class Guard {
 public:
  bool is_taken() const { return depth_ > 0; }

  // True if nobody uses the rows: no thread has the guard, and no batch is being gathered in the background. Never once it is closed.
  bool is_free() const { return depth_ == 0 && reads_ == 0 && !is_closed(); }

  // What the guard is of was closed: from now on `with guard:` raises this. enter() works as before, for what still has to be released.
  void close(nb::object kind, std::string message) { closed_kind_ = std::move(kind), closed_message_ = std::move(message); }
  bool is_closed() const { return closed_kind_.is_valid(); }

  // enter(), or an error in Python and false: what it is of may also have been closed during the wait.
  bool enter_open() {
    enter();
    if (!is_closed() || depth_ > 1) return true;
    exit();
    PyErr_SetString(closed_kind_.ptr(), closed_message_.c_str());
    return false;
  }

  void begin_read() { reads_++; }
  void end_read() { reads_--; }

  void enter(int64_t depth = 1) {
    const unsigned long thread = PyThread_get_thread_ident();
    if (depth_ == 0) {
      owner_ = thread, depth_ = depth;
    } else if (owner_ == thread) {
      depth_ += depth;
    } else {
      wait(thread, depth);
    }
  }

  void exit() {
    require_owner();
    if (--depth_ == 0) pass_on();
  }

  // enter(), whatever interrupts the wait, as Ctrl-C does, and what did.
  void take(int64_t depth, std::optional<nb::python_error>* interruption) {
    while (true) {
      try {
        return enter(depth);
      } catch (nb::python_error& error) {
        interruption->emplace(std::move(error));
      }
    }
  }

  // Releases the guard however often it was entered, for a wait; take(depth) takes it back.
  int64_t leave() {
    require_owner();
    const int64_t depth = depth_;
    depth_ = 0;
    pass_on();
    return depth;
  }

  // In a forked child, where there are no other threads. The forking thread holds the guard and releases it afterwards.
  void forget_waiting() { waiting_.clear(); }

 private:
  struct Waiting {
    unsigned long thread;
    int64_t depth;
    bool granted = false;
    std::mutex mutex = {};
    std::condition_variable changed = {};
  };

  void require_owner() const {
    if (depth_ == 0 || owner_ != PyThread_get_thread_ident()) throw std::runtime_error("a guard is released by the thread that holds it");
  }

  void pass_on() {
    if (waiting_.empty()) return;
    Waiting* next = waiting_.front();
    waiting_.pop_front();
    owner_ = next->thread, depth_ = next->depth;
    const std::lock_guard<std::mutex> locked(next->mutex);  // while notifying, because the waiting thread owns the memory
    next->granted = true;
    next->changed.notify_one();
  }

  void wait(unsigned long thread, int64_t depth) {
    Waiting own{thread, depth};
    waiting_.push_back(&own);
    while (!own.granted) {
      {
        nb::gil_scoped_release released;
        std::unique_lock<std::mutex> locked(own.mutex);
        own.changed.wait_for(locked, std::chrono::milliseconds(50), [&] { return own.granted; });
      }
      if (!own.granted && PyErr_CheckSignals()) {  // as Ctrl-C; a signal handler may have granted it meanwhile
        if (own.granted) {
          leave();
        } else {
          waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &own));
        }
        throw nb::python_error();
      }
    }
  }

  unsigned long owner_ = 0;
  int64_t depth_ = 0, reads_ = 0;  // how often it was entered; batches that were drawn and are being gathered
  std::deque<Waiting*> waiting_;
  nb::object closed_kind_;  // of the error; none while it is open
  std::string closed_message_;
};

// Rows are being read without the guard as long as there is this.
class GuardRead {
 public:
  explicit GuardRead(nb::object guard) : owner_(std::move(guard)) { nb::cast<Guard*>(owner_)->begin_read(); }
  GuardRead(GuardRead&&) = default;
  ~GuardRead() {
    if (owner_.is_valid()) nb::cast<Guard*>(owner_)->end_read();
  }

 private:
  nb::object owner_;
};

// What `with` enters and leaves in one native call: Python handles signals between calls of its own, also in a generator that a
// context manager was made of, where the guard would stay as it is then.
class GuardBlock {
 public:
  // is_released: the guard, which this thread has, is free while the block runs; else it is held, also if it was closed.
  GuardBlock(nb::object guard, bool is_released) : owner_(guard), guard_(nb::cast<Guard*>(guard)), is_released_(is_released) {}

  void enter() {
    if (is_released_)
      depth_ = guard_->leave();
    else
      guard_->take(1, &interruption_);
  }
  void exit(nb::args) {
    if (is_released_)
      guard_->take(depth_, &interruption_);
    else
      guard_->exit();
    if (!interruption_) return;
    nb::python_error error = std::move(*interruption_);
    interruption_.reset();
    throw error;
  }

 private:
  nb::object owner_;
  Guard* guard_;
  bool is_released_;
  int64_t depth_ = 0;
  std::optional<nb::python_error> interruption_;
};

// A context manager made of a generator with one `yield`, as contextlib makes it, but entered and left in one native call.
class WithBlock {
 public:
  explicit WithBlock(nb::object steps) : steps_(std::move(steps)) {}

  nb::object enter() {
    PyObject* value = PyIter_Next(steps_.ptr());
    if (value) return nb::steal(value);
    if (PyErr_Occurred()) throw nb::python_error();
    throw std::runtime_error("a block did not begin");
  }
  bool exit(nb::handle, nb::handle error, nb::handle trace) {
    if (error.is_none()) {
      nb::object more = nb::steal(PyIter_Next(steps_.ptr()));
      if (PyErr_Occurred()) throw nb::python_error();
      if (more.is_valid()) throw std::runtime_error("a block did not end");
      return false;
    }
    PyObject* more = PyObject_CallMethod(steps_.ptr(), "throw", "O", error.ptr());
    if (more) {
      Py_DECREF(more);
      throw std::runtime_error("a block did not end");
    }
    nb::python_error raised;
    if (raised.value().is(error)) {
      PyException_SetTraceback(error.ptr(), trace.ptr());
      return false;  // Python goes on raising it
    }
    if (raised.matches(PyExc_StopIteration)) return true;
    // A generator lets no StopIteration through: it raises another error, because of it.
    const nb::object cause = nb::steal(PyException_GetCause(raised.value().ptr()));
    if (cause.is(error) && PyErr_GivenExceptionMatches(error.ptr(), PyExc_StopIteration)) return false;
    throw raised;
  }

 private:
  nb::object steps_;
};

// `with guard:` by methods of plain C, in half the time of bound ones.
inline PyObject* guard_enter(PyObject* self, PyObject*) {
  try {
    if (!nb::inst_ptr<Guard>(self)->enter_open()) return nullptr;
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  }
  Py_RETURN_NONE;
}

inline PyObject* guard_exit(PyObject* self, PyObject* const*, Py_ssize_t) {
  try {
    nb::inst_ptr<Guard>(self)->exit();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

inline PyMethodDef guard_methods[] = {
    {"__enter__", guard_enter, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(guard_exit)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
inline PyType_Slot guard_slots[] = {{Py_tp_methods, guard_methods}, {0, nullptr}};

}  // namespace rlstore
