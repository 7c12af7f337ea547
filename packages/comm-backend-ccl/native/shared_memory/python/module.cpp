// The Python module comm_backend_ccl._shared_memory, of the stable ABI of CPython 3.10; shared_memory.py is its only
// caller.

#include "kernels/kernels.hpp"
#include "python/collecting_paths.hpp"
#include "python/objects.hpp"
#include "python/plain_batch.hpp"
#include "python/plain_tensor.hpp"
#include "python/recording_functions.hpp"
#include "recorder/recorder.hpp"
#include "segment/arena.hpp"

#include <pthread.h>

#include <string>

namespace shm {

bool used = false, forked = false;

namespace {

// create(size) -> descriptor and inode of the memory of a group
PyObject *create(PyObject *, PyObject *arguments) {
    int size;
    parse(arguments, "i", &size);
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
}

PyObject *close_descriptor(PyObject *, PyObject *arguments) {
    int descriptor;
    parse(arguments, "i", &descriptor);
    close_memory(descriptor);
    Py_RETURN_NONE;
}

// record_to(descriptor): of the flight recorder's file, which may be closed afterwards; -1 ends it
PyObject *record_to(PyObject *, PyObject *arguments) {
    int descriptor;
    parse(arguments, "i", &descriptor);
    flight::record_to(descriptor);
    Py_RETURN_NONE;
}

PyObject *is_forked(PyObject *, PyObject *) { return PyBool_FromLong(forked); }

PyObject *statistics(PyObject *, PyObject *) {
    const Arena::Statistics found = Arena::instance().statistics();
    const auto number = [](size_t value) { return static_cast<Py_ssize_t>(value); };
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:n}", "tensors", number(found.tensors), "used_bytes",
                         number(found.used_bytes), "free_bytes", number(found.free_bytes), "retired_bytes",
                         number(found.retired_bytes), "peak_bytes", number(found.peak_bytes), "bound_bytes",
                         number(found.bound_bytes), "descriptors", number(found.descriptors));
}

// choose_kernels() -> the name of the kernels that the environment of this process asks for now, or the fastest
PyObject *choose_kernels_here(PyObject *, PyObject *) { return PyUnicode_FromString(choose_kernels().name); }

PyObject *facts(PyObject *, PyObject *) { return Py_BuildValue("{s:s}", "kernels", kernels().name); }

PyObject *names(const char *const *all, int count) {
    PyObject *found = PyTuple_New(count);
    for (int index = 0; found != nullptr && index < count; ++index) {
        PyTuple_SetItem(found, index, PyUnicode_FromString(all[index]));
    }
    return found;
}

// codes() -> the names of operations, dtypes, dtypes of messages alone, reductions and codecs, each in the order of its
// codes
PyObject *codes(PyObject *, PyObject *) {
    return Py_BuildValue("{s:N,s:N,s:N,s:N,s:N}", "operations", names(operation_names, operations), "dtypes",
                         names(dtype_names, dtypes), "message_dtypes", names(message_dtype_names, message_dtypes),
                         "ops", names(op_names, ops), "codecs", names(codec_names, codecs));
}

// Returns false, with Python's error set, where an item is no address.
bool read_addresses(PyObject *list, Py_ssize_t number, const void **to) {
    for (Py_ssize_t index = 0; index < number; ++index) {
        PyObject *item = PySequence_GetItem(list, index);
        to[index] = item == nullptr ? nullptr : PyLong_AsVoidPtr(item);
        Py_XDECREF(item);
    }
    return PyErr_Occurred() == nullptr;
}

// reduce(dtype, op, output, inputs, count), of memory that stays where it is
PyObject *reduce_here(PyObject *, PyObject *arguments) {
    int dtype, op;
    unsigned long long output;
    PyObject *list;
    Py_ssize_t count;
    parse(arguments, "iiKOn", &dtype, &op, &output, &list, &count);
    const Py_ssize_t inputs = PySequence_Size(list);
    if (!reduces(dtype, op) || inputs < 1 || inputs > max_ranks) {
        PyErr_SetString(PyExc_ValueError, "reduce: this dtype, reduction or number of inputs is not supported");
        return nullptr;
    }
    const void *addresses[max_ranks];
    if (!read_addresses(list, inputs, addresses)) {
        return nullptr;
    }
    {
        const GilRelease released;
        void *outputs[] = {reinterpret_cast<void *>(output)};
        kernels().reduce(dtype, op, outputs, 1, addresses, static_cast<int>(inputs), static_cast<size_t>(count), false);
    }
    Py_RETURN_NONE;
}

void check_codec(int codec, Py_ssize_t count, Py_ssize_t block, unsigned long long wire, Py_ssize_t bytes) {
    const auto most = static_cast<Py_ssize_t>(most_block);
    if (codec < 0 || codec >= codecs || count < 0 || block < 16 || block > most || block % 16 != 0) {
        throw std::invalid_argument("this codec, number of elements or size of a block is not supported");
    }
    const size_t needed = encoded_bytes(codec, static_cast<size_t>(count), static_cast<size_t>(block));
    if (bytes < 0 || static_cast<size_t>(bytes) != needed || wire % alignof(float) != 0) {
        throw std::invalid_argument("wire: got " + std::to_string(bytes) + " bytes for " + std::to_string(count) +
                                    " elements; expected " + std::to_string(needed) + ", aligned to 4");
    }
}

// encode(codec, source, error, count, block, wire, bytes), of memory that stays where it is; error may be 0
PyObject *encode_here(PyObject *, PyObject *arguments) {
    int codec;
    unsigned long long source, error, wire;
    Py_ssize_t count, block, bytes;
    parse(arguments, "iKKnnKn", &codec, &source, &error, &count, &block, &wire, &bytes);
    check_codec(codec, count, block, wire, bytes);
    {
        const GilRelease released;
        kernels().codecs.encode(codec, reinterpret_cast<const float *>(source), reinterpret_cast<float *>(error),
                                static_cast<size_t>(count), static_cast<size_t>(block), reinterpret_cast<void *>(wire));
    }
    Py_RETURN_NONE;
}

// decode(codec, wire, bytes, target, count, block, adds)
PyObject *decode_here(PyObject *, PyObject *arguments) {
    int codec, adds;
    unsigned long long wire, target;
    Py_ssize_t count, block, bytes;
    parse(arguments, "iKnKnnp", &codec, &wire, &bytes, &target, &count, &block, &adds);
    check_codec(codec, count, block, wire, bytes);
    {
        const GilRelease released;
        kernels().codecs.decode(codec, reinterpret_cast<const void *>(wire), reinterpret_cast<float *>(target),
                                static_cast<size_t>(count), static_cast<size_t>(block), adds != 0);
    }
    Py_RETURN_NONE;
}

// decode_reduce_encode(codec, wires, total, divisor, error, count, block, wire, bytes): all wires have as many bytes
PyObject *decode_reduce_encode_here(PyObject *, PyObject *arguments) {
    int codec;
    PyObject *list;
    unsigned long long total, error, wire;
    float divisor;
    Py_ssize_t count, block, bytes;
    parse(arguments, "iOKfKnnKn", &codec, &list, &total, &divisor, &error, &count, &block, &wire, &bytes);
    check_codec(codec, count, block, wire, bytes);
    const Py_ssize_t inputs = PySequence_Size(list);
    if (inputs < 0 || inputs > max_ranks) {
        throw std::invalid_argument("decode_reduce_encode: this number of inputs is not supported");
    }
    const void *addresses[max_ranks];
    if (!read_addresses(list, inputs, addresses)) {
        return nullptr;
    }
    {
        const GilRelease released;
        kernels().codecs.decode_reduce_encode(codec, addresses, static_cast<size_t>(inputs),
                                              reinterpret_cast<float *>(total), divisor,
                                              reinterpret_cast<float *>(error), static_cast<size_t>(count),
                                              static_cast<size_t>(block), reinterpret_cast<void *>(wire));
    }
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"create", engine_entry<create>, METH_VARARGS, nullptr},
                         {"close_descriptor", entry<close_descriptor>, METH_VARARGS, nullptr},
                         {"join", engine_entry<join>, METH_VARARGS, nullptr},
                         {"reduce", entry<reduce_here>, METH_VARARGS, nullptr},
                         {"plain_batch", entry<plain_batch>, METH_O, nullptr},
                         {"collecting_paths", entry<collecting_paths>, METH_VARARGS, nullptr},
                         {"collecting_path", entry<collecting_path>, METH_VARARGS, nullptr},
                         {"encode", entry<encode_here>, METH_VARARGS, nullptr},
                         {"decode", entry<decode_here>, METH_VARARGS, nullptr},
                         {"decode_reduce_encode", entry<decode_reduce_encode_here>, METH_VARARGS, nullptr},
                         {"recording_functions", entry<recording_functions>, METH_VARARGS, nullptr},
                         {"record_to", entry<record_to>, METH_VARARGS, nullptr},
                         {"is_forked", entry<is_forked>, METH_NOARGS, nullptr},
                         {"allocate", engine_entry<allocate>, METH_O, nullptr},
                         {"statistics", entry<statistics>, METH_NOARGS, nullptr},
                         {"facts", entry<facts>, METH_NOARGS, nullptr},
                         {"choose_kernels", entry<choose_kernels_here>, METH_NOARGS, nullptr},
                         {"codes", entry<codes>, METH_NOARGS, nullptr},
                         {"bind_torch", entry<bind_torch>, METH_VARARGS, nullptr},
                         {"plain_tensor", entry<plain_tensor>, METH_O, nullptr},
                         {"plain_tensors", entry<plain_tensors>, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition{
    PyModuleDef_HEAD_INIT, "_shared_memory", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

}  // namespace shm

PyMODINIT_FUNC PyInit__shared_memory() {  // NOLINT(bugprone-reserved-identifier): Python looks for it
    pthread_atfork([] { shm::Arena::instance().lock(); }, [] { shm::Arena::instance().unlock(); },
                   [] {
                       shm::Arena::instance().unlock();
                       shm::forked = shm::forked || shm::used;
                   });
    PyObject *module = PyModule_Create(&shm::definition);
    if (module != nullptr &&
        !(shm::add_group_type(module) && shm::add_operation_type(module) && shm::add_block_type(module) &&
          shm::add_fast_path_type(module) && shm::add_coalesced_path_type(module) && shm::add_predicate_type(module) &&
          shm::add_plain_batch_type(module) && shm::add_collecting_types(module) && shm::add_recording_type(module) &&
          PyModule_AddIntConstant(module, "LAYOUT", shm::layout_number) == 0)) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
