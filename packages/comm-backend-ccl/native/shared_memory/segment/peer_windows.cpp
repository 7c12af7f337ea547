#include "segment/peer_windows.hpp"

#include "segment/memory.hpp"

#include <cerrno>

namespace shm {

PeerWindows::~PeerWindows() {
    for (const auto &one : windows_) {
        unmap_memory(one.second.begin, one.second.bytes);
    }
}

char *PeerWindows::find(int pid, const Place &place, int &error) noexcept {
    const auto key = std::make_pair(pid, place.inode);
    auto known = windows_.find(key);
    if (known == windows_.end()) {
        int descriptor = -1;
        Window window{nullptr, 0};
        try {
            descriptor = open_memory(pid, place.descriptor, place.inode, 0);
            window.bytes = size_of(descriptor);
            window.begin = map_memory(descriptor, window.bytes);
            known = windows_.emplace(key, window).first;
        } catch (const Inaccessible &found) {
            error = found.error;
        } catch (const LimitError &) {
            error = EMFILE;
        } catch (...) {
            error = ENOMEM;
        }
        if (known == windows_.end()) {
            if (window.begin != nullptr) {
                unmap_memory(window.begin, window.bytes);
            }
            if (descriptor >= 0) {
                close_memory(descriptor);
            }
            return nullptr;
        }
        close_memory(descriptor);
    }
    error = EFAULT;
    return place.offset < known->second.bytes ? static_cast<char *>(known->second.begin) + place.offset : nullptr;
}

}  // namespace shm
