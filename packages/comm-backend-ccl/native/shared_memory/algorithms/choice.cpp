// Which algorithm does an operation.

#include "algorithms/eager.hpp"
#include "algorithms/large.hpp"
#include "point_to_point/messages.hpp"

namespace shm {

Handle make_task(Group &group, Request &&request) {
    if (request.operation == send || request.operation == receive) {
        return make_message(std::move(request));
    }
    const bool small = request.operation != all_to_all_v && input_bytes(group, request) <= small_bytes(group);
    if (!small || pieces_for(group, request) > 0) {
        group.reserve_ring();
    }
    if (small) {
        return std::make_shared<Exchange>(group, std::move(request));
    }
    return std::make_shared<Large>(group, std::move(request));
}

}  // namespace shm
