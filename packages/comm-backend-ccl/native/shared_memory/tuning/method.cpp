#include "tuning/method.hpp"

#include "progress/group.hpp"

namespace shm {

const char *const transfer_names[transfers] = {"cached", "streamed", "single_copy"};

Methods methods_for(int operation, int ranks, int dtype, bool is_eager, bool can_read_peers) {
    Methods found;
    if (operation == all_reduce && !is_eager) {
        // 16-bit floats cost more to add than to copy.
        const bool narrow = dtype == float16 || dtype == bfloat16, pair = ranks == 2;
        found.add({cached, pair && !narrow});
        found.add({streamed, pair && !narrow});
        if (pair) {
            found.add({cached, narrow});
        }
    } else if ((operation == broadcast || operation == reduce) && !is_eager) {
        // Whoever takes does nothing until the first chunk is there.
        const bool pair = operation == reduce && ranks == 2;
        found.add({cached, pair, true});
        found.add({streamed, pair, true});
        found.add({cached, pair, false});
        found.add({cached, pair, false, RingSize::near});
    } else {
        found.add({cached});
        found.add({streamed});
        if (is_eager) {
            found.add({cached, false, false, RingSize::wide});
        }
    }
    // Of an all_to_all_v, what is small is shown before anybody knows whether all is.
    if (can_read_peers && !(operation == all_to_all_v && is_eager)) {
        found.add({single_copy});
    }
    return found;
}

}  // namespace shm
