// The scale of a block of elements, from their magnitudes.

#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace shm {
namespace {

constexpr float least_normal = std::numeric_limits<float>::min();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

// The largest magnitude; infinite or NaN where any is not finite.
float largest(const float *values, size_t count) {
    uint32_t most = 0;
    for (size_t i = 0; i < count; ++i) {
        most = std::max(most, bits_of(values[i]) & 0x7fffffffu);
    }
    return float_of(most);
}

// So that `levels` times the scale is the largest magnitude, and finite; 0 where the quotient would not be normal.
float scale_for(float magnitude, float levels) {
    if (!(magnitude <= std::numeric_limits<float>::max())) {
        return not_a_number;
    }
    float scale = magnitude / levels;
    if (scale < least_normal) {
        return 0.0f;
    }
    if (scale * levels > std::numeric_limits<float>::max()) {
        scale = float_of(bits_of(scale) - 1);
    }
    return scale;
}

// What an encoding lost; 0 where that is not finite.
float without_infinities(float lost) { return (bits_of(lost) & 0x7f800000u) == 0x7f800000u ? 0.0f : lost; }

float inverse_of(float scale) { return scale == 0.0f || scale != scale ? 0.0f : 1.0f / scale; }

}  // namespace
}  // namespace shm
