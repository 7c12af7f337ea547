// Many plain tensors as one: how large they are together, and copies between them and one tensor of each dtype.

#pragma once

#include "kernels/kernels.hpp"
#include "python/entry.hpp"

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

namespace shm {

// A plain tensor of a list.
struct Member {
    int dtype;
    std::pair<char *, size_t> memory;  // bytes
};

struct Members : std::vector<Member> {
    bool any_grad = false, any_of_inference = false;
};

// By dtype, where its tensors go, or come from, one after the other; null for those that stay.
using Places = std::array<char *, dtypes>;

// Sets the members of a list; false where one of its tensors is not plain, or shares memory with another one.
bool find_members(PyObject *list, Members &found);
// Whether the tensors of a list have the memory that they had.
bool hold_still(PyObject *list, const Members &members);
// Copies the tensors to their places, without the GIL.
void pack(const Members &members, Places places);
// Copies from the places, of which each dtype has one, to the tensors of a list, none of which was made in inference
// mode, and counts new versions of them, where can_count_versions(). Returns which have other memory by now, and were
// left as they are: other threads, and the program itself where it waits, may have changed them since. Holds the GIL,
// so that nothing changes between the look at a tensor and its copy: for 2 ms where they are 16 MiB.
std::vector<size_t> unpack(PyObject *list, const Members &members, Places places);

// What an object of plain_batch() was made of; false where `object` is none.
bool is_plain_batch(PyObject *object, const Members *&members, PyObject *&list);

// plain_batch(list) -> an object for the tensors of the list, or None where one is not plain or shares memory with
// another one. Its methods:
//   sizes() -> {code of a dtype: (the bytes of its tensors, the elements of each as 8 bytes)} in the order in which the
//     dtypes come
//   tensors(code of a dtype) -> a list of them
//   pack([(dtype, address, bytes)]) -> whether the memory of the tensors of each of these dtypes was copied there, one
//     after the other; False, with nothing done, where they are not so many bytes
//   unpack([(dtype, address, bytes)]) -> None, with nothing done, where they are not, or a tensor has other memory by
//     now; else it was copied back, and the result is whether new versions of these tensors were counted
//   is_usual() -> whether none requires a gradient or was made in inference mode
PyObject *plain_batch(PyObject *module, PyObject *list);
bool add_plain_batch_type(PyObject *module);

}  // namespace shm
