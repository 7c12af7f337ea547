// How Python enters the engine: no exception of C++ leaves a function that Python calls, and a forked child is refused.

#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "segment/memory.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <exception>
#include <memory>
#include <new>
#include <stdexcept>

namespace shm {

// Whether memory is in use that a child would share with its parent, and whether this is such a child.
extern bool used, forked;

// Returns what `body` does, which may ask for the GIL. Where the interpreter has ended meanwhile, CPython before 3.14
// ends the thread by unwinding its stack, whose destructors would drop references without the GIL. The thread stays
// here instead, as it does in 3.14, until the process ends.
template <class Body>
auto or_stay(Body body) {
    try {
        return body();
    } catch (const abi::__forced_unwind &) {
        while (true) {
            pause();
        }
    }
}

struct GilRelease {
    PyThreadState *state = PyEval_SaveThread();
    GilRelease() = default;
    GilRelease(const GilRelease &) = delete;
    ~GilRelease() {
        or_stay([&] { PyEval_RestoreThread(state); });
    }
};

// A Python exception is set, and nullptr is what the function returns.
struct PythonError : std::exception {};

struct DropReference {
    void operator()(PyObject *object) const noexcept { Py_DECREF(object); }
};

// A reference of one's own.
using Owned = std::unique_ptr<PyObject, DropReference>;

// What an API function returned: a new reference, or nullptr with an exception set.
inline Owned owned(PyObject *made) {
    if (made == nullptr) {
        throw PythonError();
    }
    return Owned(made);
}

template <class F>
PyObject *guarded(F body) {
    try {
        return body();
    } catch (const PythonError &) {
        return nullptr;
    } catch (const std::invalid_argument &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (const Inaccessible &error) {
        PyErr_SetString(PyExc_PermissionError, error.what());
    } catch (const LimitError &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (const SharedMemoryError &error) {
        PyErr_SetString(PyExc_MemoryError, error.what());
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (const abi::__forced_unwind &) {
        throw;  // the thread ends, see or_stay(), in a call that leaves nothing to destructors
    } catch (...) {
        PyErr_SetString(PyExc_SystemError, "shared memory: an unknown error in native code");
    }
    return nullptr;
}

// What stands in the table of methods in the place of `function`.
template <auto function>
PyObject *entry(PyObject *self, PyObject *arguments) {
    return guarded([&] { return function(self, arguments); });
}

// The same for what uses groups or memory.
template <auto function>
PyObject *engine_entry(PyObject *self, PyObject *arguments) {
    used = true;
    if (forked) {
        PyErr_SetString(PyExc_RuntimeError,
                        "shared memory of a group cannot be used in a forked child; start "
                        "processes with spawn or forkserver");
        return nullptr;
    }
    return guarded([&] { return function(self, arguments); });
}

template <class... Values>
void parse(PyObject *arguments, const char *format, Values... values) {
    if (!PyArg_ParseTuple(arguments, format, values...)) {
        throw PythonError();
    }
}

// Of a heap type: its memory, and its own reference to the type.
inline void free_object(PyObject *self) noexcept {
    PyTypeObject *type = Py_TYPE(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

template <class Object>
Object *new_object(PyObject *type) {
    auto *made = reinterpret_cast<allocfunc>(PyType_GetSlot(reinterpret_cast<PyTypeObject *>(type), Py_tp_alloc))(
        reinterpret_cast<PyTypeObject *>(type), 0);
    if (made == nullptr) {
        throw PythonError();
    }
    return reinterpret_cast<Object *>(made);
}

}  // namespace shm
