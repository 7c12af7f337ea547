// Fast paths that collect calls instead of executing them.

#pragma once

#include "python/entry.hpp"

namespace shm {

// collecting_paths(fallback, threads, make) -> a replacement for a cache of fast paths. get(key) returns, of a thread
// whose identifier is in the dictionary `threads`, what the dictionary there has, or what make(key) returns, which it
// keeps there unless it is None; of other threads, fallback.get(key). Items are set in `fallback`.
PyObject *collecting_paths(PyObject *module, PyObject *arguments);
// collecting_path(key, runs, return_value) -> a function that appends its argument, of more than one a tuple, to the
// list of the last of `runs`, which are pairs of a key and a list, or begins another one where that has another key
PyObject *collecting_path(PyObject *module, PyObject *arguments);
bool add_collecting_types(PyObject *module);

}  // namespace shm
