#include "python/objects.hpp"

namespace shm {

namespace {

const Shared &group_of(PyObject *self) { return *reinterpret_cast<GroupObject *>(self)->group; }

// close(quietly): nothing of an operation under way touches its memory afterwards
PyObject *close(PyObject *self, PyObject *arguments) {
    int quietly;
    parse(arguments, "p", &quietly);
    if (!forked) {
        const Shared group = group_of(self);
        {
            const GilRelease released;
            group->close(quietly != 0);
        }
        release_what_ended(SIZE_MAX);
    }
    Py_RETURN_NONE;
}

PyObject *drain(PyObject *self, PyObject *arguments) {
    double seconds;
    parse(arguments, "d", &seconds);
    if (!forked) {
        const Shared group = group_of(self);
        const GilRelease released;
        group->drain(seconds);
    }
    Py_RETURN_NONE;
}

PyObject *failure(PyObject *self, PyObject *) { return PyUnicode_FromString(group_of(self)->failure().c_str()); }

// missing() -> the ranks, as bits, that what is under way waits for
PyObject *missing(PyObject *self, PyObject *) {
    const Shared group = group_of(self);
    uint64_t found;
    {
        const GilRelease released;
        found = group->missing();
    }
    return PyLong_FromUnsignedLongLong(found);
}

PyObject *time_out(PyObject *self, PyObject *) {
    const Shared group = group_of(self);
    {
        const GilRelease released;
        group->time_out();
    }
    Py_RETURN_NONE;
}

// timed_out() -> (the rank that has waited in vain, the ranks, as bits, for which it did), or None
PyObject *timed_out(PyObject *self, PyObject *) {
    int finder;
    uint64_t missing;
    if (!group_of(self)->has_timed_out(finder, missing)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("iK", finder, static_cast<unsigned long long>(missing));
}

// record_as(index): by which the flight recorder knows the group; 0 is unknown
PyObject *record_as(PyObject *self, PyObject *arguments) {
    unsigned index;
    parse(arguments, "I", &index);
    if (index >= Group::most_recorded) {
        throw std::invalid_argument("record_as: got " + std::to_string(index) + ", expected less than " +
                                    std::to_string(Group::most_recorded));
    }
    group_of(self)->record_as(index);
    Py_RETURN_NONE;
}

// methods() -> a tuple of (operation, least bytes, whether 16-bit floats, whether eager, method, whether it is settled,
// changes, ((method, ns), ...)) for each kind of operation that has a choice
PyObject *methods(PyObject *self, PyObject *) {
    const Shared group = group_of(self);
    std::vector<Tuner::Known> known;
    {
        const GilRelease released;
        known = group->known_methods();
    }
    PyObject *found = PyTuple_New(static_cast<Py_ssize_t>(known.size()));
    for (size_t index = 0; found != nullptr && index < known.size(); ++index) {
        const Tuner::Known &one = known[index];
        PyObject *times = PyTuple_New(static_cast<Py_ssize_t>(one.typical_ns.size()));
        for (size_t at = 0; times != nullptr && at < one.typical_ns.size(); ++at) {
            const auto &[method, ns] = one.typical_ns[at];
            PyTuple_SetItem(times, static_cast<Py_ssize_t>(at),
                            Py_BuildValue("sK", method.name().c_str(), static_cast<unsigned long long>(ns)));
        }
        PyTuple_SetItem(
            found, static_cast<Py_ssize_t>(index),
            Py_BuildValue("snNNsNIN", operation_names[one.operation], static_cast<Py_ssize_t>(one.least_bytes),
                          PyBool_FromLong(one.narrow), PyBool_FromLong(one.is_eager), one.best.name().c_str(),
                          PyBool_FromLong(one.has_settled), one.changes, times));
    }
    return found;
}

// reads_peers() -> whether the kernel lets this rank read the memory of the others, all of which have joined
PyObject *reads_peers(PyObject *self, PyObject *) { return PyBool_FromLong(group_of(self)->tuner().reads_peers()); }

// start_from([(operation, least bytes, whether 16-bit floats, whether eager, method, ns), ...])
PyObject *start_from(PyObject *self, PyObject *arguments) {
    PyObject *rows;
    parse(arguments, "O!", &PyList_Type, &rows);
    std::vector<Tuner::Prior> priors;
    for (Py_ssize_t index = 0; index < PyList_Size(rows); ++index) {
        int operation, narrow, is_eager;
        Py_ssize_t least_bytes;
        const char *method;
        unsigned long long ns;
        parse(PyList_GetItem(rows, index), "inppsK", &operation, &least_bytes, &narrow, &is_eager, &method, &ns);
        priors.push_back({operation, static_cast<size_t>(least_bytes), narrow != 0, is_eager != 0, method, ns});
    }
    const Shared group = group_of(self);
    {
        const GilRelease released;
        group->start_from(std::move(priors));
    }
    Py_RETURN_NONE;
}

void sizes_from(PyObject *list, std::vector<size_t> &sizes) {
    for (Py_ssize_t index = 0; list != Py_None && index < PySequence_Size(list); ++index) {
        PyObject *item = PySequence_GetItem(list, index);
        sizes.push_back(item == nullptr ? 0 : PyLong_AsSize_t(item));
        Py_XDECREF(item);
    }
    if (PyErr_Occurred()) {
        throw PythonError();
    }
}

// start(operation, input, output, count, dtype, op, root, watched, input_counts, output_counts, kept, tag, text,
// digest, user_call, message_dtype)
// -> an operation, or None if it is complete and its source is known. text and digest are of what was passed instead;
// None is nothing else.
PyObject *start(PyObject *self, PyObject *arguments) {
    unsigned long long input, output;
    Py_ssize_t count;
    int operation, dtype, op, root, watched, tag = 0, user_call = 0, message_dtype = 0;
    PyObject *input_counts = Py_None, *output_counts = Py_None, *kept = Py_None;
    const char *text = nullptr;
    unsigned long long digest = 0;
    parse(arguments, "iKKniiip|OOOizKii", &operation, &input, &output, &count, &dtype, &op, &root, &watched,
          &input_counts, &output_counts, &kept, &tag, &text, &digest, &user_call, &message_dtype);
    std::unique_ptr<const Passed> passed;
    if (text != nullptr) {
        passed.reset(new Passed{text, digest});
    }
    Request request;
    request.operation = static_cast<uint8_t>(operation);
    request.dtype = static_cast<uint8_t>(dtype);
    request.op = static_cast<uint8_t>(op);
    request.root = root;
    request.tag = tag;
    request.user_call = static_cast<uint16_t>(user_call);
    request.message_dtype = static_cast<uint8_t>(message_dtype);
    request.input = reinterpret_cast<const void *>(input);
    request.output = reinterpret_cast<void *>(output);
    request.count = static_cast<size_t>(count);
    sizes_from(input_counts, request.input_counts);
    sizes_from(output_counts, request.output_counts);
    const bool asks_for_source = operation == receive && root == any_source;
    const Shared group = group_of(self);
    Handle task;
    {
        const GilRelease released;
        task = watched || asks_for_source || passed ? group->start(std::move(request), watched != 0, std::move(passed))
                                                    : group->run(std::move(request), group->spins());
        if (task && !watched) {
            group->wait(*task, at_once_s);
        }
    }
    if (!task || (task->now() == complete && !asks_for_source)) {
        Py_RETURN_NONE;
    }
    return make_operation(group, std::move(task), kept);
}

PyMethodDef group_methods[] = {{"close", entry<close>, METH_VARARGS, nullptr},
                               {"drain", entry<drain>, METH_VARARGS, nullptr},
                               {"failure", entry<failure>, METH_NOARGS, nullptr},
                               {"record_as", entry<record_as>, METH_VARARGS, nullptr},
                               {"methods", engine_entry<methods>, METH_NOARGS, nullptr},
                               {"missing", engine_entry<missing>, METH_NOARGS, nullptr},
                               {"time_out", engine_entry<time_out>, METH_NOARGS, nullptr},
                               {"timed_out", engine_entry<timed_out>, METH_NOARGS, nullptr},
                               {"start", engine_entry<start>, METH_VARARGS, nullptr},
                               {"reads_peers", engine_entry<reads_peers>, METH_NOARGS, nullptr},
                               {"start_from", engine_entry<start_from>, METH_VARARGS, nullptr},
                               {"fast_path", engine_entry<make_fast_path>, METH_VARARGS, nullptr},
                               {"coalesced_path", engine_entry<make_coalesced_path>, METH_VARARGS, nullptr},
                               {nullptr, nullptr, 0, nullptr}};

// Operations may keep the group; the last of them ends it.
void dealloc(PyObject *self) {
    if (!forked) {
        delete reinterpret_cast<GroupObject *>(self)->group;
    }
    free_object(self);
}

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void *>(dealloc)}, {Py_tp_methods, group_methods}, {0, nullptr}};
PyType_Spec spec{"comm_backend_ccl._shared_memory.Group", sizeof(GroupObject), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyObject *type = nullptr;

std::vector<int> integers(PyObject *list) {
    std::vector<int> found;
    for (Py_ssize_t index = 0; index < PySequence_Size(list); ++index) {
        PyObject *item = PySequence_GetItem(list, index);
        found.push_back(item == nullptr ? 0 : static_cast<int>(PyLong_AsLong(item)));
        Py_XDECREF(item);
    }
    return found;
}

}  // namespace

// join(holder, descriptor, inode, rank, pids, oversubscribed, reading_order, cache_share, transfer, learns) -> a group
PyObject *join(PyObject *, PyObject *arguments) {
    int holder, descriptor, rank, oversubscribed, transfer, learns;
    unsigned long long inode, cache_share;
    PyObject *list, *order;
    parse(arguments, "iiKiOpOKip", &holder, &descriptor, &inode, &rank, &list, &oversubscribed, &order, &cache_share,
          &transfer, &learns);
    std::vector<int> pids = integers(list), reading_order = integers(order);
    if (PyErr_Occurred()) {
        return nullptr;
    }
    const int size = static_cast<int>(pids.size());
    if (transfer < -1 || transfer >= transfers) {
        throw std::invalid_argument("shared memory: transfer " + std::to_string(transfer));
    }
    if (size < 1 || size > max_ranks || rank < 0 || rank >= size) {
        throw std::invalid_argument("shared memory: rank " + std::to_string(rank) + " of " + std::to_string(size));
    }
    auto *made = new_object<GroupObject>(type);
    const size_t bytes = Layout(size).end;
    int own = -1;
    void *segment = nullptr;
    try {
        own = open_memory(holder, descriptor, inode, bytes);
        segment = map_memory(own, bytes);
        auto group = std::make_unique<Group>(segment, own, size, rank, std::move(pids), oversubscribed != 0, true,
                                             std::move(reading_order), cache_share, Settings{transfer, learns != 0});
        segment = nullptr, own = -1;  // they are the group's
        made->group = new Shared(std::move(group));
        return reinterpret_cast<PyObject *>(made);
    } catch (...) {
        if (segment != nullptr) {
            unmap_memory(segment, bytes);
        }
        if (own >= 0) {
            close_memory(own);
        }
        Py_DECREF(reinterpret_cast<PyObject *>(made));
        throw;
    }
}

bool add_group_type(PyObject *module) {
    type = PyType_FromSpec(&spec);
    return type != nullptr && PyModule_AddObjectRef(module, "Group", type) == 0;
}

}  // namespace shm
