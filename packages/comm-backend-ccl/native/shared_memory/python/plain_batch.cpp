#include "python/plain_batch.hpp"

#include "kernels/kernels.hpp"
#include "python/plain_tensor.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace shm {

namespace {

using Span = std::pair<char *, size_t>;  // bytes

struct Member {
    int dtype;
    Span memory;
};

struct Members : std::vector<Member> {
    bool any_grad = false, any_of_inference = false;
};

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

// Sets the members of a list; false where one of its tensors is not plain.
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
    return true;
}

// Whether the tensors of a list have the memory that they had. Other threads, and the program itself where it waits
// later, may have changed them since.
bool hold_still(PyObject *list, const Members &members) {
    if (list == nullptr || is_intercepted() || static_cast<size_t>(PyList_Size(list)) != members.size()) {
        return false;
    }
    for (size_t index = 0; index < members.size(); ++index) {
        const auto at = static_cast<Py_ssize_t>(index);
        PyObject *tensor = PyList_GetItem(list, at);
        if (tensor == nullptr) {  // what a tensor is asked may run Python code, which may change the list
            PyErr_Clear();
            return false;
        }
        prefetch(list, at);
        PlainTensor before;
        before.dtype = members[index].dtype, before.data = members[index].memory.first;
        before.count = members[index].memory.second / item_bytes(before.dtype);
        Py_INCREF(tensor);
        const bool still = holds_still(tensor, before);
        Py_DECREF(tensor);
        if (!still) {
            return false;
        }
    }
    return true;
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

// One dtype's tensors in their order, their bytes, and of each its elements.
struct OfOneDtype {
    Owned tensors;
    size_t bytes = 0;
    std::vector<uint64_t> sizes;
};

PyObject *by_dtype(PyObject *self, PyObject *) {
    return guarded([&]() -> PyObject * {
        const auto &batch = *reinterpret_cast<PlainBatch *>(self);
        std::array<OfOneDtype, dtypes> each;
        std::vector<int> in_order;
        for (size_t index = 0; index < batch.members->size(); ++index) {
            const Member &one = (*batch.members)[index];
            OfOneDtype &found = each[static_cast<size_t>(one.dtype)];
            if (!found.tensors) {
                in_order.push_back(one.dtype);
                found.tensors = owned(PyList_New(0));
            }
            // The list of all may be shorter by now.
            PyObject *tensor = PyList_GetItem(batch.tensors, static_cast<Py_ssize_t>(index));
            if (tensor == nullptr || PyList_Append(found.tensors.get(), tensor) != 0) {
                throw PythonError();
            }
            found.bytes += one.memory.second;
            found.sizes.push_back(one.memory.second / item_bytes(one.dtype));
        }
        Owned result = owned(PyDict_New());
        for (const int code : in_order) {
            const OfOneDtype &found = each[static_cast<size_t>(code)];
            const Owned value = owned(Py_BuildValue("Ony#", found.tensors.get(), static_cast<Py_ssize_t>(found.bytes),
                                                    reinterpret_cast<const char *>(found.sizes.data()),
                                                    static_cast<Py_ssize_t>(found.sizes.size() * sizeof(uint64_t))));
            const Owned key = owned(PyLong_FromLong(code));
            if (PyDict_SetItem(result.get(), key.get(), value.get()) != 0) {
                throw PythonError();
            }
        }
        return result.release();
    });
}

// Where tensors of each dtype go, or come from; null for those that stay. Whether they fill these places.
using Places = std::array<char *, dtypes>;

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

void copy(const Members &members, Places places, bool packs) {
    const GilRelease released;
    for (const auto &[dtype, memory] : members) {
        char *&place = places[static_cast<size_t>(dtype)];
        if (place != nullptr) {
            std::memcpy(packs ? place : memory.first, packs ? memory.first : place, memory.second);
            place += memory.second;
        }
    }
}

// Counts that the tensors of some dtypes were written; false where this is left to Python.
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

PyObject *pack(PyObject *self, PyObject *buckets) {
    return guarded([&] {
        const Members &members = *reinterpret_cast<PlainBatch *>(self)->members;
        Places places{};
        const bool fits = find_places(members, buckets, places);
        if (fits) {
            copy(members, places, true);
        }
        return PyBool_FromLong(fits);
    });
}

PyObject *unpack(PyObject *self, PyObject *buckets) {
    return guarded([&]() -> PyObject * {
        const auto &batch = *reinterpret_cast<PlainBatch *>(self);
        Places places{};
        if (!find_places(*batch.members, buckets, places) || !hold_still(batch.tensors, *batch.members)) {
            Py_RETURN_NONE;
        }
        copy(*batch.members, places, false);
        return PyBool_FromLong(count_versions(batch.tensors, *batch.members, places));
    });
}

PyObject *is_usual(PyObject *self, PyObject *) {
    const Members &members = *reinterpret_cast<PlainBatch *>(self)->members;
    return PyBool_FromLong(!members.any_grad && !members.any_of_inference);
}

PyMethodDef methods[] = {{"is_usual", is_usual, METH_NOARGS, nullptr},
                         {"by_dtype", by_dtype, METH_NOARGS, nullptr},
                         {"pack", pack, METH_O, nullptr},
                         {"unpack", unpack, METH_O, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(dealloc)},
                       {Py_tp_traverse, reinterpret_cast<void *>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void *>(clear)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};
PyType_Spec spec{"comm_backend_ccl._shared_memory.PlainBatch", sizeof(PlainBatch), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyObject *type = nullptr;

}  // namespace

PyObject *plain_batch(PyObject *, PyObject *list) {
    auto members = std::make_unique<Members>();
    if (!find_members(list, *members) || overlap(*members)) {
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
