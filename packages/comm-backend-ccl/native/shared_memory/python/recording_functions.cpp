#include "python/recording_functions.hpp"

#include "recorder/clock.hpp"
#include "recorder/layout.hpp"

#include <cstring>

namespace shm {

namespace {

using flight::Record;

// What the functions of one kind are bound to.
struct RecordedKind {
    PyObject_HEAD PyObject *kept, *numbers, *caller, *note_thread, *sites, *add_splits, *series;
    std::atomic<uint64_t> *count;
    Record *records;
    uint64_t mask, tag_word;
    int64_t signature;
    uint32_t kind;
    bool counts;
    // Most calls of a kind come from the place, and on the thread, of the last one.
    unsigned long last_thread;
    PyObject *last_code;
    int64_t last_at;
    uint32_t last_site;
};

PyObject *getframe = nullptr, *place_name = nullptr, *number_name = nullptr, *digest_name = nullptr, *type = nullptr;

constexpr PyObject *RecordedKind::*held[] = {
    &RecordedKind::kept,  &RecordedKind::numbers,    &RecordedKind::caller, &RecordedKind::note_thread,
    &RecordedKind::sites, &RecordedKind::add_splits, &RecordedKind::series, &RecordedKind::last_code};

int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(reinterpret_cast<PyObject *>(Py_TYPE(self)));
    for (const auto member : held) {
        Py_VISIT(reinterpret_cast<RecordedKind *>(self)->*member);
    }
    return 0;
}

int clear(PyObject *self) {
    for (const auto member : held) {
        Py_CLEAR(reinterpret_cast<RecordedKind *>(self)->*member);
    }
    return 0;
}

void dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    free_object(self);
}

// Until Python 3.13, a thread that outlives the interpreter ends where it waits for the GIL, by unwinding its stack. So
// no destructor here releases an object.

// Of an integer, or of what Python takes for one.
uint64_t unsigned_of(PyObject *number) {
    PyObject *index = PyNumber_Index(number);
    const unsigned long long found = index == nullptr ? ~0ull : PyLong_AsUnsignedLongLong(index);
    Py_XDECREF(index);
    if (found == ~0ull && PyErr_Occurred() != nullptr) {
        throw PythonError();
    }
    return found;
}

// The integer that an object of the recorder is; it is released. Null throws.
int64_t taken_from(PyObject *object) {
    const long long found = object == nullptr ? -1 : PyLong_AsLongLong(object);
    Py_XDECREF(object);
    if (found == -1 && PyErr_Occurred() != nullptr) {
        throw PythonError();
    }
    return found;
}

void set_attribute(PyObject *object, PyObject *name, int64_t value) {
    PyObject *number = PyLong_FromLongLong(value);
    const int failed = number == nullptr ? -1 : PyObject_SetAttr(object, name, number);
    Py_XDECREF(number);
    if (failed != 0) {
        throw PythonError();
    }
}

// Whether the recorder's entry of a place is its own, and not that of one further up.
bool is_known(const RecordedKind &calls, PyObject *code, int64_t at) {
    PyObject *key = Py_BuildValue("(NL)", PyLong_FromVoidPtr(code), static_cast<long long>(at));
    PyObject *entry = key == nullptr ? nullptr : PyDict_GetItemWithError(calls.sites, key);
    Py_XDECREF(key);
    if (entry == nullptr && PyErr_Occurred() != nullptr) {
        throw PythonError();
    }
    Py_XINCREF(entry);
    return entry != nullptr && taken_from(entry) >= 0;
}

// The entry of the place of the program that makes the call, `depth` frames above the function that calls this.
uint32_t find_site(RecordedKind &calls, PyObject *depth) {
    PyObject *frame = PyObject_CallFunctionObjArgs(getframe, depth, nullptr);
    if (frame == nullptr) {  // called by no Python code, as at the end of the program
        if (PyErr_ExceptionMatches(PyExc_ValueError) == 0) {
            throw PythonError();
        }
        PyErr_Clear();
        return 0;
    }
    auto *code = reinterpret_cast<PyObject *>(PyFrame_GetCode(reinterpret_cast<PyFrameObject *>(frame)));
    PyObject *place = PyObject_GetAttr(frame, place_name);
    Py_DECREF(frame);  // which the caller holds
    try {
        const int64_t at = taken_from(place);
        if (code == calls.last_code && at == calls.last_at) {
            Py_DECREF(code);
            return calls.last_site;
        }
        const auto site = static_cast<uint32_t>(taken_from(PyObject_CallFunctionObjArgs(calls.caller, depth, nullptr)));
        if (is_known(calls, code, at)) {
            PyObject *before = calls.last_code;
            calls.last_code = code, calls.last_at = at, calls.last_site = site;
            code = before;
        }
        Py_XDECREF(code);
        return site;
    } catch (const PythonError &) {
        Py_XDECREF(code);
        throw;
    }
}

// hash((digest, signature, elements)) of Python, as processes without native code make digests.
int64_t digest_of(int64_t digest, int64_t signature, uint64_t elements) {
    constexpr uint64_t modulus = (uint64_t{1} << 61) - 1;
    constexpr uint64_t first = 11400714785074694791u, second = 14029467366897019727u, fifth = 2870177450012600261u;
    const uint64_t size = digest < 0 ? uint64_t{0} - static_cast<uint64_t>(digest) : static_cast<uint64_t>(digest);
    uint64_t of_digest = digest < 0 ? uint64_t{0} - size % modulus : size % modulus;
    of_digest = of_digest == ~uint64_t{0} ? of_digest - 1 : of_digest;
    uint64_t found = fifth;
    for (const uint64_t part : {of_digest, static_cast<uint64_t>(signature) % modulus, elements % modulus}) {
        found += part * second;
        found = found << 31 | found >> 33;
        found *= first;
    }
    found += 3 ^ (fifth ^ 3527539u);
    return found == ~uint64_t{0} ? 1546275796 : static_cast<int64_t>(found);
}

// Counts the call among those that have to agree. No Python code runs between, unless the series counts nothing.
std::pair<int64_t, int64_t> count_in_series(const RecordedKind &calls, uint64_t elements) {
    const int64_t number = taken_from(PyObject_GetAttr(calls.series, number_name)) + 1;
    const int64_t before = taken_from(PyObject_GetAttr(calls.series, digest_name));
    const int64_t digest = digest_of(before, calls.signature, calls.counts ? elements : 0);
    set_attribute(calls.series, number_name, number);
    set_attribute(calls.series, digest_name, digest);
    return {number, digest};
}

// begin(elements, depth, sent=None, received=None, state=0) -> number
PyObject *begin(RecordedKind &calls, PyObject *const *arguments, Py_ssize_t count) {
    if (count < 2 || count > 5 || (count == 3 && arguments[2] != Py_None)) {
        PyErr_SetString(PyExc_TypeError, "begin: takes elements, depth, sent, received and state, by their places");
        return nullptr;
    }
    const uint64_t elements = unsigned_of(arguments[0]), state = count > 4 ? unsigned_of(arguments[4]) : 0;
    if (calls.numbers == nullptr) {  // the garbage collector has cleared it
        return PyLong_FromLong(0);
    }
    const uint32_t site = find_site(calls, arguments[1]);
    const unsigned long thread = PyThread_get_thread_ident();
    if (thread != calls.last_thread) {
        PyObject *noted = PyObject_CallFunctionObjArgs(calls.note_thread, nullptr);
        if (noted == nullptr) {
            return nullptr;
        }
        Py_DECREF(noted);
        calls.last_thread = thread;
    }
    PyObject *taken = PyIter_Next(calls.numbers);  // of an itertools.count, which does not end
    if (taken == nullptr) {
        return nullptr;
    }
    const uint64_t number = PyLong_AsUnsignedLongLong(taken);
    try {
        const auto [in_series, digest] = count_in_series(calls, elements);
        uint64_t splits = calls.tag_word;
        if (count > 3 && arguments[2] != Py_None) {
            splits = static_cast<uint64_t>(
                taken_from(PyObject_CallFunctionObjArgs(calls.add_splits, taken, arguments[2], arguments[3], nullptr)));
        }
        constexpr auto relaxed = std::memory_order_relaxed;
        Record &record = calls.records[number & calls.mask];
        record.number.store(0, relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        record.began.store(flight::monotonic_ns(), relaxed);
        record.ended.store(state, relaxed);
        record.kind.store(calls.kind | static_cast<uint64_t>(site) << flight::caller_at, relaxed);
        record.elements.store(elements, relaxed);
        record.call.store(static_cast<uint64_t>(in_series), relaxed);
        record.digest.store(static_cast<uint64_t>(digest), relaxed);
        record.root_and_tag.store(splits, relaxed);
        record.number.store(number, std::memory_order_release);
        // Another thread may have overtaken this one.
        if (calls.count->load(relaxed) < number) {
            calls.count->store(number, std::memory_order_release);
        }
    } catch (const PythonError &) {
        Py_DECREF(taken);
        throw;
    }
    return taken;
}

PyObject *call_begin(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    return guarded([&] { return begin(*reinterpret_cast<RecordedKind *>(self), arguments, count); });
}

// The record of a call; nullptr where a later call has overwritten it, or there never was one of this number.
Record *record_of(PyObject *self, PyObject *number) {
    const auto &calls = *reinterpret_cast<RecordedKind *>(self);
    uint64_t wanted = 0;
    try {
        wanted = unsigned_of(number);
    } catch (const PythonError &) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError) == 0) {
            throw;
        }
        PyErr_Clear();
    }
    if (calls.kept == nullptr || wanted == 0) {
        return nullptr;
    }
    Record &record = calls.records[wanted & calls.mask];
    return record.number.load(std::memory_order_relaxed) == wanted ? &record : nullptr;
}

template <uint64_t bits>
PyObject *call_end(PyObject *self, PyObject *number) {
    return guarded([&] {
        if (Record *record = record_of(self, number)) {
            record->ended.store(flight::monotonic_ns() | bits, std::memory_order_relaxed);
        }
        Py_RETURN_NONE;
    });
}

// wait(number, state=0)
PyObject *call_wait(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject * {
        if (count < 1 || count > 2) {
            PyErr_SetString(PyExc_TypeError, "wait: takes number and state, by their places");
            return nullptr;
        }
        const uint64_t state = count > 1 ? unsigned_of(arguments[1]) : 0;
        if (Record *record = record_of(self, arguments[0])) {
            const uint64_t before = record->ended.load(std::memory_order_relaxed);
            if (before == flight::in_background || before == 0) {
                record->ended.store(state, std::memory_order_relaxed);
            }
        }
        Py_RETURN_NONE;
    });
}

PyMethodDef functions[] = {
    {"begin", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_begin)), METH_FASTCALL, nullptr},
    {"end", call_end<0>, METH_O, nullptr},
    {"fail", call_end<flight::failed_bit>, METH_O, nullptr},
    {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_wait)), METH_FASTCALL, nullptr}};
constexpr Py_ssize_t function_count = sizeof(functions) / sizeof(functions[0]);

PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(dealloc)},
                       {Py_tp_traverse, reinterpret_cast<void *>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void *>(clear)},
                       {0, nullptr}};
PyType_Spec spec{"comm_backend_ccl._shared_memory.RecordedKind", sizeof(RecordedKind), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyObject *reference(PyObject *object) {
    Py_INCREF(object);
    return object;
}

}  // namespace

PyObject *recording_functions(PyObject *, PyObject *arguments) {
    unsigned long long address, signature, tag_word;
    Py_ssize_t bytes;
    unsigned kind;
    int counts;
    PyObject *kept, *numbers, *caller, *note_thread, *sites, *add_splits, *series;
    parse(arguments, "KnOOOOO!OOIKpK", &address, &bytes, &kept, &numbers, &caller, &note_thread, &PyDict_Type, &sites,
          &add_splits, &series, &kind, &signature, &counts, &tag_word);
    auto *at = reinterpret_cast<char *>(address);
    flight::Header header{};
    if (bytes >= static_cast<Py_ssize_t>(flight::header_bytes)) {
        std::memcpy(&header, at, sizeof(header));
    }
    if (std::memcmp(header.magic, flight::magic, sizeof(header.magic)) != 0 || header.records == 0 ||
        (header.records & (header.records - 1)) != 0 || header.records > flight::largest_records ||
        static_cast<size_t>(bytes) < flight::needed_bytes(header.records)) {
        throw std::invalid_argument("the memory is not that of a flight recorder");
    }
    auto *made = new_object<RecordedKind>(type);
    made->kept = reference(kept), made->numbers = reference(numbers), made->caller = reference(caller);
    made->note_thread = reference(note_thread), made->sites = reference(sites);
    made->add_splits = reference(add_splits), made->series = reference(series);
    made->count = &reinterpret_cast<flight::Clock *>(at + flight::python_clock_offset)->count;
    made->records = reinterpret_cast<Record *>(at + flight::header_bytes);
    made->mask = header.records - 1, made->tag_word = tag_word;
    made->signature = static_cast<int64_t>(signature);
    made->kind = kind, made->counts = counts != 0;
    auto *self = reinterpret_cast<PyObject *>(made);
    PyObject *found = PyTuple_New(function_count);
    for (Py_ssize_t index = 0; found != nullptr && index < function_count; ++index) {
        PyObject *function = PyCFunction_NewEx(&functions[index], self, nullptr);
        if (function == nullptr) {
            Py_CLEAR(found);
        } else {
            PyTuple_SetItem(found, index, function);
        }
    }
    Py_DECREF(self);
    return found;
}

bool add_recording_type(PyObject *module) {
    getframe = PySys_GetObject("_getframe");
    if (getframe == nullptr) {
        PyErr_SetString(PyExc_ImportError, "this Python has no sys._getframe");
        return false;
    }
    Py_INCREF(getframe);
    place_name = PyUnicode_InternFromString("f_lasti");
    number_name = PyUnicode_InternFromString("number");
    digest_name = PyUnicode_InternFromString("digest");
    type = PyType_FromSpec(&spec);
    return type != nullptr && PyErr_Occurred() == nullptr && PyModule_AddObjectRef(module, "RecordedKind", type) == 0;
}

}  // namespace shm
