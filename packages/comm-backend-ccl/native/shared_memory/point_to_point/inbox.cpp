#include "point_to_point/inbox.hpp"

#include "progress/group.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace shm {

namespace {

// Whether a receive has room for exactly this message; the group fails where it has not.
bool fits(Group &group, const Task &receive, int source, uint64_t bytes, uint32_t dtype) {
    const Request &request = receive.request;
    if (bytes == request.bytes() && dtype == request.announced_dtype()) {
        return true;
    }
    group.fail_over({bytes, request.bytes(), dtype, request.announced_dtype()}, source, 0);
    return false;
}

template <class Queue>
auto find_tag(Queue &queue, int tag) {
    return std::find_if(queue.begin(), queue.end(), [tag](const auto &one) { return one.receive->request.tag == tag; });
}

}  // namespace

bool Inbox::post(Group &group, const std::shared_ptr<Task> &receive) {
    const Request &request = receive->request;
    const auto kept = std::find_if(kept_.begin(), kept_.end(), [&](const Kept &one) {
        return one.tag == request.tag && (request.root == any_source || request.root == one.source);
    });
    if (kept == kept_.end()) {
        Queue &queue = request.root == any_source ? posted_for_any_ : posted_[static_cast<size_t>(request.root)];
        queue.push_back({receive, number_++});
        return false;
    }
    const int source = kept->source;
    Stream &stream = streams_[static_cast<size_t>(source)];
    const size_t arrived = kept->whole ? kept->bytes : stream.at;
    const bool whole = kept->whole;
    if (!fits(group, *receive, source, kept->bytes, kept->dtype)) {
        posted_[static_cast<size_t>(source)].push_back({receive, number_++});  // to fail with all others
        return false;
    }
    receive->source.store(source, std::memory_order_relaxed);
    if (arrived > 0) {
        std::memcpy(request.output, kept->memory.get(), arrived);
    }
    forget(kept);
    if (!whole) {  // the rest of it goes there
        stream.memory = static_cast<char *>(request.output);
        stream.receive = receive;
        stream.kept = {};
        return false;
    }
    group.finish(*receive, complete);
    return true;
}

int Inbox::advance(Group &group) {
    int ended = 0;
    const int size = group.size(), first = first_;
    for (int turn = 0; turn < size; ++turn) {
        const int from = (first + turn) % size;
        const auto index = static_cast<size_t>(from);
        if (from != group.rank() && (streams_[index].begun || is_wanted(index))) {
            ended += read(group, from);
        }
    }
    return ended;
}

int Inbox::read(Group &group, int from) {
    const int me = group.rank();
    Stream &stream = streams_[static_cast<size_t>(from)];
    Channel &channel = group.channel(from, me);
    int ended = 0;
    while (stream.begun || is_wanted(static_cast<size_t>(from))) {
        const uint32_t received = channel.received.load(std::memory_order_relaxed);
        if (channel.sent.load(std::memory_order_acquire) == received) {
            break;
        }
        const char *slot = group.message_slot(from, me, received);
        size_t used = 0;
        if (!stream.begun) {
            Announcement announcement;
            std::memcpy(&announcement, slot, sizeof(announcement));
            if (!begin(group, from, announcement)) {
                break;
            }
            used = sizeof(announcement);
        }
        const size_t part = std::min(group.layout().message_bytes - used, stream.bytes - stream.at);
        if (part > 0) {
            std::memcpy(stream.memory + stream.at, slot + used, part);
        }
        stream.at += part;
        channel.received.store(received + 1, std::memory_order_seq_cst);
        group.ring(from);
        if (stream.at < stream.bytes) {
            continue;
        }
        if (stream.receive) {
            group.finish(*stream.receive, complete);
            ++ended;
        } else {
            stream.kept->whole = true;
        }
        stream = {};
    }
    return ended;
}

// Chooses where a message goes; false where the group has failed.
bool Inbox::begin(Group &group, int from, const Announcement &announcement) {
    Stream &stream = streams_[static_cast<size_t>(from)];
    Queue &named = posted_[static_cast<size_t>(from)];
    const auto by_name = find_tag(named, announcement.tag);
    const auto by_any = find_tag(posted_for_any_, announcement.tag);
    const bool is_named = by_name != named.end();
    if (!is_named && by_any == posted_for_any_.end()) {
        return keep(group, from, announcement);
    }
    const bool takes_named = is_named && (by_any == posted_for_any_.end() || by_name->number < by_any->number);
    const auto chosen = takes_named ? by_name : by_any;
    if (!fits(group, *chosen->receive, from, announcement.bytes, announcement.dtype)) {
        return false;
    }
    stream.receive = std::move(chosen->receive);
    stream.receive->source.store(from, std::memory_order_relaxed);
    stream.memory = static_cast<char *>(stream.receive->request.output);
    stream.bytes = announcement.bytes;
    stream.begun = true;
    (takes_named ? named : posted_for_any_).erase(chosen);
    if (!takes_named) {
        first_ = (from + 1) % group.size();
    }
    return true;
}

bool Inbox::keep(Group &group, int from, const Announcement &announcement) {
    if (announcement.bytes > most_kept_bytes || kept_bytes_ + announcement.bytes > most_kept_bytes) {
        group.fail(unmatched, from, 0);
        return false;
    }
    try {
        Kept kept{from, announcement.tag, announcement.dtype, announcement.bytes, nullptr};
        kept.memory.reset(new char[std::max<size_t>(announcement.bytes, 1)]);
        kept_.push_back(std::move(kept));
    } catch (const std::bad_alloc &) {
        group.fail(unmatched, from, 0);
        return false;
    }
    kept_bytes_ += announcement.bytes;
    Stream &stream = streams_[static_cast<size_t>(from)];
    stream.kept = std::prev(kept_.end());
    stream.memory = stream.kept->memory.get();
    stream.bytes = announcement.bytes;
    stream.begun = true;
    return true;
}

void Inbox::forget(std::list<Kept>::iterator kept) {
    kept_bytes_ -= kept->bytes;
    kept_.erase(kept);
}

std::shared_ptr<Task> Inbox::first() const {
    for (const Stream &stream : streams_) {
        if (stream.receive) {
            return stream.receive;
        }
    }
    for (const Queue &queue : posted_) {
        if (!queue.empty()) {
            return queue.front().receive;
        }
    }
    return posted_for_any_.empty() ? nullptr : posted_for_any_.front().receive;
}

uint64_t Inbox::awaited(uint64_t others) const {
    uint64_t found = posted_for_any_.empty() ? 0 : others;
    for (size_t source = 0; source < posted_.size(); ++source) {
        if (!posted_[source].empty() || streams_[source].receive) {
            found |= uint64_t{1} << source;
        }
    }
    return found;
}

}  // namespace shm
