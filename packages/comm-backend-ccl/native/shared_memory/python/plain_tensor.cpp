#include "python/plain_tensor.hpp"

#include "kernels/kernels.hpp"
#include "python/dlpack.hpp"

#include <dlfcn.h>

namespace shm {

namespace {

// libtorch's C shim has a stable ABI. It takes the address of the at::Tensor that a Python tensor holds, which is found
// by probing; DLPack says nothing of the storage, and takes integers of 4 bits for those of 8.
using Ask64 = int (*)(void *tensor, int64_t *result);
using Ask32 = int (*)(void *tensor, int32_t *result);
using AskAddress = int (*)(void *tensor, void **result);
using AskExtents = int (*)(void *tensor, int64_t **result);
struct Shim {
    Ask64 storage_size = nullptr, storage_offset = nullptr, dimensions = nullptr;  // bytes, elements
    Ask32 dtype = nullptr, device_type = nullptr;
    AskAddress data = nullptr;
    AskExtents sizes = nullptr, strides = nullptr;
    // Without a stable ABI, so they may be missing: c10::impl::TorchDispatchModeTLS::any_modes_set(skip_infra_modes),
    // c10::impl::tls_is_dispatch_key_included(key), torch::jit::tracer::getTracingState(), a reference to a shared
    // pointer, and the last one.
    bool (*any_modes)(bool) = nullptr;
    bool (*includes)(uint16_t) = nullptr;
    void *const *(*tracing_state)() = nullptr;
    // at::native::is_neg(at::Tensor const&) and is_inference, torch::autograd::impl::bump_version, and
    // c10::TensorImpl::requires_grad() const.
    bool (*is_neg)(const void *tensor) = nullptr, (*is_inference)(const void *tensor) = nullptr;
    void (*bump_version)(const void *tensor) = nullptr;
    bool (*requires_grad)(const void *impl) = nullptr;
    size_t tensor_at = 0;  // of the Python object, in bytes
    // Of a TensorImpl and no subclass of it, which may have no memory or no sizes, and throws then.
    const void *vtable = nullptr;
};
constexpr int32_t torch_uint8 = 0, torch_int8 = 1, torch_cpu = 0;
// A tensor in Python is a head and a few words; none of those that are looked at is beyond it.
constexpr size_t head_words = 2, last_word = 4;

const dlpack::ExchangeApi *exchange = nullptr;
PyObject *tensor_type = nullptr, *is_neg = nullptr, *is_inference = nullptr, *is_intercepted_object = nullptr;
PyObject *uint8_dtype = nullptr, *int8_dtype = nullptr;
Shim shim;
uint16_t transforms_key = 0;

void *inner(PyObject *object) { return reinterpret_cast<char *>(object) + shim.tensor_at; }

const void *impl(PyObject *object) { return *static_cast<const void *const *>(inner(object)); }

int code_of(const dlpack::Tensor &tensor) {
    if (tensor.lanes != 1) {
        return -1;
    }
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
int64_t elements_of(int64_t dimensions, const int64_t *sizes, const int64_t *strides) {
    int64_t count = 1;
    for (int64_t dimension = dimensions; dimension-- > 0;) {
        if (sizes[dimension] != 1 && strides[dimension] != count) {
            return -1;
        }
        count *= sizes[dimension];
    }
    return count;
}

// Of a c10::ScalarType, or -1.
int code_of(int32_t torch_dtype) {
    switch (torch_dtype) {
    case torch_uint8:
        return uint8;
    case torch_int8:
        return int8;
    case 2:
        return int16;
    case 3:
        return int32;
    case 4:
        return int64;
    case 5:
        return float16;
    case 6:
        return float32;
    case 7:
        return float64;
    case 11:
        return boolean;
    case 15:
        return bfloat16;
    default:
        return -1;
    }
}

// What a method without arguments returns, as an integer; -1 without an exception where it does not.
int64_t asked(PyObject *object, const char *first, const char *second = nullptr) {
    PyObject *found = PyObject_CallMethod(object, first, nullptr);
    if (found != nullptr && second != nullptr) {
        PyObject *next = PyObject_CallMethod(found, second, nullptr);
        Py_DECREF(found);
        found = next;
    }
    const long long value = found == nullptr ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    PyErr_Clear();
    return value;
}

bool is_dtype(PyObject *object, PyObject *dtype) {
    PyObject *found = PyObject_GetAttrString(object, "dtype");
    const bool same = found == dtype;
    Py_XDECREF(found);
    PyErr_Clear();
    return same;
}

bool is_within(int code, int64_t storage_bytes, int64_t offset, int64_t elements) {
    return offset >= 0 && storage_bytes / static_cast<int64_t>(item_bytes(code)) - offset >= elements;
}

// Whether the storage holds all elements, and those of 8 bits are what DLPack takes them for.
bool holds(PyObject *object, int code, int64_t elements) {
    int64_t storage = -1, offset = -1;
    if (shim.storage_size != nullptr) {
        int32_t dtype = -1;
        if ((code == uint8 || code == int8) &&
            (shim.dtype(inner(object), &dtype) != 0 || dtype != (code == uint8 ? torch_uint8 : torch_int8))) {
            return false;
        }
        if (shim.storage_size(inner(object), &storage) != 0 || shim.storage_offset(inner(object), &offset) != 0) {
            return false;
        }
    } else {
        if ((code == uint8 || code == int8) && !is_dtype(object, code == uint8 ? uint8_dtype : int8_dtype)) {
            return false;
        }
        storage = asked(object, "untyped_storage", "nbytes");
        offset = asked(object, "storage_offset");
    }
    return is_within(code, storage, offset, elements);
}

// What is_plain() finds of a tensor on the CPU, a few times as fast as through DLPack.
bool is_plain_by_shim(PyObject *object, PlainTensor &found) {
    void *const tensor = inner(object);
    const void *const memory = *static_cast<const void *const *>(tensor);
    if (*static_cast<const void *const *>(memory) != shim.vtable) {
        return false;
    }
    int32_t device_type = -1, dtype = -1;
    int64_t dimensions = -1, *sizes = nullptr, *strides = nullptr, storage = -1, offset = -1;
    void *data = nullptr;
    if (shim.device_type(tensor, &device_type) != 0 || device_type != torch_cpu || shim.dtype(tensor, &dtype) != 0) {
        return false;
    }
    found.dtype = code_of(dtype);
    if (found.dtype < 0 || shim.dimensions(tensor, &dimensions) != 0 || shim.sizes(tensor, &sizes) != 0 ||
        shim.strides(tensor, &strides) != 0) {
        return false;
    }
    const int64_t elements = elements_of(dimensions, sizes, strides);
    if (elements <= 0 || shim.storage_size(tensor, &storage) != 0 || shim.storage_offset(tensor, &offset) != 0 ||
        !is_within(found.dtype, storage, offset, elements) || shim.is_neg(tensor) || shim.data(tensor, &data) != 0 ||
        data == nullptr) {
        return false;
    }
    found.data = static_cast<char *>(data);
    found.count = static_cast<size_t>(elements);
    found.device = 0;
    found.shape = sizes;
    found.dimensions = static_cast<int>(dimensions);
    return true;
}

// Whether `method` of the tensor returns False.
bool denies(PyObject *method, PyObject *tensor) {
    PyObject *found = PyObject_CallFunctionObjArgs(method, tensor, nullptr);
    const bool denied = found == Py_False;
    Py_XDECREF(found);
    PyErr_Clear();
    return denied;
}

// The predicate of sequences that Python calls; where it does not know better, it asks the one in Python.
struct Predicate {
    PyObject_HEAD PyObject *otherwise;
    uint32_t dtypes;  // a bit for each code
    int32_t device;   // DLPack's type
    bool inference, grad;
};

int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(reinterpret_cast<PyObject *>(Py_TYPE(self)));
    Py_VISIT(reinterpret_cast<Predicate *>(self)->otherwise);
    return 0;
}

int clear(PyObject *self) {
    Py_CLEAR(reinterpret_cast<Predicate *>(self)->otherwise);
    return 0;
}

void dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    free_object(self);
}

PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(dealloc)},
                       {Py_tp_traverse, reinterpret_cast<void *>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void *>(clear)},
                       {0, nullptr}};
PyType_Spec spec{"comm_backend_ccl._shared_memory.PlainTensors", sizeof(Predicate), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyObject *predicate_type = nullptr;

bool are_plain(const Predicate &predicate, PyObject *tensors) {
    const bool is_list = PyList_Check(tensors) != 0;
    if (!is_list && !PyTuple_Check(tensors)) {
        return false;
    }
    if (is_intercepted()) {
        return false;
    }
    int dtype = -1, device = -1;
    // Asked again for each: what a tensor is asked may run Python code, which may change the list.
    for (Py_ssize_t index = 0; index < (is_list ? PyList_Size(tensors) : PyTuple_Size(tensors)); ++index) {
        PyObject *tensor = is_list ? PyList_GetItem(tensors, index) : PyTuple_GetItem(tensors, index);
        PlainTensor found;
        Py_INCREF(tensor);
        const bool taken = is_plain(tensor, found, predicate.device) && (dtype < 0 || found.dtype == dtype) &&
                           (device < 0 || found.device == device) && (predicate.dtypes >> found.dtype & 1) != 0 &&
                           (predicate.inference || !is_made_in_inference_mode(tensor)) &&
                           (predicate.grad || !requires_grad(tensor));
        Py_DECREF(tensor);
        if (!taken) {
            return false;
        }
        dtype = found.dtype, device = found.device;
    }
    return true;
}

PyObject *call_predicate(PyObject *self, PyObject *tensors) {
    return guarded([&] {
        const auto &predicate = *reinterpret_cast<Predicate *>(self);
        if (are_plain(predicate, tensors)) {
            Py_RETURN_TRUE;
        }
        return PyObject_CallFunctionObjArgs(predicate.otherwise, tensors, nullptr);
    });
}

PyMethodDef predicate_method{"are_plain", call_predicate, METH_O, nullptr};

// Whether the shim counts that a probe was written.
bool counts_versions(const Shim &found, PyObject *tensor) {
    const auto version = [&] {
        PyObject *now = PyObject_GetAttrString(tensor, "_version");
        const long long value = now == nullptr ? -1 : PyLong_AsLongLong(now);
        Py_XDECREF(now);
        PyErr_Clear();
        return value;
    };
    const long long before = version();
    found.bump_version(reinterpret_cast<char *>(tensor) + found.tensor_at);
    return before >= 0 && version() == before + 1;
}

// Sets the shim where it says of every probe, a tuple of a tensor, the address of its TensorImpl, the bytes of its
// storage, its offset there in elements, torch's code of its dtype, whether it requires a gradient and whether it was
// made in inference mode, what Python says of it.
void find_shim(PyObject *probes) {
    shim = Shim{};
    void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) {
        return;
    }
    Shim found;
    found.storage_size = reinterpret_cast<Ask64>(dlsym(library, "aoti_torch_get_storage_size"));
    found.storage_offset = reinterpret_cast<Ask64>(dlsym(library, "aoti_torch_get_storage_offset"));
    found.dtype = reinterpret_cast<Ask32>(dlsym(library, "aoti_torch_get_dtype"));
    found.any_modes =
        reinterpret_cast<bool (*)(bool)>(dlsym(library, "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb"));
    found.includes = reinterpret_cast<bool (*)(uint16_t)>(
        dlsym(library, "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"));
    found.tracing_state =
        reinterpret_cast<void *const *(*)()>(dlsym(library, "_ZN5torch3jit6tracer15getTracingStateEv"));
    found.is_neg = reinterpret_cast<bool (*)(const void *)>(dlsym(library, "_ZN2at6native6is_negERKNS_6TensorE"));
    found.is_inference =
        reinterpret_cast<bool (*)(const void *)>(dlsym(library, "_ZN2at6native12is_inferenceERKNS_6TensorE"));
    found.bump_version = reinterpret_cast<void (*)(const void *)>(
        dlsym(library, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"));
    // Of libc10.so, which this library needs.
    found.requires_grad =
        reinterpret_cast<bool (*)(const void *)>(dlsym(library, "_ZNK3c1010TensorImpl13requires_gradEv"));
    found.device_type = reinterpret_cast<Ask32>(dlsym(library, "aoti_torch_get_device_type"));
    found.dimensions = reinterpret_cast<Ask64>(dlsym(library, "aoti_torch_get_dim"));
    found.sizes = reinterpret_cast<AskExtents>(dlsym(library, "aoti_torch_get_sizes"));
    found.strides = reinterpret_cast<AskExtents>(dlsym(library, "aoti_torch_get_strides"));
    found.data = reinterpret_cast<AskAddress>(dlsym(library, "aoti_torch_get_data_ptr"));
    dlclose(library);  // torch holds it
    if (found.storage_size == nullptr || found.storage_offset == nullptr || found.dtype == nullptr ||
        found.device_type == nullptr || found.dimensions == nullptr || found.data == nullptr ||
        found.sizes == nullptr || found.strides == nullptr) {
        return;
    }
    const Py_ssize_t count = PySequence_Size(probes);
    for (size_t word = head_words; word <= last_word; ++word) {
        found.tensor_at = word * sizeof(void *);
        found.vtable = nullptr;
        bool right = count > 0, are_alike = found.is_neg != nullptr;
        for (Py_ssize_t index = 0; right && index < count; ++index) {
            PyObject *probe = PySequence_GetItem(probes, index), *tensor = nullptr;
            unsigned long long impl;
            long long size, offset;
            int dtype, grad, inference;
            right = probe != nullptr &&
                    PyArg_ParseTuple(probe, "OKLLipp", &tensor, &impl, &size, &offset, &dtype, &grad, &inference);
            void *at = reinterpret_cast<char *>(tensor) + found.tensor_at;
            int64_t found_size, found_offset;
            int32_t found_dtype;
            right = right && reinterpret_cast<PyObject *>(Py_TYPE(tensor)) == tensor_type &&
                    *static_cast<unsigned long long *>(at) == impl && found.storage_size(at, &found_size) == 0 &&
                    found_size == size && found.storage_offset(at, &found_offset) == 0 && found_offset == offset &&
                    found.dtype(at, &found_dtype) == 0 && found_dtype == dtype &&
                    (found.is_neg == nullptr || !found.is_neg(at)) &&
                    (found.is_inference == nullptr || found.is_inference(at) == (inference != 0)) &&
                    (found.requires_grad == nullptr ||
                     found.requires_grad(*static_cast<void *const *>(at)) == (grad != 0)) &&
                    (found.bump_version == nullptr || inference != 0 || counts_versions(found, tensor));
            if (right) {
                const void *const vtable = **static_cast<const void *const *const *>(at);
                are_alike = are_alike && (index == 0 || vtable == found.vtable);
                found.vtable = vtable;
            }
            Py_XDECREF(probe);
        }
        if (PyErr_Occurred()) {
            throw PythonError();
        }
        if (right) {
            found.vtable = are_alike ? found.vtable : nullptr;
            shim = found;
            return;
        }
    }
}

}  // namespace

bool can_ask_tensors() { return exchange != nullptr; }

bool is_tensor(PyObject *object) { return reinterpret_cast<PyObject *>(Py_TYPE(object)) == tensor_type; }

bool is_intercepted() {
    if (shim.any_modes != nullptr && shim.includes != nullptr && shim.tracing_state != nullptr) {
        return shim.any_modes(false) || shim.includes(transforms_key) || *shim.tracing_state() != nullptr;
    }
    PyObject *found = PyObject_CallFunctionObjArgs(is_intercepted_object, nullptr);
    const bool none = found == Py_False;
    Py_XDECREF(found);
    PyErr_Clear();
    return !none;
}

bool is_plain(PyObject *object, PlainTensor &found, int32_t device) {
    if (!is_tensor(object)) {
        return false;
    }
    if (device == dlpack::cpu && shim.vtable != nullptr) {
        return is_plain_by_shim(object, found);
    }
    dlpack::Tensor tensor;
    if (exchange->tensor_from_object(object, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    found.dtype = code_of(tensor);
    const int64_t elements = found.dtype < 0 ? -1 : elements_of(tensor.dimensions, tensor.shape, tensor.strides);
    if (tensor.device_type != device || elements <= 0 || tensor.data == nullptr ||
        !holds(object, found.dtype, elements)) {
        return false;
    }
    found.data = static_cast<char *>(tensor.data) + tensor.byte_offset;
    found.count = static_cast<size_t>(elements);
    found.device = tensor.device_id;
    found.shape = tensor.shape;
    found.dimensions = tensor.dimensions;
    // DLPack does not say whether a flag negates what the memory holds.
    return shim.is_neg != nullptr ? !shim.is_neg(inner(object)) : denies(is_neg, object);
}

void prefetch_tensor(PyObject *object) {
    if (shim.tensor_at != 0 && is_tensor(object)) {
        const char *memory = static_cast<const char *>(impl(object));
        __builtin_prefetch(memory);
        __builtin_prefetch(memory + 64);
        __builtin_prefetch(memory + 128);
    }
}

bool holds_still(PyObject *object, const PlainTensor &before) {
    PlainTensor now;
    return is_plain(object, now) && now.dtype == before.dtype && now.data == before.data && now.count == before.count;
}

bool is_made_in_inference_mode(PyObject *tensor) {
    return shim.is_inference != nullptr ? shim.is_inference(inner(tensor)) : !denies(is_inference, tensor);
}

bool can_count_versions() { return shim.bump_version != nullptr; }

bool count_version(PyObject *tensor) {
    if (shim.bump_version == nullptr) {
        return false;
    }
    shim.bump_version(inner(tensor));
    return true;
}

bool requires_grad(PyObject *tensor) {
    if (shim.requires_grad != nullptr) {
        return shim.requires_grad(impl(tensor));
    }
    static PyObject *name = PyUnicode_InternFromString("requires_grad");
    PyObject *found = PyObject_GetAttr(tensor, name);
    const bool required = found != Py_False;
    Py_XDECREF(found);
    PyErr_Clear();
    return required;
}

// bind_torch(Tensor, uint8, int8, probes, is_intercepted, key of transforms) -> whether the C shim is used
PyObject *bind_torch(PyObject *, PyObject *arguments) {
    PyObject *type, *uint8_object, *int8_object, *probes, *intercepted;
    parse(arguments, "OOOOOH", &type, &uint8_object, &int8_object, &probes, &intercepted, &transforms_key);
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    PyObject *neg = capsule == nullptr ? nullptr : PyObject_GetAttrString(type, "is_neg");
    PyObject *inference = neg == nullptr ? nullptr : PyObject_GetAttrString(type, "is_inference");
    const dlpack::ExchangeApi *table = nullptr;
    if (inference != nullptr) {
        table = static_cast<dlpack::ExchangeApi *>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    }
    PyErr_Clear();
    Py_XDECREF(capsule);
    while (table != nullptr && table->major != dlpack::major_version) {
        table = table->previous;
    }
    if (table == nullptr || table->tensor_from_object == nullptr) {
        Py_XDECREF(neg);
        Py_XDECREF(inference);
        Py_RETURN_FALSE;
    }
    for (PyObject *one : {type, uint8_object, int8_object, intercepted}) {
        Py_INCREF(one);
    }
    tensor_type = type, is_neg = neg, is_inference = inference, uint8_dtype = uint8_object, int8_dtype = int8_object;
    is_intercepted_object = intercepted;
    exchange = table;
    find_shim(probes);
    return PyBool_FromLong(shim.storage_size != nullptr);
}

// plain_tensor(object) -> the code of its dtype, or None where it is none
PyObject *plain_tensor(PyObject *, PyObject *object) {
    PlainTensor found;
    if (!can_ask_tensors() || !is_plain(object, found)) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLong(found.dtype);
}

// plain_tensors(device, dtypes, inference, grad, otherwise) -> the predicate, or None where torch does not offer what
// it asks. Where it does not accept tensors itself, it says what `otherwise`, the one in Python, does; `device` is
// DLPack's type, `dtypes` has a bit for each code.
PyObject *plain_tensors(PyObject *, PyObject *arguments) {
    unsigned int dtypes;
    int device, inference, grad;
    PyObject *otherwise;
    parse(arguments, "iIppO", &device, &dtypes, &inference, &grad, &otherwise);
    if (!can_ask_tensors()) {
        Py_RETURN_NONE;
    }
    auto *made = new_object<Predicate>(predicate_type);
    made->device = device, made->dtypes = dtypes, made->inference = inference != 0, made->grad = grad != 0;
    Py_INCREF(otherwise);
    made->otherwise = otherwise;
    auto *self = reinterpret_cast<PyObject *>(made);
    PyObject *function = PyCFunction_NewEx(&predicate_method, self, nullptr);
    Py_DECREF(self);
    return function;
}

bool add_predicate_type(PyObject *module) {
    predicate_type = PyType_FromSpec(&spec);
    return predicate_type != nullptr && PyModule_AddObjectRef(module, "PlainTensors", predicate_type) == 0;
}

}  // namespace shm
