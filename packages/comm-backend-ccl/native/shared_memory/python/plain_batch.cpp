#include "python/plain_batch.hpp"

#include "python/plain_tensor.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

namespace shm {

namespace {

using Span = decltype(Member::memory);

struct PlainBatch {
    PyObject_HEAD const Members *members;
    PyObject *tensors;
};

int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(reinterpret_cast<PyObject *>(Py_TYPE(self)));
    Py_VISIT(reinterpret_cast<PlainBatch *>(self)->tensors);
    return 0;
}

int clear(PyObject *self) {
    Py_CLEAR(reinterpret_cast<PlainBatch *>(self)->tensors);
    return 0;
}

void dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    delete reinterpret_cast<PlainBatch *>(self)->members;
    free_object(self);
}

constexpr Py_ssize_t ahead = 4;

// Many tensors do not fit into the cache.
void prefetch(PyObject *list, Py_ssize_t index) {
    if (index + 2 * ahead < PyList_Size(list)) {
        __builtin_prefetch(PyList_GetItem(list, index + 2 * ahead));
        prefetch_tensor(PyList_GetItem(list, index + ahead));
    }
}

bool overlap(const Members &members) {
    std::vector<Span> spans(members.size());
    std::transform(members.begin(), members.end(), spans.begin(), [](const Member &one) { return one.memory; });
    if (!std::is_sorted(spans.begin(), spans.end())) {
        std::sort(spans.begin(), spans.end());
    }
    return std::adjacent_find(spans.begin(), spans.end(), [](const Span &one, const Span &next) {
               return one.first + one.second > next.first;
           }) != spans.end();
}

template <bool packs>
void copy(const Members &members, Places places) {
    const GilRelease released;
    for (const auto &[dtype, memory] : members) {
        char *&place = places[static_cast<size_t>(dtype)];
        if (place != nullptr) {
            std::memcpy(packs ? place : memory.first, packs ? memory.first : place, memory.second);
            place += memory.second;
        }
    }
}

// The bytes of one dtype's tensors, and of each its elements.
struct SizesOfDtype {
    size_t bytes = 0;
    std::vector<uint64_t> each;
};

// sizes() -> {dtype: (bytes, elements of each), ...}
PyObject *sizes(PyObject *self, PyObject *) {
    return guarded([&]() -> PyObject * {
        const Members &members = *reinterpret_cast<PlainBatch *>(self)->members;
        std::array<SizesOfDtype, dtypes> by_dtype;
        std::vector<int> in_order;
        for (const Member &one : members) {
            SizesOfDtype &found = by_dtype[static_cast<size_t>(one.dtype)];
            if (found.each.empty()) {
                in_order.push_back(one.dtype);
                found.each.reserve(members.size());
            }
            found.bytes += one.memory.second;
            found.each.push_back(one.memory.second / item_bytes(one.dtype));
        }
        Owned result = owned(PyDict_New());
        for (const int code : in_order) {
            const SizesOfDtype &found = by_dtype[static_cast<size_t>(code)];
            const Owned value = owned(Py_BuildValue("ny#", static_cast<Py_ssize_t>(found.bytes),
                                                    reinterpret_cast<const char *>(found.each.data()),
                                                    static_cast<Py_ssize_t>(found.each.size() * sizeof(uint64_t))));
            const Owned key = owned(PyLong_FromLong(code));
            if (PyDict_SetItem(result.get(), key.get(), value.get()) != 0) {
                throw PythonError();
            }
        }
        return result.release();
    });
}

// tensors(dtype) -> a list of them
PyObject *tensors(PyObject *self, PyObject *dtype) {
    return guarded([&]() -> PyObject * {
        const auto &batch = *reinterpret_cast<PlainBatch *>(self);
        const long code = PyLong_AsLong(dtype);
        Owned found = owned(PyList_New(0));
        for (size_t index = 0; index < batch.members->size(); ++index) {
            if ((*batch.members)[index].dtype != code) {
                continue;
            }
            // The list of all may be shorter by now.
            PyObject *tensor = PyList_GetItem(batch.tensors, static_cast<Py_ssize_t>(index));
            if (tensor == nullptr || PyList_Append(found.get(), tensor) != 0) {
                throw PythonError();
            }
        }
        if (PyErr_Occurred() != nullptr) {
            throw PythonError();
        }
        return found.release();
    });
}

// Whether the tensors fill these buckets.
bool find_places(const Members &members, PyObject *buckets, Places &places) {
    std::array<size_t, dtypes> left{};
    const Py_ssize_t count = PySequence_Size(buckets);
    if (count < 0) {
        throw PythonError();
    }
    for (Py_ssize_t index = 0; index < count; ++index) {
        PyObject *item = PySequence_GetItem(buckets, index);
        unsigned long long begin = 0;
        Py_ssize_t bytes = 0;
        int dtype = 0;
        const bool parsed = item != nullptr && PyArg_ParseTuple(item, "iKn", &dtype, &begin, &bytes) != 0;
        Py_XDECREF(item);
        if (!parsed) {
            throw PythonError();
        }
        if (dtype < 0 || dtype >= dtypes || bytes <= 0) {
            return false;
        }
        places[static_cast<size_t>(dtype)] = reinterpret_cast<char *>(begin);
        left[static_cast<size_t>(dtype)] = static_cast<size_t>(bytes);
    }
    for (const Member &one : members) {
        const auto dtype = static_cast<size_t>(one.dtype);
        if (places[dtype] != nullptr) {
            if (one.memory.second > left[dtype]) {
                return false;
            }
            left[dtype] -= one.memory.second;
        }
    }
    return std::all_of(left.begin(), left.end(), [](size_t bytes) { return bytes == 0; });
}

// Whether the tensor at `index` of a list has the memory that it had. Other threads, and the program itself where it
// waits later, may have changed it since.
bool holds_still(PyObject *list, size_t index, const Member &member) {
    PyObject *tensor = PyList_GetItem(list, static_cast<Py_ssize_t>(index));
    if (tensor == nullptr) {
        PyErr_Clear();
        return false;
    }
    prefetch(list, static_cast<Py_ssize_t>(index));
    PlainTensor before;
    before.dtype = member.dtype, before.data = member.memory.first;
    before.count = member.memory.second / item_bytes(before.dtype);
    Py_INCREF(tensor);
    const bool still = holds_still(tensor, before);
    Py_DECREF(tensor);
    return still;
}

// Counts that the tensors which have a place were written; false where this is left to Python.
bool count_versions(PyObject *list, const Members &members, const Places &places) {
    if (members.any_of_inference) {
        return false;
    }
    for (size_t index = 0; index < members.size(); ++index) {
        if (places[static_cast<size_t>(members[index].dtype)] == nullptr) {
            continue;
        }
        // Another thread may have shortened the list.
        PyObject *tensor = PyList_GetItem(list, static_cast<Py_ssize_t>(index));
        if (tensor == nullptr) {
            PyErr_Clear();
            break;
        }
        const bool is_counted = is_tensor(tensor) && !is_made_in_inference_mode(tensor);
        if (is_counted && !count_version(tensor)) {
            return false;
        }
    }
    return true;
}

PyObject *pack_into(PyObject *self, PyObject *buckets) {
    return guarded([&] {
        const Members &members = *reinterpret_cast<PlainBatch *>(self)->members;
        Places places{};
        const bool fits = find_places(members, buckets, places);
        if (fits) {
            pack(members, places);
        }
        return PyBool_FromLong(fits);
    });
}

PyObject *unpack_from(PyObject *self, PyObject *buckets) {
    return guarded([&]() -> PyObject * {
        const auto &batch = *reinterpret_cast<PlainBatch *>(self);
        Places places{};
        if (!find_places(*batch.members, buckets, places) || !hold_still(batch.tensors, *batch.members)) {
            Py_RETURN_NONE;
        }
        copy<false>(*batch.members, places);
        return PyBool_FromLong(count_versions(batch.tensors, *batch.members, places));
    });
}

PyObject *is_usual(PyObject *self, PyObject *) {
    const Members &members = *reinterpret_cast<PlainBatch *>(self)->members;
    return PyBool_FromLong(!members.any_grad && !members.any_of_inference);
}

PyMethodDef methods[] = {{"is_usual", is_usual, METH_NOARGS, nullptr}, {"sizes", sizes, METH_NOARGS, nullptr},
                         {"tensors", tensors, METH_O, nullptr},        {"pack", pack_into, METH_O, nullptr},
                         {"unpack", unpack_from, METH_O, nullptr},     {nullptr, nullptr, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(dealloc)},
                       {Py_tp_traverse, reinterpret_cast<void *>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void *>(clear)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};
PyType_Spec spec{"comm_backend_ccl._shared_memory.PlainBatch", sizeof(PlainBatch), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyObject *type = nullptr;

}  // namespace

bool find_members(PyObject *list, Members &found) {
    if (!can_ask_tensors() || PyList_Check(list) == 0 || is_intercepted()) {
        return false;
    }
    found.reserve(static_cast<size_t>(PyList_Size(list)));
    // Asked again for each: what a tensor is asked may run Python code, which may change the list.
    for (Py_ssize_t index = 0; index < PyList_Size(list); ++index) {
        PyObject *tensor = PyList_GetItem(list, index);
        PlainTensor plain;
        prefetch(list, index);
        Py_INCREF(tensor);
        const bool is = is_plain(tensor, plain);
        if (is) {
            found.any_grad = found.any_grad || requires_grad(tensor);
            found.any_of_inference = found.any_of_inference || is_made_in_inference_mode(tensor);
        }
        Py_DECREF(tensor);
        if (!is) {
            return false;
        }
        found.push_back({plain.dtype, Span(plain.data, plain.count * item_bytes(plain.dtype))});
    }
    return !overlap(found);
}

void pack(const Members &members, Places places) { copy<true>(members, places); }

std::vector<size_t> unpack(PyObject *list, const Members &members, Places places) {
    std::vector<size_t> left;
    for (size_t index = 0; index < members.size(); ++index) {
        const auto &[dtype, memory] = members[index];
        char *&place = places[static_cast<size_t>(dtype)];
        if (holds_still(list, index, members[index])) {
            std::memcpy(memory.first, place, memory.second);
            count_version(PyList_GetItem(list, static_cast<Py_ssize_t>(index)));
        } else {
            left.push_back(index);
        }
        place += memory.second;
    }
    return left;
}

bool hold_still(PyObject *list, const Members &members) {
    if (list == nullptr || is_intercepted() || static_cast<size_t>(PyList_Size(list)) != members.size()) {
        return false;
    }
    for (size_t index = 0; index < members.size(); ++index) {
        if (!holds_still(list, index, members[index])) {
            return false;
        }
    }
    return true;
}

bool is_plain_batch(PyObject *object, const Members *&members, PyObject *&list) {
    if (reinterpret_cast<PyObject *>(Py_TYPE(object)) != type) {
        return false;
    }
    const auto &batch = *reinterpret_cast<PlainBatch *>(object);
    members = batch.members, list = batch.tensors;
    return list != nullptr;  // which the garbage collector may have cleared
}

PyObject *plain_batch(PyObject *, PyObject *list) {
    auto members = std::make_unique<Members>();
    if (!find_members(list, *members)) {
        Py_RETURN_NONE;
    }
    auto *made = new_object<PlainBatch>(type);
    Py_INCREF(list);
    made->tensors = list;
    made->members = members.release();
    return reinterpret_cast<PyObject *>(made);
}

bool add_plain_batch_type(PyObject *module) {
    type = PyType_FromSpec(&spec);
    return type != nullptr && PyModule_AddObjectRef(module, "PlainBatch", type) == 0;
}

}  // namespace shm
