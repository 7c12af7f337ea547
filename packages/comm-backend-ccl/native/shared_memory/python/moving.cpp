#include "python/moving.hpp"

#include "kernels/kernels.hpp"
#include "python/plain_tensor.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace shm {

namespace {

using Span = std::pair<char *, size_t>;  // bytes

struct Kind {
    int dtype;
    Py_ssize_t count;
    size_t bytes;
};

// Adds the memory of each tensor of a list, with its dtype; false where one of them is not plain.
template <class Add>
bool each_plain(PyObject *list, Add add) {
    if (!can_ask_tensors() || PyList_Check(list) == 0 || is_intercepted()) {
        return false;
    }
    // Asked again for each: what a tensor is asked may run Python code, which may change the list.
    for (Py_ssize_t index = 0; index < PyList_Size(list); ++index) {
        PyObject *tensor = PyList_GetItem(list, index);
        PlainTensor found;
        Py_INCREF(tensor);
        const bool plain = is_plain(tensor, found);
        Py_DECREF(tensor);
        if (!plain) {
            return false;
        }
        add(found.dtype, Span(found.data, found.count * item_bytes(found.dtype)));
    }
    return true;
}

struct Bucket {
    int dtype;
    char *begin;
    size_t bytes, found;
};

struct Copy {
    char *in_bucket;
    Span of_tensor;
};

std::vector<Bucket> buckets_of(PyObject *list) {
    std::vector<Bucket> found;
    const Py_ssize_t count = PySequence_Size(list);
    for (Py_ssize_t index = 0; index < count; ++index) {
        PyObject *item = PySequence_GetItem(list, index);
        unsigned long long begin;
        Py_ssize_t bytes;
        int dtype;
        const bool parsed = item != nullptr && PyArg_ParseTuple(item, "iKn", &dtype, &begin, &bytes) != 0;
        Py_XDECREF(item);
        if (!parsed) {
            throw PythonError();
        }
        found.push_back({dtype, reinterpret_cast<char *>(begin), static_cast<size_t>(bytes), 0});
    }
    if (count < 0) {
        throw PythonError();
    }
    return found;
}

bool overlap(std::vector<Span> &spans) {
    if (!std::is_sorted(spans.begin(), spans.end())) {
        std::sort(spans.begin(), spans.end());
    }
    return std::adjacent_find(spans.begin(), spans.end(), [](const Span &one, const Span &next) {
               return one.first + one.second > next.first;
           }) != spans.end();
}

}  // namespace

PyObject *plain_layout(PyObject *, PyObject *list) {
    std::vector<Span> spans;
    std::vector<Kind> kinds;
    const bool plain = each_plain(list, [&](int dtype, Span span) {
        auto found = std::find_if(kinds.begin(), kinds.end(), [&](const Kind &kind) { return kind.dtype == dtype; });
        if (found == kinds.end()) {
            found = kinds.insert(found, Kind{dtype, 0, 0});
        }
        ++found->count;
        found->bytes += span.second;
        spans.push_back(span);
    });
    if (!plain || overlap(spans)) {
        Py_RETURN_NONE;
    }
    PyObject *layout = PyDict_New();
    for (const Kind &kind : kinds) {
        PyObject *dtype = PyLong_FromLong(kind.dtype);
        PyObject *sizes = Py_BuildValue("nn", kind.count, static_cast<Py_ssize_t>(kind.bytes));
        const bool added =
            layout != nullptr && dtype != nullptr && sizes != nullptr && PyDict_SetItem(layout, dtype, sizes) == 0;
        Py_XDECREF(dtype);
        Py_XDECREF(sizes);
        if (!added) {
            Py_XDECREF(layout);
            throw PythonError();
        }
    }
    return layout;
}

PyObject *move_plain(PyObject *, PyObject *arguments) {
    PyObject *list, *buckets;
    int joins;
    parse(arguments, "OOp", &list, &buckets, &joins);
    std::vector<Bucket> targets = buckets_of(buckets);
    std::vector<Copy> copies;
    const bool plain = each_plain(list, [&](int dtype, Span span) {
        for (Bucket &bucket : targets) {
            if (bucket.dtype == dtype) {
                bucket.found += span.second;
                if (bucket.found <= bucket.bytes) {
                    copies.push_back({bucket.begin + (bucket.found - span.second), span});
                }
            }
        }
    });
    if (!plain || std::any_of(targets.begin(), targets.end(),
                              [](const Bucket &bucket) { return bucket.found != bucket.bytes; })) {
        Py_RETURN_FALSE;
    }
    {
        const GilRelease released;
        for (const auto &[at, span] : copies) {
            std::memcpy(joins ? at : span.first, joins ? span.first : at, span.second);
        }
    }
    Py_RETURN_TRUE;
}

}  // namespace shm
