// Which tensors native code may take as they are: contiguous memory, of the CPU where nothing else is said, that holds
// what it claims.

#pragma once

#include "python/dlpack.hpp"
#include "python/entry.hpp"

#include <cstddef>

namespace shm {

struct PlainTensor {
    char *data = nullptr;
    size_t count = 0;  // elements
    int dtype = 0;
    int32_t device = 0;  // its number among those of its type
    // As long as the tensor lives.
    const int64_t *shape = nullptr;
    int dimensions = 0;
};

// Whether torch offers what is_plain() asks.
bool can_ask_tensors();
// Whether it is a torch.Tensor and no subclass.
bool is_tensor(PyObject *object);
// Whether a dispatch mode such as FakeTensorMode, a transform such as vmap, or torch.jit.trace is active on this
// thread: no tensor is taken then.
bool is_intercepted();
// False, with no exception set, for everything else: subclasses, wrapped tensors, other devices and layouts, strides,
// dtypes without a code, values that a flag negates, no elements, and storage that ends before the tensor does.
bool is_plain(PyObject *object, PlainTensor &found, int32_t device = dlpack::cpu);
// Lets the processor fetch what is_plain() reads first of `object`, whose own memory was touched before.
void prefetch_tensor(PyObject *object);

// Whether an object that is_plain() took is plain still, with the dtype and the memory that it had.
bool holds_still(PyObject *object, const PlainTensor &before);

// Of plain tensors: whether autograd would have to know of what is done with it; whether it was made in inference mode.
bool requires_grad(PyObject *tensor);
bool is_made_in_inference_mode(PyObject *tensor);
bool can_count_versions();
// Counts that a plain tensor, not made in inference mode, was written; false where torch does not offer that.
bool count_version(PyObject *tensor);

// Of the module.
PyObject *bind_torch(PyObject *module, PyObject *arguments);
PyObject *plain_tensor(PyObject *module, PyObject *object);
PyObject *plain_tensors(PyObject *module, PyObject *arguments);
bool add_predicate_type(PyObject *module);

}  // namespace shm
