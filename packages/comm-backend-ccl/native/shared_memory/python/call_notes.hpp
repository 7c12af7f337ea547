// Calls that are noted in the place of being made.

#pragma once

#include "python/entry.hpp"

namespace shm {

// call_notes(usual, make) -> what stands for a dictionary of fast paths: to the thread that made it, get(key) returns
// what make(key) returned the first time; to other threads, what the dictionary `usual` has. Items are set there.
PyObject *call_notes(PyObject *module, PyObject *arguments);
// call_note(key, runs, outcome) -> a function that returns `outcome`. It appends its argument, of more than one a
// tuple, to the list of the last of `runs`, which are pairs of a key and a list, or begins another one where that has
// another key.
PyObject *call_note(PyObject *module, PyObject *arguments);
bool add_call_note_types(PyObject *module);

}  // namespace shm
