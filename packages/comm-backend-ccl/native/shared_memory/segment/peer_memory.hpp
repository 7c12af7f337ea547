// The private memory of peers, read with one copy by the kernel (process_vm_readv).

#pragma once

#include <cstddef>
#include <cstdint>

namespace shm {

// Whether all of it was read; errno says why not. Yama, seccomp, a container or other user ids may forbid it.
bool read_peer(int pid, void *to, uint64_t address, size_t bytes) noexcept;

}  // namespace shm
