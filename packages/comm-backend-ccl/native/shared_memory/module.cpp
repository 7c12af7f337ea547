// The Python module comm_backend_ccl._shared_memory, of the stable ABI of CPython 3.10. Groups and operations are passed
// as integers: shared_memory.py is the only caller, and sees to it that none is used after its end.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "dlpack.hpp"
#include "tasks.hpp"

#include <pthread.h>

#include <algorithm>
#include <new>

namespace {

using namespace shm;

bool used = false, forked = false;
constexpr const char *in_child = "shared memory of a group cannot be used in a forked child";

// Looks at other ranks' flags before other Python threads may run: a few microseconds.
constexpr int looks_with_gil = 400;
// How long a call waits before Python looks after signals and lost ranks.
constexpr double at_once_s = 0.05;

struct Unlocked {
    PyThreadState *state = PyEval_SaveThread();
    // Of a thread that outlives the interpreter, this is where it ends: by unwinding its stack.
    ~Unlocked() noexcept(false) { PyEval_RestoreThread(state); }
};

template <class F>
PyObject *guarded(F body) {
    used = true;
    if (forked) {
        PyErr_SetString(PyExc_RuntimeError, in_child);
        return nullptr;
    }
    try {
        return body();
    } catch (const std::invalid_argument &problem) {
        PyErr_SetString(PyExc_RuntimeError, problem.what());
    } catch (const Inaccessible &problem) {
        PyErr_SetString(PyExc_PermissionError, problem.what());
    } catch (const Problem &problem) {
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

const Shared &group_of(unsigned long long number) { return *reinterpret_cast<Shared *>(number); }
Held *held(PyObject *argument) { return static_cast<Held *>(PyLong_AsVoidPtr(argument)); }

PyObject *none() { Py_RETURN_NONE; }

PyObject *create(PyObject *, PyObject *arguments) {
    int size;
    if (!PyArg_ParseTuple(arguments, "i", &size)) {
        return nullptr;
    }
    return guarded([&] {
        if (size < 1 || size > max_ranks) {
            throw std::invalid_argument("shared memory serves up to " + std::to_string(max_ranks) + " ranks");
        }
        const Layout layout(size);
        const int descriptor = create_memory(layout.end);
        try {
            reserve_memory(descriptor, 0, layout.slots_at, "a group");
        } catch (...) {
            close_memory(descriptor);
            throw;
        }
        return Py_BuildValue("iK", descriptor, static_cast<unsigned long long>(inode_of(descriptor)));
    });
}

PyObject *close_descriptor(PyObject *, PyObject *arguments) {
    int descriptor;
    if (!PyArg_ParseTuple(arguments, "i", &descriptor)) {
        return nullptr;
    }
    close_memory(descriptor);
    Py_RETURN_NONE;
}

PyObject *join(PyObject *, PyObject *arguments) {
    int holder, descriptor, rank, crowded;
    unsigned long long inode;
    PyObject *list;
    if (!PyArg_ParseTuple(arguments, "iiKiOp", &holder, &descriptor, &inode, &rank, &list, &crowded)) {
        return nullptr;
    }
    std::vector<int> pids;
    for (Py_ssize_t index = 0; index < PySequence_Size(list); ++index) {
        PyObject *item = PySequence_GetItem(list, index);
        pids.push_back(static_cast<int>(PyLong_AsLong(item)));
        Py_DecRef(item);
    }
    if (PyErr_Occurred()) {
        return nullptr;
    }
    return guarded([&] {
        const int size = static_cast<int>(pids.size());
        const size_t bytes = Layout(size).end;
        const int own = open_memory(holder, descriptor, inode, bytes);
        void *segment = nullptr;
        try {
            segment = map_memory(own, bytes);
            return PyLong_FromVoidPtr(
                new Shared(std::make_shared<Group>(segment, own, size, rank, std::move(pids), crowded != 0, true)));
        } catch (...) {
            if (segment != nullptr) {
                unmap_memory(segment, bytes);
            }
            close_memory(own);
            throw;
        }
    });
}

// close(group, quietly)
PyObject *close_group(PyObject *, PyObject *arguments) {
    unsigned long long group;
    int quietly;
    if (!PyArg_ParseTuple(arguments, "Kp", &group, &quietly)) {
        return nullptr;
    }
    if (!forked) {
        const Shared closed = group_of(group);
        const Unlocked unlocked;
        closed->close(quietly != 0);
    }
    Py_RETURN_NONE;
}

PyObject *free_group(PyObject *, PyObject *argument) {
    auto *group = reinterpret_cast<Shared *>(PyLong_AsUnsignedLongLong(argument));
    if (!forked) {
        const Unlocked unlocked;
        delete group;
    }
    Py_RETURN_NONE;
}

PyObject *failure(PyObject *, PyObject *argument) {
    return PyUnicode_FromString(held(argument)->group->failure().c_str());
}

bool sizes_from(PyObject *list, std::vector<size_t> &sizes) {
    if (list == Py_None) {
        return true;
    }
    for (Py_ssize_t index = 0; index < PySequence_Size(list); ++index) {
        PyObject *item = PySequence_GetItem(list, index);
        sizes.push_back(PyLong_AsSize_t(item));
        Py_DecRef(item);
    }
    return PyErr_Occurred() == nullptr;
}

// start(group, operation, input, output, count, dtype, op, root, watched, input_counts, output_counts) -> handle or 0
PyObject *start(PyObject *, PyObject *arguments) {
    unsigned long long group, input, output;
    Py_ssize_t count;
    int operation, dtype, op, root, watched;
    PyObject *input_counts = Py_None, *output_counts = Py_None;
    if (!PyArg_ParseTuple(arguments, "KiKKniiip|OO", &group, &operation, &input, &output, &count, &dtype, &op, &root,
                          &watched, &input_counts, &output_counts)) {
        return nullptr;
    }
    Request request;
    request.operation = static_cast<uint8_t>(operation);
    request.dtype = static_cast<uint8_t>(dtype);
    request.op = static_cast<uint8_t>(op);
    request.root = root;
    request.input = reinterpret_cast<const void *>(input);
    request.output = reinterpret_cast<void *>(output);
    request.count = static_cast<size_t>(count);
    if (!sizes_from(input_counts, request.input_counts) || !sizes_from(output_counts, request.output_counts)) {
        return nullptr;
    }
    return guarded([&] {
        Handle task;
        {
            const Unlocked unlocked;
            Group &on = *group_of(group);
            task = watched ? on.start(std::move(request), true) : on.run(std::move(request), on.spins());
            if (task && !watched) {
                on.wait(*task, at_once_s);
            }
        }
        if (!task || task->now() == complete) {
            return PyLong_FromLong(0);
        }
        return PyLong_FromVoidPtr(new Held{group_of(group), std::move(task)});
    });
}

// wait(handle, seconds) -> 0 under way, 1 complete, -1 failed
PyObject *wait(PyObject *, PyObject *arguments) {
    unsigned long long handle;
    double seconds;
    if (!PyArg_ParseTuple(arguments, "Kd", &handle, &seconds)) {
        return nullptr;
    }
    return guarded([&] {
        const Held &waited = *reinterpret_cast<Held *>(handle);
        int state = waited.task->now();
        if (state == pending) {
            const Unlocked unlocked;
            state = waited.group->wait(*waited.task, seconds);
        }
        return PyLong_FromLong(state == failed ? -1 : state);
    });
}

// missing(handle) -> the ranks, as bits, without which the operation cannot go on
PyObject *missing(PyObject *, PyObject *argument) {
    const Held &waited = *held(argument);
    uint64_t found;
    {
        const Unlocked unlocked;
        found = waited.group->missing(*waited.task);
    }
    return PyLong_FromUnsignedLongLong(found);
}

// drain(group, seconds)
PyObject *drain(PyObject *, PyObject *arguments) {
    unsigned long long group;
    double seconds;
    if (!PyArg_ParseTuple(arguments, "Kd", &group, &seconds)) {
        return nullptr;
    }
    if (!forked) {
        const Unlocked unlocked;
        group_of(group)->drain(seconds);
    }
    Py_RETURN_NONE;
}

PyObject *is_forked(PyObject *, PyObject *) { return PyBool_FromLong(forked); }

PyObject *release(PyObject *, PyObject *argument) {
    if (!forked) {
        const Unlocked unlocked;  // it may be the last that holds the group
        delete held(argument);
    }
    Py_RETURN_NONE;
}

// --- memory that peers can map

PyObject *allocate(PyObject *, PyObject *argument) {
    const size_t bytes = PyLong_AsSize_t(argument);
    if (PyErr_Occurred()) {
        return nullptr;
    }
    return guarded([&] {
        void *begin;
        {
            const Unlocked unlocked;
            begin = Arena::instance().allocate(bytes);
        }
        return PyLong_FromVoidPtr(begin);
    });
}

PyObject *give_back(PyObject *, PyObject *argument) {
    if (!forked) {
        Arena::instance().free(PyLong_AsVoidPtr(argument));
    }
    Py_RETURN_NONE;
}

PyObject *trim(PyObject *, PyObject *) {
    if (!forked) {
        Arena::instance().trim();
    }
    Py_RETURN_NONE;
}

PyObject *facts(PyObject *, PyObject *) {
    return Py_BuildValue("{s:s,s:n}", "kernels", kernels().name, "tensors in shared memory",
                         static_cast<Py_ssize_t>(Arena::instance().bytes()));
}

// --- the shortest way: a tensor in, nothing out

const dlpack::ExchangeApi *exchange = nullptr;
PyObject *tensor_type = nullptr, *is_neg = nullptr;

int code_of(const dlpack::Tensor &tensor) {
    switch (tensor.code << 8 | tensor.bits) {
    case dlpack::floating << 8 | 32:
        return float32;
    case dlpack::brain << 8 | 16:
        return bfloat16;
    case dlpack::floating << 8 | 16:
        return float16;
    case dlpack::floating << 8 | 64:
        return float64;
    case dlpack::integer << 8 | 8:
        return int8;
    case dlpack::integer << 8 | 16:
        return int16;
    case dlpack::integer << 8 | 32:
        return int32;
    case dlpack::integer << 8 | 64:
        return int64;
    case dlpack::unsigned_integer << 8 | 8:
        return uint8;
    case dlpack::truth << 8 | 8:
        return boolean;
    default:
        return -1;
    }
}

// The elements of a contiguous tensor, or -1.
int64_t elements_of(const dlpack::Tensor &tensor) {
    int64_t count = 1;
    for (int32_t dimension = tensor.dimensions; dimension-- > 0;) {
        if (tensor.shape[dimension] != 1 && tensor.strides[dimension] != count) {
            return -1;
        }
        count *= tensor.shape[dimension];
    }
    return count;
}

struct Shortcut {
    Shared group;
    uint8_t op;
    PyObject *later;
};

void end_shortcut(PyObject *capsule) {
    auto *shortcut = static_cast<Shortcut *>(PyCapsule_GetPointer(capsule, nullptr));
    Py_DECREF(shortcut->later);
    if (!forked) {
        delete shortcut;
    }
}

// Reduces a tensor of a kind that needs no more thought. Returns True if that is done; False, with nothing begun, where
// the long way has to be taken; where others are late, what `later` returns.
PyObject *take_shortcut(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 1 || reinterpret_cast<PyObject *>(Py_TYPE(arguments[0])) != tensor_type || forked) {
        Py_RETURN_FALSE;
    }
    dlpack::Tensor tensor;
    if (exchange->tensor_from_object(arguments[0], &tensor) != 0) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    const auto &shortcut = *static_cast<Shortcut *>(PyCapsule_GetPointer(self, nullptr));
    const int dtype = code_of(tensor);
    const int64_t elements = dtype < 0 ? -1 : elements_of(tensor);
    if (tensor.device_type != dlpack::cpu || elements <= 0 || !reduces(dtype, shortcut.op)) {
        Py_RETURN_FALSE;
    }
    // What the memory of a tensor that is negated by a flag holds is not what it means; DLPack does not tell.
    PyObject *negative = PyObject_CallFunctionObjArgs(is_neg, arguments[0], nullptr);
    const bool usual = negative == Py_False;
    Py_XDECREF(negative);
    if (!usual) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    Request request;
    request.operation = all_reduce;
    request.dtype = static_cast<uint8_t>(dtype);
    request.op = shortcut.op;
    request.input = request.output = static_cast<char *>(tensor.data) + tensor.byte_offset;
    request.count = static_cast<size_t>(elements);
    Group &group = *shortcut.group;
    if (request.bytes() > small_bytes(group) || group.closed() || group.broken()) {
        Py_RETURN_FALSE;
    }
    if (pieces_for(group, request) > 0 && !group.ring_is_reserved()) {
        Py_RETURN_FALSE;  // which the long way does
    }
    Handle task;
    if (!group.run_at_once(request, std::min(looks_with_gil, group.spins()), task)) {
        try {
            const Unlocked unlocked;
            task = group.start(std::move(request), false);
        } catch (const std::exception &) {
            Py_RETURN_FALSE;  // nothing was begun, and the long way says what is wrong
        }
    }
    if (task && task->now() == pending) {
        const Unlocked unlocked;
        group.wait(*task, at_once_s);
    }
    if (!task || task->now() == complete) {
        Py_RETURN_TRUE;
    }
    PyObject *handle = PyLong_FromVoidPtr(new Held{shortcut.group, std::move(task)});
    PyObject *found = PyObject_CallFunctionObjArgs(shortcut.later, handle, arguments[0], nullptr);
    Py_DECREF(handle);
    return found;
}

PyMethodDef shortcut_method{"all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(take_shortcut)),
                            METH_FASTCALL, nullptr};

// shortcut(group, op, later) -> callable, or None where torch does not offer what it takes
PyObject *shortcut(PyObject *, PyObject *arguments) {
    unsigned long long group;
    int op;
    PyObject *later;
    if (!PyArg_ParseTuple(arguments, "KiO", &group, &op, &later)) {
        return nullptr;
    }
    if (exchange == nullptr) {
        return none();
    }
    Py_INCREF(later);
    PyObject *capsule = PyCapsule_New(
        new Shortcut{*reinterpret_cast<Shared *>(group), static_cast<uint8_t>(op), later}, nullptr, end_shortcut);
    if (capsule == nullptr) {
        return nullptr;
    }
    PyObject *made = PyCFunction_NewEx(&shortcut_method, capsule, nullptr);
    Py_DECREF(capsule);
    return made;
}

// meet(Tensor): what a tensor is, and how to ask it.
PyObject *meet(PyObject *, PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    PyObject *method = capsule == nullptr ? nullptr : PyObject_GetAttrString(type, "is_neg");
    if (method == nullptr) {
        PyErr_Clear();
        Py_XDECREF(capsule);
        return none();
    }
    auto *table = static_cast<dlpack::ExchangeApi *>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    while (table != nullptr && table->major != dlpack::major_version) {
        table = table->previous;
    }
    if (table == nullptr || table->tensor_from_object == nullptr) {
        PyErr_Clear();
        Py_DECREF(method);
        return none();
    }
    exchange = table;
    is_neg = method;
    Py_INCREF(type);
    tensor_type = type;
    return none();
}

PyMethodDef methods[] = {{"create", create, METH_VARARGS, nullptr},
                         {"close_descriptor", close_descriptor, METH_VARARGS, nullptr},
                         {"join", join, METH_VARARGS, nullptr},
                         {"close", close_group, METH_VARARGS, nullptr},
                         {"free", free_group, METH_O, nullptr},
                         {"failure", failure, METH_O, nullptr},
                         {"start", start, METH_VARARGS, nullptr},
                         {"wait", wait, METH_VARARGS, nullptr},
                         {"release", release, METH_O, nullptr},
                         {"missing", missing, METH_O, nullptr},
                         {"drain", drain, METH_VARARGS, nullptr},
                         {"is_forked", is_forked, METH_NOARGS, nullptr},
                         {"allocate", allocate, METH_O, nullptr},
                         {"give_back", give_back, METH_O, nullptr},
                         {"trim", trim, METH_NOARGS, nullptr},
                         {"facts", facts, METH_NOARGS, nullptr},
                         {"shortcut", shortcut, METH_VARARGS, nullptr},
                         {"meet", meet, METH_O, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition{PyModuleDef_HEAD_INIT, "_shared_memory", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__shared_memory() {
    pthread_atfork(nullptr, nullptr, [] { forked = forked || used; });
    return PyModule_Create(&definition);
}
