#include "segment/memory.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace shm {

namespace {

constexpr const char *remedy = " is available in this machine or container; raise the container's memory limit, or use "
                               "fewer groups or smaller tensors";

std::string mebibytes(size_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

size_t page(size_t bytes) { return Layout::page(bytes); }

// The number after `key` in a file of lines, or the file's only number; most where there is none.
size_t number_in(const std::string &path, const std::string &key) {
    constexpr size_t most = std::numeric_limits<size_t>::max();
    std::ifstream file(path);
    std::string word;
    while (file >> word) {
        if (key.empty() || word == key) {
            size_t number = 0;
            std::istringstream text(word);
            return (key.empty() ? text >> number : file >> number) ? number : most;
        }
    }
    return most;
}

// Bytes that can still be used: of the machine, and of the container. The system itself would end a process instead of
// refusing it memory.
size_t available_bytes() {
    const size_t kibibytes = number_in("/proc/meminfo", "MemAvailable:");
    size_t available = kibibytes > (std::numeric_limits<size_t>::max() >> 10) ? kibibytes : kibibytes << 10;
    // As a container sees its own limits, of either version of cgroups. What it uses includes files that it has read,
    // which give way.
    struct Limits {
        const char *limit, *usage, *statistics, *files[2];
    };
    constexpr Limits versions[] = {
        {"/sys/fs/cgroup/memory.max",
         "/sys/fs/cgroup/memory.current",
         "/sys/fs/cgroup/memory.stat",
         {"inactive_file", "active_file"}},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes",
         "/sys/fs/cgroup/memory/memory.usage_in_bytes",
         "/sys/fs/cgroup/memory/memory.stat",
         {"total_inactive_file", "total_active_file"}}};
    constexpr size_t none = std::numeric_limits<size_t>::max();
    for (const Limits &one : versions) {
        const size_t most = number_in(one.limit, "");
        size_t used = number_in(one.usage, "");
        if (most == none || used > most) {
            continue;
        }
        for (const char *kind : one.files) {
            const size_t files = number_in(one.statistics, kind);
            used -= files == none ? 0 : std::min(files, used);
        }
        available = std::min(available, most - used);
    }
    return available;
}

}  // namespace

uint64_t inode_of(int descriptor) {
    struct stat found {};
    fstat(descriptor, &found);
    return found.st_ino;
}

int create_memory(size_t bytes) {
    const int descriptor = memfd_create("comm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor < 0) {
        throw SharedMemoryError(std::string("shared memory cannot be created: ") + std::strerror(errno));
    }
    if (fchmod(descriptor, 0600) != 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
        const std::string reason = std::strerror(errno);
        close(descriptor);
        throw SharedMemoryError("shared memory of " + mebibytes(bytes) + " cannot be created (" + reason +
                      "); raise the limit of file sizes (ulimit -f)");
    }
    // Nobody can cut it while others use it.
    fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    return descriptor;
}

void check_memory(size_t bytes, const char *what) {
    const size_t available = available_bytes();
    if (bytes >= available - available / 16) {
        throw SharedMemoryError(std::string(what) + " needs " + mebibytes(bytes) + " of shared memory, and " +
                      mebibytes(available) + remedy);
    }
}

void reserve_memory(int descriptor, size_t offset, size_t bytes, const char *what) {
    // Others may be doing the same at this moment.
    constexpr size_t part = size_t{256} << 20;
    for (size_t done = 0; done < bytes; done += part) {
        check_memory(bytes - done, what);
        const size_t next = std::min(part, bytes - done);
        int failed;
        do {
            failed = fallocate(descriptor, 0, static_cast<off_t>(offset + done), static_cast<off_t>(next)) == 0 ? 0
                                                                                                                 : errno;
        } while (failed == EINTR);
        if (failed != 0) {
            throw SharedMemoryError(std::string(what) + " needs " + mebibytes(bytes) + " of shared memory (" +
                          std::strerror(failed) + "); more than what" + remedy);
        }
    }
}

int open_memory(int pid, int descriptor, uint64_t inode, size_t bytes) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
    const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (opened < 0) {
        throw Inaccessible("the shared memory of process " + std::to_string(pid) + " cannot be opened (" + path + ": " +
                      std::strerror(errno) + "); ranks that share memory run as one user in one pid namespace");
    }
    // The number may stand for another file by now.
    struct stat found {};
    if (fstat(opened, &found) != 0 || found.st_ino != inode || (bytes != 0 && found.st_size != static_cast<off_t>(bytes)) ||
        (fcntl(opened, F_GET_SEALS) & F_SEAL_SHRINK) == 0) {
        close(opened);
        throw Inaccessible("the shared memory of process " + std::to_string(pid) + " is not there any more");
    }
    return opened;
}

void close_memory(int descriptor) { close(descriptor); }

void *map_memory(int descriptor, size_t bytes) {
    void *begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (begin == MAP_FAILED) {
        throw SharedMemoryError("shared memory of " + mebibytes(bytes) + " cannot be mapped: " + std::strerror(errno));
    }
    // In effect where the system's shmem_enabled is "advise".
    madvise(begin, bytes, MADV_HUGEPAGE);
    return begin;
}

void unmap_memory(void *begin, size_t bytes) { munmap(begin, bytes); }

Arena &Arena::instance() {
    static Arena &arena = *new Arena;  // tensors may outlive static objects
    return arena;
}

void *Arena::allocate(size_t bytes) {
    bytes = page(bytes == 0 ? 1 : bytes);
    const std::lock_guard<std::mutex> alone(mutex_);
    auto best = blocks_.end();
    for (auto one = blocks_.begin(); one != blocks_.end(); ++one) {
        const Block &block = one->second;
        if (!block.used && block.bytes >= bytes && block.bytes <= bytes + bytes / 4 &&
            (best == blocks_.end() || block.bytes < best->second.bytes)) {
            best = one;
        }
    }
    if (best != blocks_.end()) {
        best->second.used = true;
        return best->first;
    }
    try {
        check_memory(bytes, "a tensor in shared memory");
    } catch (const SharedMemoryError &) {
        give_back_unused();
        check_memory(bytes, "a tensor in shared memory");
    }
    const int descriptor = create_memory(bytes);
    try {
        reserve_memory(descriptor, 0, bytes, "a tensor in shared memory");
        auto *begin = static_cast<char *>(map_memory(descriptor, bytes));
        blocks_[begin] = Block{bytes, descriptor, inode_of(descriptor), true, false};
        return begin;
    } catch (...) {
        close(descriptor);
        throw;
    }
}

void Arena::free(void *begin) {
    const std::lock_guard<std::mutex> alone(mutex_);
    const auto found = blocks_.find(static_cast<char *>(begin));
    if (found != blocks_.end() && !found->second.retired) {
        found->second.used = false;
    }
}

Place Arena::find(const void *begin, size_t bytes) {
    const auto *from = static_cast<const char *>(begin);
    const std::lock_guard<std::mutex> alone(mutex_);
    auto next = blocks_.upper_bound(const_cast<char *>(from));
    if (next == blocks_.begin()) {
        return {};
    }
    --next;
    const Block &block = next->second;
    if (from + bytes > next->first + block.bytes) {
        return {};
    }
    return Place{block.inode, static_cast<uint64_t>(from - next->first), block.descriptor};
}

void Arena::retire(const void *begin) {
    const std::lock_guard<std::mutex> alone(mutex_);
    const auto next = blocks_.upper_bound(const_cast<char *>(static_cast<const char *>(begin)));
    if (next != blocks_.begin()) {
        std::prev(next)->second.retired = true;
    }
}

void Arena::trim() {
    const std::lock_guard<std::mutex> alone(mutex_);
    give_back_unused();
}

void Arena::give_back_unused() {
    for (auto one = blocks_.begin(); one != blocks_.end();) {
        if (one->second.used) {
            ++one;
            continue;
        }
        // Peers may still have it mapped.
        fallocate(one->second.descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                  static_cast<off_t>(one->second.bytes));
        munmap(one->first, one->second.bytes);
        close(one->second.descriptor);
        one = blocks_.erase(one);
    }
}

size_t Arena::bytes() {
    const std::lock_guard<std::mutex> alone(mutex_);
    size_t total = 0;
    for (const auto &one : blocks_) {
        total += one.second.bytes;
    }
    return total;
}

Mapped::~Mapped() {
    for (const auto &one : windows_) {
        munmap(one.second.begin, one.second.bytes);
    }
}

char *Mapped::find(int pid, const Place &place) {
    const auto key = std::make_pair(pid, place.inode);
    auto known = windows_.find(key);
    if (known == windows_.end()) {
        try {
            const int descriptor = open_memory(pid, place.descriptor, place.inode, 0);
            struct stat found {};
            fstat(descriptor, &found);
            Window window{nullptr, static_cast<size_t>(found.st_size)};
            try {
                window.begin = map_memory(descriptor, window.bytes);
            } catch (const SharedMemoryError &) {
                close(descriptor);
                return nullptr;
            }
            close(descriptor);
            known = windows_.emplace(key, window).first;
        } catch (const SharedMemoryError &) {
            return nullptr;
        }
    }
    if (place.offset >= known->second.bytes) {
        return nullptr;
    }
    return static_cast<char *>(known->second.begin) + place.offset;
}

}  // namespace shm
