// The types that Python sees: a group, an operation under way, and memory that peers can map. Each owns what it stands
// for, so there is no address that could be used after its end.

#pragma once

#include "progress/group.hpp"
#include "python/entry.hpp"

#include <memory>

namespace shm {

using Shared = std::shared_ptr<Group>;

struct GroupObject {
    PyObject_HEAD Shared *group;
};

// Keeps the group, and the tensors in whose memory it goes on. Where it is dropped before the end, as by a
// KeyboardInterrupt, the tensors stay until the operation is over.
struct OperationObject {
    PyObject_HEAD struct Held {
        Shared group;
        Handle task;
    } *held;
    PyObject *kept;
};

// How long a call waits before Python handles signals and looks for lost ranks.
constexpr double at_once_s = 0.05;

// Lets go of operations that were dropped before their end, and of their tensors, where that has come since. Looks at
// `most` of them, in turn: calls do not take longer the more there are.
void release_what_ended(size_t most = 64) noexcept;

// A new reference.
PyObject *make_operation(const Shared &group, Handle task, PyObject *kept);

// Adds the types to the module; false with an exception set.
bool add_group_type(PyObject *module);
bool add_operation_type(PyObject *module);
bool add_block_type(PyObject *module);

// Of the module.
PyObject *join(PyObject *module, PyObject *arguments);
PyObject *allocate(PyObject *module, PyObject *argument);
// Methods of groups.
PyObject *make_fast_path(PyObject *group, PyObject *arguments);
bool add_fast_path_type(PyObject *module);
PyObject *make_coalesced_path(PyObject *group, PyObject *arguments);
bool add_coalesced_path_type(PyObject *module);

}  // namespace shm
