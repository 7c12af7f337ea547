#include "segment/peer_memory.hpp"

#include <sys/uio.h>
#include <cerrno>

namespace shm {

bool read_peer(int pid, void *to, uint64_t address, size_t bytes) noexcept {
    auto *at = static_cast<char *>(to);
    while (bytes > 0) {
        const iovec local{at, bytes}, remote{reinterpret_cast<void *>(address), bytes};
        const ssize_t done = process_vm_readv(pid, &local, 1, &remote, 1, 0);
        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done == 0) {
            errno = EFAULT;
        }
        if (done <= 0) {
            return false;
        }
        at += done, address += static_cast<uint64_t>(done), bytes -= static_cast<size_t>(done);
    }
    return true;
}

}  // namespace shm
