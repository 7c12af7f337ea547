// Copies between many plain tensors and one of each dtype.

#pragma once

#include "python/entry.hpp"

namespace shm {

// plain_layout(list) -> {code of a dtype: (tensors, bytes)} in the order in which the dtypes come, or None where a
// tensor is not plain or shares memory with another one
PyObject *plain_layout(PyObject *module, PyObject *list);
// move_plain(list, [(dtype, address, bytes)], joins) -> whether the memory of the list's tensors of each of these
// dtypes, which have to be so many bytes, was copied there, one after the other, or back; False where one of the list
// is not plain
PyObject *move_plain(PyObject *module, PyObject *arguments);

}  // namespace shm
