#include "python/objects.hpp"
#include "segment/arena.hpp"

namespace shm {

namespace {

struct BlockObject {
    PyObject_HEAD void *begin;
};

PyObject *address(PyObject *self, void *) { return PyLong_FromVoidPtr(reinterpret_cast<BlockObject *>(self)->begin); }

void dealloc(PyObject *self) {
    void *begin = reinterpret_cast<BlockObject *>(self)->begin;
    free_object(self);
    if (begin != nullptr && !forked) {
        try {
            Arena::instance().free(begin);
        } catch (const std::bad_alloc &) {  // NOLINT(bugprone-empty-catch)
            // It stays in use: there was no memory to write down that it is free.
        }
    }
}

PyGetSetDef attributes[] = {{"address", address, nullptr, nullptr, nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(dealloc)}, {Py_tp_getset, attributes}, {0, nullptr}};
PyType_Spec spec{"comm_backend_ccl._shared_memory.Block", sizeof(BlockObject), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyObject *type = nullptr;

}  // namespace

// allocate(bytes) -> memory that is given back when the object ends
PyObject *allocate(PyObject *, PyObject *argument) {
    const size_t bytes = PyLong_AsSize_t(argument);
    if (PyErr_Occurred()) {
        return nullptr;
    }
    auto *made = new_object<BlockObject>(type);
    made->begin = nullptr;
    try {
        const GilRelease released;
        made->begin = Arena::instance().allocate(bytes);
    } catch (...) {
        Py_DECREF(reinterpret_cast<PyObject *>(made));
        throw;
    }
    return reinterpret_cast<PyObject *>(made);
}

bool add_block_type(PyObject *module) {
    type = PyType_FromSpec(&spec);
    return type != nullptr && PyModule_AddObjectRef(module, "Block", type) == 0;
}

}  // namespace shm
