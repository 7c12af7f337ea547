// Memory that other processes can map, without a name: nothing is left of it when the last process ends.

#pragma once

#include "segment/layout.hpp"

#include <cstddef>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace shm {

// Not enough of something.
struct SharedMemoryError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// Another process's memory is out of reach.
struct Inaccessible : SharedMemoryError {
    using SharedMemoryError::SharedMemoryError;
};

// A descriptor of new memory; only this user's processes can open it.
int create_memory(size_t bytes);
// Throws where there is not so much memory.
void check_memory(size_t bytes, const char *what);
// Makes sure that the memory is there, so that touching it cannot fail.
void reserve_memory(int descriptor, size_t offset, size_t bytes, const char *what);
uint64_t inode_of(int descriptor);
// The same memory, opened through the process that holds it; of any size where `bytes` is 0.
int open_memory(int pid, int descriptor, uint64_t inode, size_t bytes);
void close_memory(int descriptor);
void *map_memory(int descriptor, size_t bytes);
void unmap_memory(void *begin, size_t bytes);

// Tensors of this process that peers can map. Freed memory is kept for the next.
class Arena {
public:
    static Arena &instance();
    void *allocate(size_t bytes);
    void free(void *begin);
    // Where peers find [begin, begin + bytes); none unless all of it is here.
    Place find(const void *begin, size_t bytes);
    // Never again uses the memory around `begin` for another tensor: a peer may yet write to it.
    void retire(const void *begin);
    // Gives what is not in use back to the system.
    void trim();
    size_t bytes();

private:
    struct Block {
        size_t bytes;  // mapped
        int descriptor;
        uint64_t inode;
        bool used, retired;
    };
    void give_back_unused();

    std::mutex mutex_;
    std::map<char *, Block> blocks_;
};

// What peers hold, mapped here.
class Mapped {
public:
    ~Mapped();
    // nullptr where it cannot be mapped.
    char *find(int pid, const Place &place);

private:
    struct Window {
        void *begin;
        size_t bytes;
    };
    std::map<std::pair<int, uint64_t>, Window> windows_;
};

}  // namespace shm
