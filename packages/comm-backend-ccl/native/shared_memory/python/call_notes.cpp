#include "python/call_notes.hpp"

namespace shm {

namespace {

struct CallNotes {
    PyObject_HEAD PyObject *known, *usual, *make;
    unsigned long thread;
};

struct CallNote {
    PyObject_HEAD PyObject *key, *runs, *outcome;
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

PyObject *look_up(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    const auto &notes = *reinterpret_cast<CallNotes *>(self);
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "get: expected a key");
        return nullptr;
    }
    const bool is_own = PyThread_get_thread_ident() == notes.thread;
    PyObject *found = PyDict_GetItemWithError(is_own ? notes.known : notes.usual, arguments[0]);
    if (found != nullptr || PyErr_Occurred() != nullptr) {
        return found == nullptr ? nullptr : reference(found);
    }
    if (!is_own) {
        Py_RETURN_NONE;
    }
    PyObject *made = PyObject_CallFunctionObjArgs(notes.make, arguments[0], nullptr);
    if (made != nullptr && made != Py_None && PyDict_SetItem(notes.known, arguments[0], made) != 0) {
        Py_DECREF(made);
        return nullptr;
    }
    return made;
}

int set_usual(PyObject *self, PyObject *key, PyObject *value) {
    PyObject *usual = reinterpret_cast<CallNotes *>(self)->usual;
    return value == nullptr ? PyDict_DelItem(usual, key) : PyDict_SetItem(usual, key, value);
}

// Borrowed: the list of the last run, which is one of this key.
PyObject *calls_of(const CallNote &note) {
    const Py_ssize_t count = PyList_Size(note.runs);
    PyObject *last = count > 0 ? PyList_GetItem(note.runs, count - 1) : nullptr;
    if (last != nullptr && PyTuple_GetItem(last, 0) == note.key) {
        return PyTuple_GetItem(last, 1);
    }
    PyObject *calls = PyList_New(0);
    PyObject *run = calls == nullptr ? nullptr : PyTuple_Pack(2, note.key, calls);
    const bool added = run != nullptr && PyList_Append(note.runs, run) == 0;
    Py_XDECREF(run);
    Py_XDECREF(calls);
    return added ? calls : nullptr;  // the list has it
}

PyObject *take(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    const auto &note = *reinterpret_cast<CallNote *>(self);
    PyObject *calls = calls_of(note);
    if (calls == nullptr) {
        return nullptr;
    }
    PyObject *call = count == 1 ? reference(arguments[0]) : PyTuple_New(count);
    for (Py_ssize_t index = 0; call != nullptr && count != 1 && index < count; ++index) {
        PyTuple_SetItem(call, index, reference(arguments[index]));
    }
    const bool added = call != nullptr && PyList_Append(calls, call) == 0;
    Py_XDECREF(call);
    return added ? reference(note.outcome) : nullptr;
}

PyMethodDef take_method{"note", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(take)), METH_FASTCALL,
                        nullptr};
PyMethodDef notes_methods[] = {
    {"get", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(look_up)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot notes_slots[] = {
    {Py_tp_dealloc,
     reinterpret_cast<void *>(dealloc<CallNotes, &CallNotes::known, &CallNotes::usual, &CallNotes::make>)},
    {Py_tp_traverse,
     reinterpret_cast<void *>(traverse<CallNotes, &CallNotes::known, &CallNotes::usual, &CallNotes::make>)},
    {Py_tp_clear, reinterpret_cast<void *>(clear<CallNotes, &CallNotes::known, &CallNotes::usual, &CallNotes::make>)},
    {Py_tp_methods, notes_methods},
    {Py_mp_ass_subscript, reinterpret_cast<void *>(set_usual)},
    {0, nullptr}};
PyType_Slot note_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void *>(dealloc<CallNote, &CallNote::key, &CallNote::runs, &CallNote::outcome>)},
    {Py_tp_traverse, reinterpret_cast<void *>(traverse<CallNote, &CallNote::key, &CallNote::runs, &CallNote::outcome>)},
    {Py_tp_clear, reinterpret_cast<void *>(clear<CallNote, &CallNote::key, &CallNote::runs, &CallNote::outcome>)},
    {0, nullptr}};
PyType_Spec notes_spec{"comm_backend_ccl._shared_memory.CallNotes", sizeof(CallNotes), 0,
                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, notes_slots};
PyType_Spec note_spec{"comm_backend_ccl._shared_memory.CallNote", sizeof(CallNote), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, note_slots};
PyObject *notes_type = nullptr, *note_type = nullptr;

}  // namespace

PyObject *call_notes(PyObject *, PyObject *arguments) {
    PyObject *usual, *make;
    parse(arguments, "O!O", &PyDict_Type, &usual, &make);
    PyObject *known = PyDict_New();
    if (known == nullptr) {
        throw PythonError();
    }
    auto *made = new_object<CallNotes>(notes_type);
    made->known = known;
    made->usual = reference(usual);
    made->make = reference(make);
    made->thread = PyThread_get_thread_ident();
    return reinterpret_cast<PyObject *>(made);
}

PyObject *call_note(PyObject *, PyObject *arguments) {
    PyObject *key, *runs, *outcome;
    parse(arguments, "OO!O", &key, &PyList_Type, &runs, &outcome);
    auto *made = new_object<CallNote>(note_type);
    made->key = reference(key);
    made->runs = reference(runs);
    made->outcome = reference(outcome);
    auto *self = reinterpret_cast<PyObject *>(made);
    PyObject *function = PyCFunction_NewEx(&take_method, self, nullptr);
    Py_DECREF(self);
    return function;
}

bool add_call_note_types(PyObject *module) {
    notes_type = PyType_FromSpec(&notes_spec);
    note_type = PyType_FromSpec(&note_spec);
    return notes_type != nullptr && note_type != nullptr &&
           PyModule_AddObjectRef(module, "CallNotes", notes_type) == 0 &&
           PyModule_AddObjectRef(module, "CallNote", note_type) == 0;
}

}  // namespace shm
