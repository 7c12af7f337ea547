// The Python module comm_backend_ccl._shared_memory, of the stable ABI of CPython 3.10. Groups and operations are passed
// as integers: shared_memory.py is the only caller, and sees to it that none is used after its end.

#include "python/module.hpp"

#include <pthread.h>

namespace shm {

bool used = false, forked = false;

namespace {

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
        const GilRelease released;
        closed->close(quietly != 0);
    }
    Py_RETURN_NONE;
}

PyObject *free_group(PyObject *, PyObject *argument) {
    auto *group = reinterpret_cast<Shared *>(PyLong_AsUnsignedLongLong(argument));
    if (!forked) {
        const GilRelease released;
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
            const GilRelease released;
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
            const GilRelease released;
            state = waited.group->wait(*waited.task, seconds);
        }
        return PyLong_FromLong(state == failed ? -1 : state);
    });
}

// ended(handle) -> when a watched operation was complete, in ns of the steady clock; 0 where that is not known
PyObject *ended(PyObject *, PyObject *argument) {
    const Task &task = *held(argument)->task;
    return PyLong_FromLongLong(task.now() == complete ? task.ended_ns.load(std::memory_order_relaxed) : 0);
}

// missing(handle) -> the ranks, as bits, without which the operation cannot go on
PyObject *missing(PyObject *, PyObject *argument) {
    const Held &waited = *held(argument);
    uint64_t found;
    {
        const GilRelease released;
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
        const GilRelease released;
        group_of(group)->drain(seconds);
    }
    Py_RETURN_NONE;
}

PyObject *is_forked(PyObject *, PyObject *) { return PyBool_FromLong(forked); }

PyObject *release(PyObject *, PyObject *argument) {
    if (!forked) {
        const GilRelease released;  // it may be the last that holds the group
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
            const GilRelease released;
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

PyObject *facts(PyObject *, PyObject *) {
    return Py_BuildValue("{s:s,s:n}", "kernels", kernels().name, "tensors in shared memory",
                         static_cast<Py_ssize_t>(Arena::instance().bytes()));
}

// reduce(dtype, op, output, inputs, count), of memory that stays where it is
PyObject *reduce_here(PyObject *, PyObject *arguments) {
    int dtype, op;
    unsigned long long output;
    PyObject *list;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(arguments, "iiKOn", &dtype, &op, &output, &list, &count)) {
        return nullptr;
    }
    const Py_ssize_t inputs = PySequence_Size(list);
    if (!reduces(dtype, op) || inputs < 1 || inputs > max_ranks) {
        PyErr_SetString(PyExc_ValueError, "not a reduction that there is");
        return nullptr;
    }
    const void *addresses[max_ranks];
    for (Py_ssize_t index = 0; index < inputs; ++index) {
        PyObject *item = PySequence_GetItem(list, index);
        addresses[index] = item == nullptr ? nullptr : PyLong_AsVoidPtr(item);
        Py_XDECREF(item);
    }
    if (PyErr_Occurred()) {
        return nullptr;
    }
    {
        const GilRelease released;
        void *outputs[] = {reinterpret_cast<void *>(output)};
        kernels().reduce(dtype, op, outputs, 1, addresses, static_cast<int>(inputs), static_cast<size_t>(count), false);
    }
    Py_RETURN_NONE;
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
                         {"ended", ended, METH_O, nullptr},
                         {"missing", missing, METH_O, nullptr},
                         {"drain", drain, METH_VARARGS, nullptr},
                         {"reduce", reduce_here, METH_VARARGS, nullptr},
                         {"is_forked", is_forked, METH_NOARGS, nullptr},
                         {"allocate", allocate, METH_O, nullptr},
                         {"give_back", give_back, METH_O, nullptr},
                         {"facts", facts, METH_NOARGS, nullptr},
                         {"fast_path", make_fast_path, METH_VARARGS, nullptr},
                         {"bind_torch", bind_torch, METH_O, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition{PyModuleDef_HEAD_INIT, "_shared_memory", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

}  // namespace shm

PyMODINIT_FUNC PyInit__shared_memory() {
    pthread_atfork(nullptr, nullptr, [] { shm::forked = shm::forked || shm::used; });
    return PyModule_Create(&shm::definition);
}
