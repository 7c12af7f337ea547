// What DLPack 1.x says of a tensor without taking hold of it, through the table of functions that torch 2.10 and later
// offer as Tensor.__dlpack_c_exchange_api__. The layout is a stable ABI: https://github.com/dmlc/dlpack

#pragma once

#include <cstdint>

namespace dlpack {

constexpr uint32_t major_version = 1;
constexpr int32_t cpu = 1;
enum Code : uint8_t { integer = 0, unsigned_integer = 1, floating = 2, brain = 4, truth = 6 };

struct Tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct ExchangeApi {
    uint32_t major, minor;
    ExchangeApi *previous;
    void *allocate, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void *object, Tensor *tensor);
    void *current_stream;
};

}  // namespace dlpack
