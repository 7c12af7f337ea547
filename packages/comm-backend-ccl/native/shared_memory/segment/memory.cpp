#include "segment/memory.hpp"

#include "segment/layout.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

namespace shm {

namespace {

constexpr const char *remedy =
    " is available in this machine or container; raise the container's memory limit, or use "
    "fewer groups or smaller tensors";

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

constexpr size_t unknown = std::numeric_limits<size_t>::max();

// How a version of cgroups names what this needs. What a group uses includes files that it has read, which give way.
struct CgroupFiles {
    const char *root, *limit, *usage, *inactive, *active;
};
constexpr CgroupFiles version_2{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "active_file"};
constexpr CgroupFiles version_1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                "total_inactive_file", "total_active_file"};

size_t available_in(const std::string &folder, const CgroupFiles &files) {
    const size_t most = number_in(folder + "/" + files.limit, "");
    size_t used = number_in(folder + "/" + files.usage, "");
    if (most == unknown || used > most) {
        return unknown;
    }
    for (const char *kind : {files.inactive, files.active}) {
        const size_t cached = number_in(folder + "/memory.stat", kind);
        used -= cached == unknown ? 0 : std::min(cached, used);
    }
    return most - used;
}

// The group that this process is in and those around it, of which each may have a limit. In a container, its own is the
// root of what it sees.
size_t available_in_cgroups() {
    size_t available = std::min(available_in(version_2.root, version_2), available_in(version_1.root, version_1));
    std::ifstream file("/proc/self/cgroup");
    for (std::string text; std::getline(file, text);) {
        const size_t first = text.find(':'), second = text.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            continue;
        }
        const std::string controllers = text.substr(first + 1, second - first - 1);
        const bool memory = ("," + controllers + ",").find(",memory,") != std::string::npos;
        if (!controllers.empty() && !memory) {
            continue;
        }
        const CgroupFiles &files = memory ? version_1 : version_2;
        for (std::string path = text.substr(second + 1); path.size() > 1; path.resize(path.rfind('/'))) {
            available = std::min(available, available_in(files.root + path, files));
        }
    }
    return available;
}

// Bytes that can still be used: of the machine, and of the container. The system itself would end a process instead of
// refusing it memory.
size_t available_bytes() {
    const size_t kibibytes = number_in("/proc/meminfo", "MemAvailable:");
    const size_t available = kibibytes > (unknown >> 10) ? kibibytes : kibibytes << 10;
    return std::min(available, available_in_cgroups());
}

std::string limit_of_files() {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    return "this process has reached its limit of " + std::to_string(limit.rlim_cur) +
           " open files; raise it before the start (ulimit -n 4096, or LimitNOFILE= of a service), or destroy groups "
           "that are not used any more";
}

// The error for what a call that makes a descriptor reported.
[[noreturn]] void throw_for_descriptor(const std::string &what, int error) {
    if (error == EMFILE) {
        throw LimitError(what + ": " + limit_of_files());
    }
    if (error == ENFILE) {
        throw LimitError(what + ": this machine has reached its limit of open files (sysctl fs.file-max)");
    }
    if (error == EPERM || error == EACCES || error == ENOSYS) {
        throw Inaccessible(what + ": the system refuses memfd_create (" + std::strerror(error) +
                               "); allow it in the seccomp profile of the container or service",
                           error);
    }
    throw SharedMemoryError(what + ": " + std::strerror(error));
}

// `descriptor`, or one above those of standard input, output and error in its place: where the program has closed one
// of these, the system gives it to the next file, and what is printed would be written there.
int above_standard(int descriptor) {
    if (descriptor < 0 || descriptor > STDERR_FILENO) {
        return descriptor;
    }
    const int moved = fcntl(descriptor, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    const int error = errno;
    close(descriptor);
    errno = error;
    return moved;
}

// The pages that are all in [begin, begin + bytes).
struct Pages {
    Pages(void *begin, size_t bytes) {
        const uintptr_t page = page_bytes();
        first = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page);
        end = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(begin) + bytes) / page * page);
    }
    char *first, *end;
};

}  // namespace

std::string mebibytes(size_t bytes) { return std::to_string((bytes >> 20) + (bytes % (1 << 20) != 0)) + " MiB"; }

uint64_t inode_of(int descriptor) {
    struct stat found{};
    fstat(descriptor, &found);
    return found.st_ino;
}

size_t size_of(int descriptor) {
    struct stat found{};
    return fstat(descriptor, &found) == 0 ? static_cast<size_t>(found.st_size) : 0;
}

size_t page_bytes() {
    static const auto found = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return found;
}

int create_memory(size_t bytes) {
    const int descriptor = above_standard(memfd_create("comm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (descriptor < 0) {
        throw_for_descriptor("shared memory cannot be created", errno);
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
    constexpr size_t most = size_t{256} << 20, least = size_t{64} << 10;
    size_t part = most;
    for (size_t done = 0, next; done < bytes; done += next) {
        check_memory(bytes - done, what);
        int failed;
        do {
            next = std::min(part, bytes - done);
            failed =
                fallocate(descriptor, 0, static_cast<off_t>(offset + done), static_cast<off_t>(next)) == 0 ? 0 : errno;
            // Before Linux 6.11, a signal ends it with nothing done, and those of a timer would do so again and again.
            part = failed == EINTR ? std::max(part / 2, least) : part;
        } while (failed == EINTR);
        if (failed != 0) {
            return_memory(descriptor, offset, done + next);
            throw SharedMemoryError(std::string(what) + " needs " + mebibytes(bytes) + " of shared memory (" +
                                    std::strerror(failed) + "); more than what" + remedy);
        }
    }
}

void return_memory(int descriptor, size_t offset, size_t bytes) {
    fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
}

int open_memory(int pid, int descriptor, uint64_t inode, size_t bytes) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
    const int opened = above_standard(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (opened < 0 && (errno == EMFILE || errno == ENFILE)) {
        throw_for_descriptor("the shared memory of process " + std::to_string(pid) + " cannot be opened", errno);
    }
    if (opened < 0) {
        const int error = errno;
        throw Inaccessible("the shared memory of process " + std::to_string(pid) + " cannot be opened (" + path + ": " +
                               std::strerror(error) + "); ranks that share memory run as one user in one pid namespace",
                           error == ENOENT ? ESRCH : error);
    }
    // The number may stand for another file by now.
    struct stat found{};
    const int seals = fcntl(opened, F_GET_SEALS);  // -1 of a file that cannot have any
    if (fstat(opened, &found) != 0 || found.st_ino != inode ||
        (bytes != 0 && found.st_size != static_cast<off_t>(bytes)) || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        close(opened);
        throw Inaccessible("the shared memory of process " + std::to_string(pid) + " is not there any more", ESRCH);
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

void map_pages(void *begin, size_t bytes, bool writes) {
    // MADV_POPULATE_READ and MADV_POPULATE_WRITE of Linux 5.14, which older headers lack. Older kernels refuse them,
    // and the faults come one by one.
    constexpr int populate_read = 22, populate_write = 23;
    // Only pages that are all in it: others have the rest, and may not have reserved it.
    const Pages pages(begin, bytes);
    if (pages.first < pages.end) {
        madvise(pages.first, static_cast<size_t>(pages.end - pages.first), writes ? populate_write : populate_read);
    }
}

void make_private(char *begin, size_t bytes, int descriptor, const char *file) noexcept {
    // Each part costs a mapping, of which a process has 65530, and as much memory until the file's is returned.
    constexpr size_t part = size_t{64} << 20;
    const Pages pages(begin, bytes);
    for (char *at = pages.first; at < pages.end;) {
        const size_t next = std::min(part, static_cast<size_t>(pages.end - at));
        void *copy = mmap(nullptr, next, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (copy == MAP_FAILED) {
            return;
        }
        std::memcpy(copy, at, next);
        if (mremap(copy, next, next, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) {
            munmap(copy, next);
            return;
        }
        return_memory(descriptor, static_cast<size_t>(at - file), next);
        at += next;
    }
}

void drop_pages(void *begin, size_t bytes) noexcept {
    const Pages pages(begin, bytes);  // mmap would take the rest of the last one as well
    if (pages.first < pages.end) {
        [[maybe_unused]] const void *kept = mmap(pages.first, static_cast<size_t>(pages.end - pages.first), PROT_NONE,
                                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }
}

}  // namespace shm
