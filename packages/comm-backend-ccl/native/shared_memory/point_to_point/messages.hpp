// Sending from one rank to another, through slots of their own.

#pragma once

#include "progress/group.hpp"

namespace shm {

Handle make_message(Request &&request);

}  // namespace shm
