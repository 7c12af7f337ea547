// Memory that other processes can map, without a name: nothing is left of it when the last process ends.

#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace shm {

// There is not enough memory, or it cannot be had.
struct SharedMemoryError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// Another process's memory is out of reach, or this process may make none.
struct Inaccessible : SharedMemoryError {
    Inaccessible(const std::string &what, int error) : SharedMemoryError(what), error(error) {}
    const int error;  // as in errno; ESRCH where the process has ended
};
// A limit of this process, such as that of open files, is used up.
struct LimitError : SharedMemoryError {
    using SharedMemoryError::SharedMemoryError;
};

// Of a page of this system: 4 KiB, on some processors 16 or 64 KiB.
size_t page_bytes();
// A descriptor of new memory; only this user's processes can open it.
int create_memory(size_t bytes);
// Throws where there is not so much memory.
void check_memory(size_t bytes, const char *what);
// Makes sure that the memory is there, so that touching it cannot fail.
void reserve_memory(int descriptor, size_t offset, size_t bytes, const char *what);
// Gives the pages back to the system; whoever has them mapped reads zeros afterwards.
void return_memory(int descriptor, size_t offset, size_t bytes);
uint64_t inode_of(int descriptor);
size_t size_of(int descriptor);
// The same memory, opened through the process that holds it; of any size where `bytes` is 0.
int open_memory(int pid, int descriptor, uint64_t inode, size_t bytes);
void close_memory(int descriptor);
void *map_memory(int descriptor, size_t bytes);
void unmap_memory(void *begin, size_t bytes);
// Enters reserved pages into this process's page table at once. Without this, the first access to each takes a fault,
// and whoever measures how long a copy takes measures faults.
void map_pages(void *begin, size_t bytes, bool writes);

// Replaces the pages that are all in [begin, begin + bytes), of the file mapped at `file`, by private ones with the
// same content, and returns theirs to the system. Pages for which there is no memory stay.
void make_private(char *begin, size_t bytes, int descriptor, const char *file) noexcept;
// Gives up the pages that are all in [begin, begin + bytes); their addresses stay taken.
void drop_pages(void *begin, size_t bytes) noexcept;

std::string mebibytes(size_t bytes);

}  // namespace shm
