#include "python/objects.hpp"

#include <algorithm>
#include <vector>

namespace shm {

namespace {

using Held = OperationObject::Held;

OperationObject *as_operation(PyObject *self) { return reinterpret_cast<OperationObject *>(self); }

// Operations that were dropped before their end, and the tensors in whose memory they go on; guarded by the GIL.
struct Abandoned {
    Held *held;
    PyObject *kept;
};
// Never destroyed. NOLINTNEXTLINE(bugprone-throwing-static-initialization): without memory for it, there is no module.
std::vector<Abandoned> &abandoned = *new std::vector<Abandoned>;
size_t next = 0;  // of these, to be looked at

// wait(seconds) -> 0 under way, 1 complete, -1 failed
PyObject *wait(PyObject *self, PyObject *arguments) {
    double seconds;
    parse(arguments, "d", &seconds);
    const Held &held = *as_operation(self)->held;
    int state = held.task->now();
    if (state == pending) {
        const GilRelease released;
        state = held.group->wait(*held.task, seconds);
    }
    return PyLong_FromLong(state == failed ? -1 : state);
}

PyObject *failure(PyObject *self, PyObject *) {
    return PyUnicode_FromString(as_operation(self)->held->group->failure().c_str());
}

// ended() -> when a watched operation was complete, in ns of the steady clock; 0 where that is not known
PyObject *ended(PyObject *self, PyObject *) {
    const Task &task = *as_operation(self)->held->task;
    return PyLong_FromLongLong(task.now() == complete ? task.ended_ns.load(std::memory_order_relaxed) : 0);
}

// source() -> the rank whose message a receive got; -1 where there is none yet
PyObject *source(PyObject *self, PyObject *) {
    return PyLong_FromLong(as_operation(self)->held->task->source.load(std::memory_order_relaxed));
}

// missing() -> the ranks, as bits, without which the operation cannot go on
PyObject *missing(PyObject *self, PyObject *) {
    const Held &held = *as_operation(self)->held;
    uint64_t found;
    {
        const GilRelease released;
        found = held.group->missing(*held.task);
    }
    return PyLong_FromUnsignedLongLong(found);
}

// begin_wait(caller, limited): somebody begins to wait for the end, in this place by the flight recorder's index, which
// is 0 where it is unknown; for a time that is not the group's where `limited` is true
PyObject *begin_wait(PyObject *self, PyObject *arguments) {
    unsigned caller;
    int limited;
    parse(arguments, "Ip", &caller, &limited);
    as_operation(self)->held->task->recorded.wait(caller, limited != 0);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"begin_wait", engine_entry<begin_wait>, METH_VARARGS, nullptr},
                         {"wait", engine_entry<wait>, METH_VARARGS, nullptr},
                         {"failure", entry<failure>, METH_NOARGS, nullptr},
                         {"ended", entry<ended>, METH_NOARGS, nullptr},
                         {"missing", engine_entry<missing>, METH_NOARGS, nullptr},
                         {"source", entry<source>, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

void dealloc(PyObject *self) {
    OperationObject *operation = as_operation(self);
    Held *held = operation->held;
    PyObject *kept = operation->kept;
    free_object(self);
    if (forked || held == nullptr) {
        Py_XDECREF(kept);
        return;
    }
    if (held->task->now() == pending) {
        try {
            abandoned.push_back({held, kept});
        } catch (const std::bad_alloc &) {  // NOLINT(bugprone-empty-catch)
            // Both stay for good.
        }
    } else {
        delete held;
        Py_XDECREF(kept);
    }
    release_what_ended();
}

PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(dealloc)}, {Py_tp_methods, methods}, {0, nullptr}};
PyType_Spec spec{"comm_backend_ccl._shared_memory.Operation", sizeof(OperationObject), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyObject *type = nullptr;

}  // namespace

void release_what_ended(size_t most) noexcept {
    if (forked) {  // they are the parent's, and so are the groups that might end with them
        return;
    }
    most = std::min(most, abandoned.size());
    for (size_t look = 0; look < most && !abandoned.empty(); ++look) {
        next = next < abandoned.size() ? next : 0;
        const Abandoned one = abandoned[next];
        if (one.held->task->now() == pending) {
            ++next;
            continue;
        }
        abandoned[next] = abandoned.back();
        abandoned.pop_back();
        delete one.held;
        Py_XDECREF(one.kept);  // may come here again
    }
}

PyObject *make_operation(const Shared &group, Handle task, PyObject *kept) {
    release_what_ended();
    auto *made = new_object<OperationObject>(type);
    made->held = nullptr;
    Py_XINCREF(kept);
    made->kept = kept;
    try {
        made->held = new Held{group, std::move(task)};
    } catch (...) {
        // Whose memory is in use stays.
        Py_XINCREF(kept);
        Py_DECREF(reinterpret_cast<PyObject *>(made));
        throw;
    }
    return reinterpret_cast<PyObject *>(made);
}

bool add_operation_type(PyObject *module) {
    type = PyType_FromSpec(&spec);
    return type != nullptr && PyModule_AddObjectRef(module, "Operation", type) == 0;
}

}  // namespace shm
