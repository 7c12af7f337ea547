#include "point_to_point/messages.hpp"

#include <algorithm>
#include <cstring>

namespace shm {

namespace {

class Send final : public Task {
public:
    using Task::Task;

    bool advance(Group &group) override {
        const int me = group.rank(), to = request.root;
        Channel &channel = group.channel(me, to);
        while (!begun_ || at_ < request.bytes()) {
            const uint32_t sent = channel.sent.load(std::memory_order_relaxed);
            if (sent - channel.received.load(std::memory_order_acquire) >= message_slots) {
                return false;
            }
            char *slot = group.message_slot(me, to, sent);
            size_t used = 0;
            if (!begun_) {
                const Announcement announcement{request.bytes(), request.announced_dtype(), request.tag};
                std::memcpy(slot, &announcement, sizeof(announcement));
                used = sizeof(announcement);
                begun_ = true;
            }
            const size_t part = std::min(group.layout().message_bytes - used, request.bytes() - at_);
            if (part > 0) {
                group.write(slot + used, static_cast<const char *>(request.input) + at_, part);
            }
            at_ += part;
            channel.sent.store(sent + 1, std::memory_order_seq_cst);
            group.ring(to);
        }
        return true;
    }

private:
    bool begun_ = false;
    size_t at_ = 0;
};

// The inbox of the group does the work.
class Receive final : public Task {
public:
    using Task::Task;

    bool advance(Group &) override { return now() != pending; }
};

}  // namespace

Handle make_message(Request &&request) {
    if (request.operation == send) {
        return std::make_shared<Send>(std::move(request));
    }
    return std::make_shared<Receive>(std::move(request));
}

}  // namespace shm
