// The functions by which Python records its calls, see comm_utils/flight_recorder/kinds.py.

#pragma once

#include "python/entry.hpp"

namespace shm {

// recording_functions(address, bytes, kept, numbers, caller, note_thread, sites, add_splits, series, kind, signature,
// counts, tag_word) -> (begin, end, fail, wait) of one kind of call, for the ring of so many bytes at an address, which
// stays there as long as the object `kept` lives
PyObject *recording_functions(PyObject *module, PyObject *arguments);
bool add_recording_type(PyObject *module);

}  // namespace shm
