// Messages from other ranks on their way to the receives of this one.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <vector>

namespace shm {

class Group;
class Task;
struct Announcement;

// The source of a receive that takes a message of any rank.
constexpr int any_source = -1;

// Matches as MPI does: a message goes to the receive that was posted first among those that name its tag, and its
// source or none; a receive takes the message that arrived first among those. Messages of one rank with one tag stay in
// the order in which they were sent. A message that no receive asks for is kept where another of its rank is behind it.
//
// The caller holds the lock of the group.
class Inbox {
public:
    explicit Inbox(int size) : streams_(static_cast<size_t>(size)), posted_(static_cast<size_t>(size)) {}
    Inbox(const Inbox &) = delete;

    // Whether the receive is complete, with a message that was kept.
    bool post(Group &group, const std::shared_ptr<Task> &receive);
    // Reads what has arrived, and returns how many receives are complete with it.
    int advance(Group &group);
    // Ends every receive by `end(task)`, and drops what was kept.
    template <class End>
    void clear(End end) {
        for (Stream &stream : streams_) {
            if (stream.receive) {
                end(*stream.receive);
            }
            stream = {};
        }
        for (auto &queue : posted_) {
            end_queue(queue, end);
        }
        end_queue(posted_for_any_, end);
        kept_.clear();
        kept_bytes_ = 0;
    }
    // One of the receives, or nullptr.
    std::shared_ptr<Task> first() const;
    // The ranks, as bits, that may complete a receive; `others` are all but this one.
    uint64_t awaited(uint64_t others) const;

    // Of messages that no receive asks for; above, the group fails. Tests lower it.
    static inline size_t most_kept_bytes = size_t{1} << 30;

private:
    struct Kept {
        int source, tag;
        uint32_t dtype;
        size_t bytes;
        std::unique_ptr<char[]> memory;
        bool whole = false;
    };
    struct Posted {
        std::shared_ptr<Task> receive;
        uint64_t number;
    };
    // The message that a rank is sending, and where it goes: to a receive, or to what is kept.
    struct Stream {
        bool begun = false;
        char *memory = nullptr;
        size_t bytes = 0, at = 0;
        std::shared_ptr<Task> receive;
        std::list<Kept>::iterator kept{};
    };
    using Queue = std::deque<Posted>;

    template <class End>
    static void end_queue(Queue &queue, End end) {
        for (const Posted &one : queue) {
            end(*one.receive);
        }
        queue.clear();
    }
    bool is_wanted(size_t from) const { return !posted_[from].empty() || !posted_for_any_.empty(); }
    int read(Group &group, int from);
    bool begin(Group &group, int from, const Announcement &announcement);
    bool keep(Group &group, int from, const Announcement &announcement);
    void forget(std::list<Kept>::iterator kept);

    std::vector<Stream> streams_;
    std::vector<Queue> posted_;  // for each source, as they were posted
    Queue posted_for_any_;
    uint64_t number_ = 0;   // of receives
    std::list<Kept> kept_;  // as they arrived
    size_t kept_bytes_ = 0;
    int first_ = 0;  // whose messages are looked at first: a rank that sends much must not hide the others
};

}  // namespace shm
