// Many plain tensors as one: how large they are together, and copies between them and one tensor of each dtype.

#pragma once

#include "python/entry.hpp"

namespace shm {

// plain_batch(list) -> an object for the tensors of the list, or None where one is not plain or shares memory with
// another one. Its methods:
//   by_dtype() -> {code of a dtype: (its tensors, their bytes, the elements of each as 8 bytes)} in the order in which
//     the dtypes come
//   pack([(dtype, address, bytes)]) -> whether the memory of the tensors of each of these dtypes was copied there, one
//     after the other; False, with nothing done, where they are not so many bytes
//   unpack([(dtype, address, bytes)]) -> None, with nothing done, where they are not, or a tensor has other memory by
//     now; else it was copied back, and the result is whether new versions of these tensors were counted
//   is_usual() -> whether none requires a gradient or was made in inference mode
PyObject *plain_batch(PyObject *module, PyObject *list);
bool add_plain_batch_type(PyObject *module);

}  // namespace shm
