// The fast path of an all_reduce of many tensors: they are packed into shared memory by dtype, reduced there in place,
// and unpacked.

#include "python/objects.hpp"
#include "python/plain_batch.hpp"
#include "python/plain_tensor.hpp"

#include <algorithm>
#include <string>

namespace shm {

namespace {

// What is larger is left to Python, where torch copies it in several threads.
constexpr size_t most_bytes = size_t{16} << 20;
// The tensors of a dtype begin at a multiple of these.
constexpr size_t alignment = 64;

// The tensors of one dtype, and what other ranks are told of them.
struct Bucket {
    int dtype = -1;
    size_t begin = 0, bytes = 0;  // of the block
    std::vector<uint64_t> sizes;  // elements of each tensor
    Passed passed{"", 0};
};

// What was packed, in the order in which the dtypes come.
struct Packing : std::vector<Bucket> {
    size_t bytes = 0;
};

struct CoalescedPath {
    PyObject_HEAD Shared *group;
    PyObject *later, *describe, *put;
    // Of earlier calls, while no call uses them.
    PyObject *block;
    size_t block_bytes;
    Packing *known;
    uint8_t op;
    uint16_t user_call;

    Group &on() const { return **group; }
};

int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(reinterpret_cast<PyObject *>(Py_TYPE(self)));
    const auto &path = *reinterpret_cast<CoalescedPath *>(self);
    for (PyObject *held : {path.later, path.describe, path.put, path.block}) {
        Py_VISIT(held);
    }
    return 0;
}

int clear(PyObject *self) {
    auto &path = *reinterpret_cast<CoalescedPath *>(self);
    Py_CLEAR(path.later);
    Py_CLEAR(path.describe);
    Py_CLEAR(path.put);
    Py_CLEAR(path.block);
    return 0;
}

void dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    const auto &path = *reinterpret_cast<CoalescedPath *>(self);
    delete path.known;
    if (!forked) {
        delete path.group;
    }
    free_object(self);
}

PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(dealloc)},
                       {Py_tp_traverse, reinterpret_cast<void *>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void *>(clear)},
                       {0, nullptr}};
PyType_Spec spec{"comm_backend_ccl._shared_memory.CoalescedPath", sizeof(CoalescedPath), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyObject *type = nullptr;

// Sets how the members are packed; false where the operation does not reduce one of their dtypes, or they are too many
// bytes.
bool find_packing(const Members &members, uint8_t op, Packing &packing) {
    std::array<size_t, dtypes> at{};  // in the packing, counted from 1
    for (const Member &one : members) {
        size_t &place = at[static_cast<size_t>(one.dtype)];
        if (place == 0) {
            if (!reduces(one.dtype, op)) {
                return false;
            }
            packing.emplace_back();
            packing.back().dtype = one.dtype;
            packing.back().sizes.reserve(members.size());
            place = packing.size();
        }
        Bucket &bucket = packing[place - 1];
        bucket.bytes += one.memory.second;
        bucket.sizes.push_back(one.memory.second / item_bytes(one.dtype));
    }
    for (Bucket &bucket : packing) {
        bucket.begin = packing.bytes;
        packing.bytes += (bucket.bytes + alignment - 1) / alignment * alignment;
    }
    return packing.bytes <= most_bytes;
}

// Whether the group has the memory for all of it. The general path reserves it, and says where there is not so much.
bool has_memory(const Group &group, const Packing &packing) {
    return group.ring_is_reserved() ||
           std::all_of(packing.begin(), packing.end(), [](const Bucket &one) { return one.bytes <= slot_bytes; });
}

bool are_alike(const Packing &one, const Packing &other) {
    return std::equal(one.begin(), one.end(), other.begin(), other.end(), [](const Bucket &mine, const Bucket &its) {
        return mine.dtype == its.dtype && mine.sizes == its.sizes;
    });
}

// Asks Python what other ranks are told, unless the last call was of the same sizes; returns whether it did.
bool describe(CoalescedPath &path, Packing &packing) {
    if (path.known != nullptr && are_alike(packing, *path.known)) {
        for (size_t index = 0; index < packing.size(); ++index) {
            packing[index].passed = (*path.known)[index].passed;
        }
        return false;
    }
    for (Bucket &bucket : packing) {
        if (bucket.sizes.size() == 1) {
            continue;
        }
        const Owned sizes =
            owned(PyBytes_FromStringAndSize(reinterpret_cast<const char *>(bucket.sizes.data()),
                                            static_cast<Py_ssize_t>(bucket.sizes.size() * sizeof(uint64_t))));
        const Owned found =
            owned(or_stay([&] { return PyObject_CallFunctionObjArgs(path.describe, sizes.get(), nullptr); }));
        const char *text;
        unsigned long long digest;
        parse(found.get(), "sK", &text, &digest);
        bucket.passed = {text, digest};
    }
    auto known = std::make_unique<Packing>(packing);
    delete path.known;
    path.known = known.release();
    return true;
}

// A block of so many bytes and its address: the one of earlier calls, where no other call has taken it.
Owned take_block(CoalescedPath &path, size_t bytes, size_t &block_bytes, char *&begin) {
    Owned block;
    if (path.block != nullptr && path.block_bytes >= bytes) {
        block.reset(path.block);
        path.block = nullptr;
        block_bytes = path.block_bytes;
    } else {
        Py_CLEAR(path.block);  // of too few bytes
        for (block_bytes = 4096; block_bytes < bytes; block_bytes *= 2) {
        }
        const Owned size = owned(PyLong_FromSize_t(block_bytes));
        block = owned(allocate(nullptr, size.get()));
    }
    const Owned address = owned(PyObject_GetAttrString(block.get(), "address"));
    begin = static_cast<char *>(PyLong_AsVoidPtr(address.get()));
    return block;
}

void keep_block(CoalescedPath &path, Owned block, size_t bytes) {
    if (path.block == nullptr) {
        path.block = block.release();
        path.block_bytes = bytes;
    }
}

enum class Outcome : uint8_t { complete, refused, raised };

// Reduces one dtype's tensors in place.
Outcome reduce(const CoalescedPath &path, const Bucket &bucket, char *begin, PyObject *block) {
    Request request;
    request.operation = all_reduce;
    request.dtype = static_cast<uint8_t>(bucket.dtype);
    request.op = path.op;
    request.user_call = path.user_call;
    request.input = request.output = begin + bucket.begin;
    request.count = bucket.bytes / item_bytes(bucket.dtype);
    const Shared shared = *path.group;  // which another thread may end while this one waits
    Handle task;
    {
        std::unique_ptr<const Passed> passed;
        if (bucket.sizes.size() > 1) {
            passed = std::make_unique<const Passed>(bucket.passed);
        }
        try {
            const GilRelease released;
            task = shared->start(std::move(request), false, std::move(passed));
            if (task->now() == pending) {
                shared->wait(*task, at_once_s);
            }
        } catch (const std::exception &) {
            if (shared->closed() || shared->broken()) {
                return Outcome::refused;
            }
            throw;
        }
    }
    if (task->now() == complete) {
        return Outcome::complete;
    }
    // The operation keeps the block: a signal may end `later` before it has taken hold of it.
    const Owned operation = owned(make_operation(shared, std::move(task), block));
    const Owned waited(or_stay([&] { return PyObject_CallFunctionObjArgs(path.later, operation.get(), nullptr); }));
    return waited != nullptr ? Outcome::complete : Outcome::raised;
}

// Where a tensor has other memory by now, Python puts the results into it.
void put(const CoalescedPath &path, PyObject *list, const Members &members, size_t which, const Packing &packing,
         const char *begin) {
    const Member &member = members[which];
    for (const Bucket &bucket : packing) {
        begin = bucket.dtype == member.dtype ? begin + bucket.begin : begin;
    }
    for (size_t index = 0; index < which; ++index) {
        begin += members[index].dtype == member.dtype ? members[index].memory.second : 0;
    }
    PyObject *tensor = PyList_GetItem(list, static_cast<Py_ssize_t>(which));
    if (tensor == nullptr) {
        throw PythonError();
    }
    owned(or_stay([&] {
        return PyObject_CallFunction(path.put, "OKKi", tensor, reinterpret_cast<unsigned long long>(begin),
                                     static_cast<unsigned long long>(member.memory.second), member.dtype);
    }));
}

// Returns True if all is done; False, with nothing begun, where the general path has to be taken.
PyObject *attempt(CoalescedPath &path, PyObject *given) {
    release_what_ended();  // which may be the memory that this call needs
    Members own;
    const Members *members = &own;
    PyObject *borrowed = nullptr;
    Owned list;
    if (path.later == nullptr || forked) {  // nullptr: the garbage collector has cleared it
        Py_RETURN_FALSE;
    }
    if (is_plain_batch(given, members, borrowed)) {
        Py_INCREF(borrowed);
        list.reset(borrowed);
    } else if (PyList_Check(given) || PyTuple_Check(given)) {
        list = owned(PySequence_List(given));
        if (PyList_Size(list.get()) < 2 || !find_members(list.get(), own)) {
            Py_RETURN_FALSE;
        }
    } else {
        Py_RETURN_FALSE;
    }
    Group &group = path.on();
    Packing packing;
    if (members->any_grad || members->any_of_inference || !find_packing(*members, path.op, packing) || group.closed() ||
        group.broken() || !has_memory(group, packing)) {
        Py_RETURN_FALSE;
    }
    const bool has_asked = describe(path, packing);
    const PyObject *const kept = path.block;
    size_t block_bytes;
    char *begin;
    Owned block;
    try {
        block = take_block(path, packing.bytes, block_bytes, begin);
    } catch (const SharedMemoryError &) {  // there is not so much
        Py_RETURN_FALSE;
    }
    // Python code, and other threads, may have changed tensors since.
    if ((has_asked || block.get() != kept) && !hold_still(list.get(), *members)) {
        Py_RETURN_FALSE;
    }
    Places places{};
    for (const Bucket &bucket : packing) {
        places[static_cast<size_t>(bucket.dtype)] = begin + bucket.begin;
    }
    pack(*members, places);
    for (const Bucket &bucket : packing) {
        switch (reduce(path, bucket, begin, block.get())) {
        case Outcome::complete:
            break;
        case Outcome::refused:  // the group ends or is broken, which the general path says
            Py_RETURN_FALSE;
        case Outcome::raised:
            return nullptr;
        }
    }
    for (const size_t left : unpack(list.get(), *members, places)) {
        put(path, list.get(), *members, left, packing, begin);
    }
    keep_block(path, std::move(block), block_bytes);
    Py_RETURN_TRUE;
}

PyObject *call(PyObject *self, PyObject *given) {
    return guarded([&] { return attempt(*reinterpret_cast<CoalescedPath *>(self), given); });
}

PyMethodDef method{"coalesced_path", call, METH_O, nullptr};

}  // namespace

// coalesced_path(op, later, describe, put) -> a function of a list of tensors, or of a plain_batch(); None where
// torch does not offer what it takes. `describe` is called with the elements of tensors, as 8 bytes each, and returns
// the text and the digest that other ranks are told; `put` with a tensor that has other memory by now, and the address
// and the bytes of its results.
PyObject *make_coalesced_path(PyObject *group, PyObject *arguments) {
    int op, user_call = 0;
    PyObject *later, *describe, *put;
    parse(arguments, "iOOO|i", &op, &later, &describe, &put, &user_call);
    if (!can_ask_tensors() || !can_count_versions()) {
        Py_RETURN_NONE;
    }
    auto *made = new_object<CoalescedPath>(type);
    made->group = nullptr, made->block = nullptr, made->known = nullptr;
    made->op = static_cast<uint8_t>(op), made->user_call = static_cast<uint16_t>(user_call);
    for (PyObject *one : {later, describe, put}) {
        Py_INCREF(one);
    }
    made->later = later, made->describe = describe, made->put = put;
    auto *self = reinterpret_cast<PyObject *>(made);
    try {
        made->group = new Shared(*reinterpret_cast<GroupObject *>(group)->group);
    } catch (...) {
        Py_DECREF(self);
        throw;
    }
    PyObject *function = PyCFunction_NewEx(&method, self, nullptr);
    Py_DECREF(self);
    return function;
}

bool add_coalesced_path_type(PyObject *module) {
    type = PyType_FromSpec(&spec);
    return type != nullptr && PyModule_AddObjectRef(module, "CoalescedPath", type) == 0;
}

}  // namespace shm
