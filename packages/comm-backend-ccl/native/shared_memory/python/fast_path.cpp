// The shortest way: tensors in, nothing out. Everything but the tensors was settled before.

#include "python/module.hpp"

#include "python/dlpack.hpp"

#include <algorithm>

namespace shm {

namespace {

// Looks at other ranks' flags before other Python threads may run: a few microseconds, or one look where each gives the
// core to another process.
int looks_with_gil(const Group &group) { return group.crowded() ? 1 : std::min(400, group.spins()); }

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

struct Plain {
    char *data = nullptr;
    size_t count = 0;
    int dtype = float32;
};

// Whether it is a tensor that needs no more thought.
bool is_plain(PyObject *object, Plain &found) {
    dlpack::Tensor tensor;
    if (reinterpret_cast<PyObject *>(Py_TYPE(object)) != tensor_type) {
        return false;
    }
    if (exchange->tensor_from_object(object, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    found.dtype = code_of(tensor);
    const int64_t elements = found.dtype < 0 ? -1 : elements_of(tensor);
    if (tensor.device_type != dlpack::cpu || elements <= 0) {
        return false;
    }
    found.data = static_cast<char *>(tensor.data) + tensor.byte_offset;
    found.count = static_cast<size_t>(elements);
    // What the memory of a tensor that is negated by a flag holds is not what it means; DLPack does not tell.
    PyObject *negative = PyObject_CallFunctionObjArgs(is_neg, object, nullptr);
    const bool usual = negative == Py_False;
    Py_XDECREF(negative);
    if (!usual) {
        PyErr_Clear();
    }
    return usual;
}

struct FastPath {
    Shared group;
    uint8_t operation, op;
    int root;
    PyObject *later;
};

void end_fast_path(PyObject *capsule) {
    auto *path = static_cast<FastPath *>(PyCapsule_GetPointer(capsule, nullptr));
    Py_DECREF(path->later);
    if (!forked) {
        delete path;
    }
}

// How many tensors the operation is done with. In one, or on ranks that are not the root of a gather or scatter, there is
// neither output nor input apart.
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
        return path.group->rank() == path.root ? 2 : 1;
    default:
        return 2;
    }
}

// Whether `output` and `input`, which are one where there is one, are what the operation is done with.
bool is_request(const FastPath &path, const Plain &output, const Plain &input, Request &request) {
    const size_t size = static_cast<size_t>(path.group->size());
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
        return input.count == output.count && input.count % size == 0;
    default:
        return false;
    }
}

// Sets the elements for each rank of `tensor`, whose parts are lists of rows. Whether they add up.
bool split(const Plain &tensor, PyObject *rows, size_t size, std::vector<size_t> &counts) {
    if (!PyList_Check(rows) || static_cast<size_t>(PyList_Size(rows)) != size) {
        return false;
    }
    counts.resize(size);
    size_t all = 0;
    for (size_t one = 0; one < size; ++one) {
        counts[one] = PyLong_AsSize_t(PyList_GetItem(rows, static_cast<Py_ssize_t>(one)));
        if (counts[one] > tensor.count) {  // or no number
            PyErr_Clear();
            return false;
        }
        all += counts[one];
    }
    if (all == 0 || tensor.count % all != 0) {
        return false;
    }
    for (size_t &count : counts) {
        count *= tensor.count / all;
    }
    return true;
}

// The same for an exchange in parts of any size, which `rows_out` and `rows_in` are.
bool is_uneven(const FastPath &path, const Plain &output, const Plain &input, PyObject *rows_out, PyObject *rows_in,
               Request &request) {
    const size_t size = static_cast<size_t>(path.group->size());
    request.operation = all_to_all_v;
    request.dtype = static_cast<uint8_t>(input.dtype);
    request.input = input.data;
    request.output = output.data;
    return output.dtype == input.dtype && split(input, rows_in, size, request.input_counts) &&
           split(output, rows_out, size, request.output_counts);
}

// Returns True if all is done; False, with nothing begun, where the long way has to be taken; where others are late, what
// `later` returns.
PyObject *attempt(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    const auto &path = *static_cast<FastPath *>(PyCapsule_GetPointer(self, nullptr));
    const Py_ssize_t tensors = tensors_of(path);
    Plain output, input;
    Request request;
    const bool uneven = path.operation == all_to_all_v && count == 4;
    if ((count != tensors && !uneven) || forked || (tensors > 0 && !is_plain(arguments[0], output)) ||
        (tensors > 1 && !is_plain(arguments[1], input)) ||
        !(uneven ? is_uneven(path, output, input, arguments[2], arguments[3], request)
                 : is_request(path, output, tensors > 1 ? input : output, request))) {
        Py_RETURN_FALSE;
    }
    Group &group = *path.group;
    const bool small = path.operation != all_to_all_v && pieces_for(group, request) == 0;
    // What fails says why on the long way.
    if (group.closed() || group.broken() || (!small && !group.ring_is_reserved())) {
        Py_RETURN_FALSE;
    }
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
    PyObject *handle = PyLong_FromVoidPtr(new Held{path.group, std::move(task)});
    PyObject *first = tensors > 0 ? arguments[0] : nullptr, *second = tensors > 1 ? arguments[1] : nullptr;
    PyObject *found = PyObject_CallFunctionObjArgs(path.later, handle, first, second, nullptr);
    Py_DECREF(handle);
    return found;
}

PyObject *call_fast_path(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    try {
        return attempt(self, arguments, count);
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory();
    }
}

PyMethodDef fast_path_method{"fast_path", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_fast_path)),
                            METH_FASTCALL, nullptr};

}  // namespace

// path(group, operation, op, root, later) -> callable, or None where torch does not offer what it takes
PyObject *make_fast_path(PyObject *, PyObject *arguments) {
    unsigned long long group;
    int operation, op, root;
    PyObject *later;
    if (!PyArg_ParseTuple(arguments, "KiiiO", &group, &operation, &op, &root, &later)) {
        return nullptr;
    }
    if (exchange == nullptr) {
        Py_RETURN_NONE;
    }
    Py_INCREF(later);
    auto *made = new FastPath{group_of(group), static_cast<uint8_t>(operation), static_cast<uint8_t>(op), root, later};
    PyObject *capsule = PyCapsule_New(made, nullptr, end_fast_path);
    if (capsule == nullptr) {
        Py_DECREF(later);
        delete made;
        return nullptr;
    }
    PyObject *function = PyCFunction_NewEx(&fast_path_method, capsule, nullptr);
    Py_DECREF(capsule);
    return function;
}

// meet(Tensor): what a tensor is, and how to ask it.
PyObject *bind_torch(PyObject *, PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    PyObject *method = capsule == nullptr ? nullptr : PyObject_GetAttrString(type, "is_neg");
    if (method == nullptr) {
        PyErr_Clear();
        Py_XDECREF(capsule);
        Py_RETURN_NONE;
    }
    auto *table = static_cast<dlpack::ExchangeApi *>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    while (table != nullptr && table->major != dlpack::major_version) {
        table = table->previous;
    }
    if (table == nullptr || table->tensor_from_object == nullptr) {
        PyErr_Clear();
        Py_DECREF(method);
        Py_RETURN_NONE;
    }
    exchange = table;
    is_neg = method;
    Py_INCREF(type);
    tensor_type = type;
    Py_RETURN_NONE;
}

}  // namespace shm
