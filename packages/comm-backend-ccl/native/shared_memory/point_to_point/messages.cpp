#include "point_to_point/messages.hpp"

#include <algorithm>
#include <cstring>

namespace shm {

namespace {

class Message final : public Task {
public:
    using Task::Task;

    bool advance(Group &group) override {
        return request.operation == send ? go_on_sending(group) : go_on_receiving(group);
    }

private:
    bool go_on_sending(Group &group) {
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
                const Announcement announcement{request.bytes(), request.dtype};
                std::memcpy(slot, &announcement, sizeof(announcement));
                used = sizeof(announcement);
                begun_ = true;
            }
            const size_t part = std::min(group.layout().message_bytes - used, request.bytes() - at_);
            if (part > 0) {
                group.writer().write(slot + used, static_cast<const char *>(request.input) + at_, part);
            }
            at_ += part;
            group.writer().flag([&] { channel.sent.store(sent + 1, std::memory_order_seq_cst); });
            group.ring(to);
        }
        return true;
    }

    bool go_on_receiving(Group &group) {
        const int me = group.rank(), from = request.root;
        Channel &channel = group.channel(from, me);
        while (!begun_ || at_ < request.bytes()) {
            const uint32_t received = channel.received.load(std::memory_order_relaxed);
            if (channel.sent.load(std::memory_order_acquire) == received) {
                return false;
            }
            const char *slot = group.message_slot(from, me, received);
            size_t used = 0;
            if (!begun_) {
                Announcement announcement;
                std::memcpy(&announcement, slot, sizeof(announcement));
                if (announcement.bytes != request.bytes() || announcement.dtype != request.dtype) {
                    group.fail_over({announcement.bytes, request.bytes(), announcement.dtype, request.dtype}, from, 0);
                    return false;
                }
                used = sizeof(announcement);
                begun_ = true;
            }
            const size_t part = std::min(group.layout().message_bytes - used, request.bytes() - at_);
            if (part > 0) {
                std::memcpy(static_cast<char *>(request.output) + at_, slot + used, part);
            }
            at_ += part;
            channel.received.store(received + 1, std::memory_order_seq_cst);
            group.ring(from);
        }
        return true;
    }

    bool begun_ = false;
    size_t at_ = 0;
};

}  // namespace

Handle make_message(Request &&request) { return std::make_shared<Message>(std::move(request)); }

}  // namespace shm
