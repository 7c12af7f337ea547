// The fast path: tensors in, nothing out. Everything but the tensors was settled before.

#include "algorithms/eager.hpp"
#include "python/objects.hpp"
#include "python/plain_tensor.hpp"

#include <algorithm>

namespace shm {

namespace {

// Looks at other ranks' flags before other Python threads may run: a few microseconds, or less where ranks share cores
// and one gives its own away.
int looks_with_gil(const Group &group) { return std::min(400, group.spins()); }

// What the function that Python calls is bound to.
struct FastPath {
    PyObject_HEAD Shared *group;
    PyObject *later;
    uint8_t operation, op;
    uint16_t user_call;
    int root;

    Group &on() const { return **group; }
};

int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(reinterpret_cast<PyObject *>(Py_TYPE(self)));
    Py_VISIT(reinterpret_cast<FastPath *>(self)->later);
    return 0;
}

int clear(PyObject *self) {
    Py_CLEAR(reinterpret_cast<FastPath *>(self)->later);
    return 0;
}

void dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    auto *path = reinterpret_cast<FastPath *>(self);
    Py_CLEAR(path->later);
    if (!forked) {
        delete path->group;
    }
    free_object(self);
}

PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(dealloc)},
                       {Py_tp_traverse, reinterpret_cast<void *>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void *>(clear)},
                       {0, nullptr}};
PyType_Spec spec{"comm_backend_ccl._shared_memory.FastPath", sizeof(FastPath), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyObject *type = nullptr;

// How many tensors the operation is done with. In one, or on ranks that are not the root of a gather or scatter, there
// is neither output nor input apart.
Py_ssize_t tensors_of(const FastPath &path) {
    switch (path.operation) {
    case barrier:
        return 0;
    case all_reduce:
    case broadcast:
    case reduce:
        return 1;
    case gather:
    case scatter:
        return path.on().rank() == path.root ? 2 : 1;
    default:
        return 2;
    }
}

// Of which parts of an exchange are made.
size_t rows_of(const PlainTensor &tensor) { return tensor.dimensions == 0 ? 1 : static_cast<size_t>(tensor.shape[0]); }

bool rows_are_alike(const PlainTensor &output, const PlainTensor &input) {
    return output.dimensions <= 1 || std::equal(output.shape + 1, output.shape + output.dimensions, input.shape + 1);
}

// Whether `output` and `input`, which are one where there is one, are what the operation is done with.
bool is_request(const FastPath &path, const PlainTensor &output, const PlainTensor &input, Request &request) {
    const size_t size = static_cast<size_t>(path.on().size());
    if (output.dtype != input.dtype) {
        return false;
    }
    request.operation = path.operation;
    request.dtype = static_cast<uint8_t>(input.dtype);
    request.op = path.op;
    request.root = path.root;
    request.input = input.data;
    request.output = output.data;
    request.count = input.count;
    switch (path.operation) {
    case all_reduce:
    case reduce:
        return reduces(input.dtype, path.op);
    case broadcast:
    case barrier:
        return true;
    case gather:
        return tensors_of(path) == 1 || output.count == size * input.count;
    case scatter:
        request.count = output.count;
        return tensors_of(path) == 1 || input.count == size * output.count;
    case all_gather:
        return output.count == size * input.count;
    case reduce_scatter:
        request.count = output.count;
        return input.count == size * output.count && reduces(input.dtype, path.op);
    case all_to_all_v:
        request.count = 0;
        request.input_counts.assign(size, input.count / size);
        request.output_counts = request.input_counts;
        return output.dimensions == input.dimensions && rows_of(output) == rows_of(input) &&
               rows_of(input) % size == 0 && rows_are_alike(output, input);
    default:
        return false;
    }
}

// Sets the elements for each rank of `tensor`, whose parts are lists of rows. Whether they add up.
bool split(const PlainTensor &tensor, PyObject *rows, size_t size, std::vector<size_t> &counts) {
    if (!PyList_Check(rows) || static_cast<size_t>(PyList_Size(rows)) != size) {
        return false;
    }
    counts.resize(size);
    const size_t have = rows_of(tensor), row = tensor.count / have;
    size_t all = 0;
    for (size_t one = 0; one < size; ++one) {
        PyObject *count = PyList_GetItem(rows, static_cast<Py_ssize_t>(one));
        const size_t found = PyLong_CheckExact(count) ? PyLong_AsSize_t(count) : have + 1;
        if (found > have) {  // or is negative, or too large
            PyErr_Clear();
            return false;
        }
        counts[one] = found * row;
        all += found;
    }
    return all == have;
}

// The same for an exchange in parts of any size, which `rows_out` and `rows_in` are.
bool is_uneven(const FastPath &path, const PlainTensor &output, const PlainTensor &input, PyObject *rows_out,
               PyObject *rows_in, Request &request) {
    const size_t size = static_cast<size_t>(path.on().size()), me = static_cast<size_t>(path.on().rank());
    request.operation = all_to_all_v;
    request.dtype = static_cast<uint8_t>(input.dtype);
    request.input = input.data;
    request.output = output.data;
    return output.dtype == input.dtype && input.dimensions > 0 && output.dimensions == input.dimensions &&
           rows_are_alike(output, input) && split(input, rows_in, size, request.input_counts) &&
           split(output, rows_out, size, request.output_counts) &&
           request.input_counts[me] == request.output_counts[me];
}

// Whether writing `output` changes `input` while it is read. The own part of a gathered output may be the input.
bool overlap(const FastPath &path, const PlainTensor &output, const PlainTensor &input) {
    const size_t item = item_bytes(input.dtype), own = static_cast<size_t>(path.on().rank()) * input.count * item;
    if (path.operation == all_gather && input.data == output.data + own) {
        return false;
    }
    return output.data < input.data + input.count * item && input.data < output.data + output.count * item;
}

// Sets what is asked of the group; false, with nothing begun, where the checked path has to be taken.
bool prepare(const FastPath &path, PyObject *const *arguments, Py_ssize_t count, Request &request) {
    request.user_call = path.user_call;
    const Py_ssize_t tensors = tensors_of(path);
    PlainTensor output, input;
    const bool has_rows = path.operation == all_to_all_v && count == 4;
    const bool uneven = has_rows && (arguments[2] != Py_None || arguments[3] != Py_None);
    if ((count != tensors && !has_rows) || forked || is_intercepted() ||
        (tensors > 0 && !is_plain(arguments[0], output)) || (tensors > 1 && !is_plain(arguments[1], input)) ||
        !(uneven ? is_uneven(path, output, input, arguments[2], arguments[3], request)
                 : is_request(path, output, tensors > 1 ? input : output, request))) {
        return false;
    }
    if (tensors > 1 && (overlap(path, output, input) || requires_grad(arguments[0]) || requires_grad(arguments[1]))) {
        return false;
    }
    Group &group = path.on();
    const bool small = path.operation != all_to_all_v && pieces_for(group, request) == 0;
    // The checked path says why it fails.
    return !group.closed() && !group.broken() && (small || group.ring_is_reserved());
}

// A new reference to the operation, which keeps its tensors.
PyObject *operation_on(const FastPath &path, const Shared &group, Handle task, PyObject *const *arguments) {
    const Py_ssize_t tensors = tensors_of(path);
    PyObject *kept = PyTuple_Pack(tensors, tensors > 0 ? arguments[0] : nullptr, tensors > 1 ? arguments[1] : nullptr);
    PyObject *operation = make_operation(group, std::move(task), kept);
    Py_XDECREF(kept);
    return operation;
}

// Returns True if all is done; False, with nothing begun, where the checked path has to be taken; where others are
// late, what `later` returns.
PyObject *attempt(const FastPath &path, PyObject *const *arguments, Py_ssize_t count) {
    release_what_ended();  // which may be the memory that the next call needs
    Request request;
    if (!prepare(path, arguments, count, request)) {
        Py_RETURN_FALSE;
    }
    Group &group = path.on();
    const Shared shared = *path.group;  // which another thread may end while this one waits
    Handle task;
    if (!group.run_at_once(request, looks_with_gil(group), task)) {
        try {
            const GilRelease released;
            task = group.start(std::move(request), false);
        } catch (const std::exception &) {
            Py_RETURN_FALSE;
        }
    }
    if (task && task->now() == pending) {
        const GilRelease released;
        group.wait(*task, at_once_s);
    }
    if (!task || task->now() == complete) {
        Py_RETURN_TRUE;
    }
    // The operation keeps its tensors: a signal may end `later` before it has taken hold of them.
    const Py_ssize_t tensors = tensors_of(path);
    PyObject *operation = operation_on(path, shared, std::move(task), arguments);
    PyObject *found = or_stay([&] {
        return PyObject_CallFunctionObjArgs(path.later, operation, tensors > 0 ? arguments[0] : nullptr,
                                            tensors > 1 ? arguments[1] : nullptr, nullptr);
    });
    Py_DECREF(operation);
    return found;
}

// Returns an operation under way; True if it is complete already; False as above.
PyObject *begin(const FastPath &path, PyObject *const *arguments, Py_ssize_t count) {
    Request request;
    if (!prepare(path, arguments, count, request)) {
        Py_RETURN_FALSE;
    }
    const Shared shared = *path.group;
    Handle task;
    try {
        const GilRelease released;
        task = shared->start(std::move(request), true);
    } catch (const std::exception &) {
        Py_RETURN_FALSE;
    }
    if (task->now() == complete) {
        Py_RETURN_TRUE;
    }
    return operation_on(path, shared, std::move(task), arguments);
}

PyObject *call_fast_path(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    return guarded([&] { return attempt(*reinterpret_cast<FastPath *>(self), arguments, count); });
}

PyMethodDef fast_path_method{"fast_path", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_fast_path)),
                             METH_FASTCALL, nullptr};

PyObject *call_begin(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    return guarded([&] { return begin(*reinterpret_cast<FastPath *>(self), arguments, count); });
}

PyMethodDef begin_method{"begin", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_begin)),
                         METH_FASTCALL, nullptr};

}  // namespace

// fast_path(operation, op, root, later, user_call) -> a function of tensors, or None where torch does not offer what it
// takes; `later` is None for one that starts the operation
PyObject *make_fast_path(PyObject *group, PyObject *arguments) {
    int operation, op, root, user_call = 0;
    PyObject *later;
    parse(arguments, "iiiO|i", &operation, &op, &root, &later, &user_call);
    if (!can_ask_tensors()) {
        Py_RETURN_NONE;
    }
    auto *made = new_object<FastPath>(type);
    made->operation = static_cast<uint8_t>(operation), made->op = static_cast<uint8_t>(op), made->root = root;
    made->user_call = static_cast<uint16_t>(user_call);
    made->group = nullptr;
    Py_INCREF(later);
    made->later = later;
    auto *self = reinterpret_cast<PyObject *>(made);
    try {
        made->group = new Shared(*reinterpret_cast<GroupObject *>(group)->group);
    } catch (...) {
        Py_DECREF(self);
        throw;
    }
    PyObject *function = PyCFunction_NewEx(later == Py_None ? &begin_method : &fast_path_method, self, nullptr);
    Py_DECREF(self);
    return function;
}

bool add_fast_path_type(PyObject *module) {
    type = PyType_FromSpec(&spec);
    return type != nullptr && PyModule_AddObjectRef(module, "FastPath", type) == 0;
}

}  // namespace shm
