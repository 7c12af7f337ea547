#include "recorder/recorder.hpp"

#include "segment/memory.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace shm::flight {

std::atomic<Lane *> current{nullptr};

namespace {

// From one reading of both clocks to another that says how fast they go.
constexpr uint64_t least_ns = 1000000, between_ns = 100000000, trusted_ns = 1000000000;

double rate(const Moment &from, const Moment &to) {
    return to.ticks > from.ticks ? static_cast<double>(to.ns - from.ns) / static_cast<double>(to.ticks - from.ticks)
                                 : 1.0;
}

// Fails here and not by a signal, later, where the file system has no room.
void reserve(int descriptor, size_t bytes) {
    int failed;
    do {
        failed = fallocate(descriptor, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    } while (failed == EINTR);
    if (failed != 0 && failed != EOPNOTSUPP && failed != ENOSYS) {
        throw SharedMemoryError("the file of the flight recorder needs " + mebibytes(bytes) + " (" +
                                std::strerror(failed) + ")");
    }
}

std::mutex &changing() {
    static auto &made = *new std::mutex;
    return made;
}

}  // namespace

Lane::Lane(int descriptor) {
    struct stat file{};
    Header header{};
    if (fstat(descriptor, &file) != 0 || !S_ISREG(file.st_mode) || file.st_size < static_cast<off_t>(header_bytes) ||
        pread(descriptor, &header, sizeof(header), 0) != static_cast<ssize_t>(sizeof(header)) ||
        std::memcmp(header.magic, magic, sizeof(header.magic)) != 0) {
        throw std::invalid_argument("descriptor " + std::to_string(descriptor) +
                                    " is not the file of a flight recorder");
    }
    const uint64_t records = header.records;
    if (records == 0 || records > largest_records || (records & (records - 1)) != 0 ||
        static_cast<size_t>(file.st_size) < needed_bytes(records)) {
        throw std::invalid_argument("a flight recorder's file of " + std::to_string(file.st_size) + " bytes has " +
                                    std::to_string(records) + " records in each lane");
    }
    bytes_ = needed_bytes(records);
    reserve(descriptor, bytes_);
    begin_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (begin_ == MAP_FAILED) {
        throw SharedMemoryError(std::string("the file of the flight recorder cannot be mapped: ") +
                                std::strerror(errno));
    }
    madvise(begin_, bytes_, MADV_DONTFORK);
    auto *at = static_cast<char *>(begin_);
    clock_ = reinterpret_cast<Clock *>(at + clock_offset);
    records_ = reinterpret_cast<Record *>(at + header_bytes) + own_lane * records;
    mask_ = records - 1;
    do {
        opened_ = now();
    } while (opened_.ns - loaded.ns < least_ns);
    clock_->ns_per_tick.store(rate(loaded, opened_), std::memory_order_relaxed);
    clock_->ticks.store(opened_.ticks, std::memory_order_relaxed);
    clock_->ns.store(opened_.ns, std::memory_order_relaxed);
    read_at_.store(opened_.ticks, std::memory_order_relaxed);
}

void Lane::refine_clock() {
    if (!has_counter) {
        return;
    }
    const double ns_per_tick = clock_->ns_per_tick.load(std::memory_order_relaxed);
    uint64_t last = read_at_.load(std::memory_order_relaxed);
    const uint64_t passed = ticks() - last;
    if (static_cast<double>(passed) * ns_per_tick < static_cast<double>(between_ns) ||
        !read_at_.compare_exchange_strong(last, last + passed, std::memory_order_relaxed)) {
        return;
    }
    const Moment here = now();
    const bool is_long = here.ns - opened_.ns >= trusted_ns;
    clock_->ns_per_tick.store(rate(is_long ? opened_ : loaded, here), std::memory_order_relaxed);
}

void Lane::leave() {
    // Where that fails, the file stays mapped: late ends go into it, which does no harm.
    [[maybe_unused]] const void *kept =
        mmap(begin_, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void record_to(int descriptor) {
    std::unique_ptr<Lane> next = descriptor >= 0 ? std::make_unique<Lane>(descriptor) : nullptr;
    // Nobody holds the mutex in a child, which may record by itself.
    static const int noticed_forks = pthread_atfork([] { changing().lock(); }, [] { changing().unlock(); },
                                                    [] {
                                                        changing().unlock();
                                                        current.store(nullptr, std::memory_order_release);
                                                    });
    static_cast<void>(noticed_forks);
    const std::lock_guard<std::mutex> alone(changing());
    static auto &left = *new std::vector<std::unique_ptr<Lane>>;
    left.reserve(left.size() + 1);
    // Another thread may be writing to the one before.
    if (Lane *before = current.exchange(next.release(), std::memory_order_acq_rel)) {
        before->leave();
        left.emplace_back(before);
    }
}

}  // namespace shm::flight
