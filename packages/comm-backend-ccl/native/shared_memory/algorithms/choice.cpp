// Which algorithm does an operation.

#include "algorithms/eager.hpp"
#include "algorithms/large.hpp"
#include "point_to_point/messages.hpp"

namespace shm {

Handle make_task(Group &group, Request &&request) {
    if (request.operation == send || request.operation == receive) {
        return make_message(std::move(request));
    }
    if (request.operation != all_to_all_v && pieces_for(group, request) == 0) {
        return std::make_shared<Exchange>(group, std::move(request));
    }
    group.reserve_ring();
    return std::make_shared<Large>(group, std::move(request));
}

}  // namespace shm
