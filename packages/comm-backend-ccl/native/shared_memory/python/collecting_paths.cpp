#include "python/collecting_paths.hpp"

namespace shm {

namespace {

struct CollectingPaths {
    PyObject_HEAD PyObject *fallback, *threads, *make;
    // What the last thread got that collects: most calls of a block are of one kind.
    PyObject *last_key, *last_path;
    unsigned long last_thread;
};

struct CollectingPath {
    PyObject_HEAD PyObject *key, *runs, *return_value;
};

template <class Object, auto... members>
int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(reinterpret_cast<PyObject *>(Py_TYPE(self)));
    int stopped = 0;
    for (PyObject *held : {reinterpret_cast<Object *>(self)->*members...}) {
        stopped = stopped != 0 || held == nullptr ? stopped : visit(held, arg);
    }
    return stopped;
}

template <class Object, auto... members>
int clear(PyObject *self) {
    for (PyObject **held : {&(reinterpret_cast<Object *>(self)->*members)...}) {
        Py_CLEAR(*held);
    }
    return 0;
}

template <class Object, auto... members>
void dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    clear<Object, members...>(self);
    free_object(self);
}

PyObject *reference(PyObject *object) {
    Py_INCREF(object);
    return object;
}

// Borrowed: what the calling thread has collected so far, by key; nullptr where it collects nothing, or with an
// exception.
PyObject *known_to_this_thread(const CollectingPaths &paths) {
    PyObject *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    PyObject *known = thread == nullptr ? nullptr : PyDict_GetItemWithError(paths.threads, thread);
    Py_XDECREF(thread);
    return known;
}

void forget(CollectingPaths &paths) {
    Py_CLEAR(paths.last_key);
    Py_CLEAR(paths.last_path);
    paths.last_thread = 0;
}

// forget(): a thread begins or ends to collect
PyObject *forget_last(PyObject *self, PyObject *) {
    forget(*reinterpret_cast<CollectingPaths *>(self));
    Py_RETURN_NONE;
}

// Whether two keys are tuples of the same objects, which says less than that they are equal, and costs less to find.
bool are_same(PyObject *one, PyObject *other) {
    if (one == other) {
        return true;
    }
    if (one == nullptr || !PyTuple_CheckExact(one) || !PyTuple_CheckExact(other)) {
        return false;
    }
    const Py_ssize_t size = PyTuple_Size(one);
    bool same = PyTuple_Size(other) == size;
    for (Py_ssize_t index = 0; same && index < size; ++index) {
        same = PyTuple_GetItem(one, index) == PyTuple_GetItem(other, index);
    }
    return same;
}

PyObject *look_up(PyObject *self, PyObject *key) {
    auto &paths = *reinterpret_cast<CollectingPaths *>(self);
    if (paths.threads == nullptr) {  // the garbage collector has cleared it
        Py_RETURN_NONE;
    }
    const unsigned long thread = PyThread_get_thread_ident();
    if (paths.last_thread == thread && are_same(paths.last_key, key)) {
        return reference(paths.last_path);
    }
    PyObject *known = known_to_this_thread(paths);
    if (known == nullptr) {
        return PyErr_Occurred() != nullptr ? nullptr : PyObject_CallMethod(paths.fallback, "get", "(O)", key);
    }
    PyObject *found = PyDict_GetItemWithError(known, key);
    if (found != nullptr) {
        forget(paths);
        paths.last_key = reference(key);
        paths.last_path = reference(found);
        paths.last_thread = thread;
        return reference(found);
    }
    if (PyErr_Occurred() != nullptr) {
        return nullptr;
    }
    Py_INCREF(known);
    PyObject *made = PyObject_CallFunctionObjArgs(paths.make, key, nullptr);
    if (made != nullptr && made != Py_None && PyDict_SetItem(known, key, made) != 0) {
        Py_CLEAR(made);
    }
    Py_DECREF(known);
    return made;
}

int set_fallback(PyObject *self, PyObject *key, PyObject *value) {
    PyObject *fallback = reinterpret_cast<CollectingPaths *>(self)->fallback;
    if (fallback == nullptr || value == nullptr) {
        PyErr_SetString(PyExc_TypeError, "a fast path can be set, and not deleted");
        return -1;
    }
    return PyObject_SetItem(fallback, key, value);
}

// Borrowed: the list of the last run, which is one of this key.
PyObject *calls_of(const CollectingPath &path) {
    const Py_ssize_t count = PyList_Size(path.runs);
    PyObject *last = count > 0 ? PyList_GetItem(path.runs, count - 1) : nullptr;
    if (last != nullptr && PyTuple_GetItem(last, 0) == path.key) {
        return PyTuple_GetItem(last, 1);
    }
    PyObject *calls = PyList_New(0);
    PyObject *run = calls == nullptr ? nullptr : PyTuple_Pack(2, path.key, calls);
    const bool added = run != nullptr && PyList_Append(path.runs, run) == 0;
    Py_XDECREF(run);
    Py_XDECREF(calls);
    return added ? calls : nullptr;  // the list has it
}

PyObject *collect(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    const auto &path = *reinterpret_cast<CollectingPath *>(self);
    if (path.runs == nullptr) {  // the garbage collector has cleared it
        Py_RETURN_NONE;
    }
    PyObject *calls = calls_of(path);
    if (calls == nullptr) {
        return nullptr;
    }
    PyObject *call = count == 1 ? reference(arguments[0]) : PyTuple_New(count);
    for (Py_ssize_t index = 0; call != nullptr && count != 1 && index < count; ++index) {
        PyTuple_SetItem(call, index, reference(arguments[index]));
    }
    const bool added = call != nullptr && PyList_Append(calls, call) == 0;
    Py_XDECREF(call);
    return added ? reference(path.return_value) : nullptr;
}

PyMethodDef collect_method{"collect", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(collect)),
                           METH_FASTCALL, nullptr};
PyMethodDef paths_methods[] = {
    {"get", look_up, METH_O, nullptr}, {"forget", forget_last, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot paths_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void *>(
                        dealloc<CollectingPaths, &CollectingPaths::fallback, &CollectingPaths::threads,
                                &CollectingPaths::make, &CollectingPaths::last_key, &CollectingPaths::last_path>)},
    {Py_tp_traverse, reinterpret_cast<void *>(
                         traverse<CollectingPaths, &CollectingPaths::fallback, &CollectingPaths::threads,
                                  &CollectingPaths::make, &CollectingPaths::last_key, &CollectingPaths::last_path>)},
    {Py_tp_clear,
     reinterpret_cast<void *>(clear<CollectingPaths, &CollectingPaths::fallback, &CollectingPaths::threads,
                                    &CollectingPaths::make, &CollectingPaths::last_key, &CollectingPaths::last_path>)},
    {Py_tp_methods, paths_methods},
    {Py_mp_ass_subscript, reinterpret_cast<void *>(set_fallback)},
    {0, nullptr}};
PyType_Slot path_slots[] = {
    {Py_tp_dealloc,
     reinterpret_cast<void *>(
         dealloc<CollectingPath, &CollectingPath::key, &CollectingPath::runs, &CollectingPath::return_value>)},
    {Py_tp_traverse,
     reinterpret_cast<void *>(
         traverse<CollectingPath, &CollectingPath::key, &CollectingPath::runs, &CollectingPath::return_value>)},
    {Py_tp_clear,
     reinterpret_cast<void *>(
         clear<CollectingPath, &CollectingPath::key, &CollectingPath::runs, &CollectingPath::return_value>)},
    {0, nullptr}};
PyType_Spec paths_spec{"comm_backend_ccl._shared_memory.CollectingPaths", sizeof(CollectingPaths), 0,
                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, paths_slots};
PyType_Spec path_spec{"comm_backend_ccl._shared_memory.CollectingPath", sizeof(CollectingPath), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, path_slots};
PyObject *paths_type = nullptr, *path_type = nullptr;

}  // namespace

PyObject *collecting_paths(PyObject *, PyObject *arguments) {
    PyObject *fallback, *threads, *make;
    parse(arguments, "OO!O", &fallback, &PyDict_Type, &threads, &make);
    auto *made = new_object<CollectingPaths>(paths_type);
    made->fallback = reference(fallback);
    made->threads = reference(threads);
    made->make = reference(make);
    made->last_key = made->last_path = nullptr;
    made->last_thread = 0;
    return reinterpret_cast<PyObject *>(made);
}

PyObject *collecting_path(PyObject *, PyObject *arguments) {
    PyObject *key, *runs, *return_value;
    parse(arguments, "OO!O", &key, &PyList_Type, &runs, &return_value);
    auto *made = new_object<CollectingPath>(path_type);
    made->key = reference(key);
    made->runs = reference(runs);
    made->return_value = reference(return_value);
    auto *self = reinterpret_cast<PyObject *>(made);
    PyObject *function = PyCFunction_NewEx(&collect_method, self, nullptr);
    Py_DECREF(self);
    return function;
}

bool add_collecting_types(PyObject *module) {
    paths_type = PyType_FromSpec(&paths_spec);
    path_type = PyType_FromSpec(&path_spec);
    return paths_type != nullptr && path_type != nullptr &&
           PyModule_AddObjectRef(module, "CollectingPaths", paths_type) == 0 &&
           PyModule_AddObjectRef(module, "CollectingPath", path_type) == 0;
}

}  // namespace shm
