// What the files of the Python module have in common.

#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "algorithms/eager.hpp"

#include <memory>
#include <new>
#include <stdexcept>

namespace shm {

// Whether memory is in use that a child would share with its parent, and whether this is such a child.
extern bool used, forked;

// How long a call waits before Python looks after signals and lost ranks.
constexpr double at_once_s = 0.05;

struct GilRelease {
    PyThreadState *state = PyEval_SaveThread();
    // Of a thread that outlives the interpreter, this is where it ends: by unwinding its stack.
    ~GilRelease() noexcept(false) { PyEval_RestoreThread(state); }
};

template <class F>
PyObject *guarded(F body) {
    used = true;
    if (forked) {
        PyErr_SetString(PyExc_RuntimeError, "shared memory of a group cannot be used in a forked child; start processes with spawn or forkserver");
        return nullptr;
    }
    try {
        return body();
    } catch (const std::invalid_argument &problem) {
        PyErr_SetString(PyExc_RuntimeError, problem.what());
    } catch (const Inaccessible &problem) {
        PyErr_SetString(PyExc_PermissionError, problem.what());
    } catch (const SharedMemoryError &problem) {
        PyErr_SetString(PyExc_MemoryError, problem.what());
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    } catch (const std::exception &problem) {
        PyErr_SetString(PyExc_RuntimeError, problem.what());
    }
    return nullptr;
}

using Shared = std::shared_ptr<Group>;

// What Python holds of an operation under way; it may do so for longer than of the group.
struct Held {
    Shared group;
    Handle task;
};

inline const Shared &group_of(unsigned long long number) { return *reinterpret_cast<Shared *>(number); }
inline Held *held(PyObject *argument) { return static_cast<Held *>(PyLong_AsVoidPtr(argument)); }

// Methods of path.cpp.
PyObject *make_fast_path(PyObject *module, PyObject *arguments);
PyObject *bind_torch(PyObject *module, PyObject *type);

}  // namespace shm
