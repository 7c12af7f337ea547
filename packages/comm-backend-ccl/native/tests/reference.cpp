#include "reference.hpp"

#include "kernels/kernels.hpp"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>

namespace tests {

namespace {

template <class T>
T element(const void *elements, size_t index) {
    T value;
    std::memcpy(&value, static_cast<const char *>(elements) + index * sizeof(T), sizeof(T));
    return value;
}

template <class T>
void set_element(void *elements, size_t index, T value) {
    std::memcpy(static_cast<char *>(elements) + index * sizeof(T), &value, sizeof(T));
}

// Of sign, exponent and fraction, most significant first.
double value_of(uint16_t bits, int exponent_bits, int fraction_bits) {
    const int sign = bits >> 15, bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
    const int fraction = bits & ((1 << fraction_bits) - 1);
    double value;
    if (exponent == (1 << exponent_bits) - 1) {
        value = fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    } else if (exponent == 0) {
        value = std::ldexp(fraction, 1 - bias - fraction_bits);
    } else {
        value = std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
    }
    return sign != 0 ? -value : value;
}

// Exact: a double has room for every float32, and dividing by a power of two does not round.
uint16_t nearest(double value, int exponent_bits, int fraction_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1, infinite = ((1 << exponent_bits) - 1) << fraction_bits;
    const int sign = std::signbit(value) ? 0x8000 : 0;
    value = std::fabs(value);
    if (std::isnan(value)) {
        return static_cast<uint16_t>(sign | infinite | 1 << (fraction_bits - 1));
    }
    if (std::isinf(value) || value == 0) {
        return static_cast<uint16_t>(sign | (value == 0 ? 0 : infinite));
    }
    const int exponent = std::max(std::ilogb(value), 1 - bias);
    const double scaled = std::ldexp(value, fraction_bits - exponent), low = std::floor(scaled), over = scaled - low;
    auto integer = static_cast<int64_t>(low);
    integer += over > 0.5 || (over == 0.5 && integer % 2 != 0) ? 1 : 0;
    // A carry out of the fraction goes into the exponent, and out of the largest one into infinity.
    const int64_t bits = (static_cast<int64_t>(exponent + bias - 1) << fraction_bits) + integer;
    return static_cast<uint16_t>(sign | (bits > infinite ? infinite : bits));
}

template <class T>
T combined(int op, T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
        if ((op == shm::minimum || op == shm::maximum) && (std::isnan(a) || std::isnan(b))) {
            return std::numeric_limits<T>::quiet_NaN();
        }
    }
    switch (op) {
    case shm::minimum:
        return a < b ? a : b;
    case shm::maximum:
        return a > b ? a : b;
    default:
        break;
    }
    if constexpr (std::is_floating_point_v<T>) {
        return op == shm::product ? a * b : a + b;
    } else {
        const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
        switch (op) {
        case shm::product:
            return static_cast<T>(x * y);
        case shm::bit_and:
            return static_cast<T>(x & y);
        case shm::bit_or:
            return static_cast<T>(x | y);
        case shm::bit_xor:
            return static_cast<T>(x ^ y);
        default:
            return static_cast<T>(x + y);
        }
    }
}

template <class T>
T tree(int op, const T *values, size_t count) {
    if (count == 1) {
        return values[0];
    }
    size_t left = 1;
    while (left * 2 < count) {
        left *= 2;
    }
    return combined<T>(op, tree(op, values, left), tree(op, values + left, count - left));
}

// `A` is what a `T` is reduced as.
template <class A, class T, class Read, class Write>
void reduce_as(int op, void *output, const std::vector<const void *> &inputs, size_t count, Read read, Write write) {
    std::vector<A> values(inputs.size());
    for (size_t i = 0; i < count; ++i) {
        for (size_t one = 0; one < inputs.size(); ++one) {
            values[one] = read(element<T>(inputs[one], i));
        }
        A result = tree(op, values.data(), values.size());
        if (op == shm::average) {
            result = static_cast<A>(result / static_cast<A>(inputs.size()));
        }
        set_element<T>(output, i, write(result));
    }
}

template <class T>
void reduce_plain(int op, void *output, const std::vector<const void *> &inputs, size_t count) {
    const auto same = [](T value) { return value; };
    reduce_as<T, T>(op, output, inputs, count, same, same);
}

}  // namespace

uint64_t Random::next() {
    uint64_t mixed = state += 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
    return mixed ^ mixed >> 31;
}

double half_value(uint16_t bits) { return value_of(bits, 5, 10); }
double brain_value(uint16_t bits) { return value_of(bits, 8, 7); }
uint16_t nearest_half(double value) { return nearest(value, 5, 10); }
uint16_t nearest_brain(double value) { return nearest(value, 8, 7); }

void fill(void *to, int dtype, size_t count, Random &random, bool any_bits) {
    const size_t item = shm::item_bytes(dtype);
    for (size_t i = 0; i < count; ++i) {
        const uint64_t bits = random.next();
        const double magnitude = 0.5 + static_cast<double>(bits >> 12) * 0x1p-52 * 1.5;
        const double value = bits & 1 ? -magnitude : magnitude;
        if (dtype == shm::boolean) {
            set_element<uint8_t>(to, i, bits & 1);
        } else if (any_bits || (dtype < shm::float16)) {
            std::memcpy(static_cast<char *>(to) + i * item, &bits, item);
        } else if (dtype == shm::float64) {
            set_element<double>(to, i, value);
        } else if (dtype == shm::float32) {
            set_element<float>(to, i, static_cast<float>(value));
        } else {
            set_element<uint16_t>(to, i, dtype == shm::float16 ? nearest_half(value) : nearest_brain(value));
        }
    }
}

void reduce(int dtype, int op, void *output, const std::vector<const void *> &inputs, size_t count) {
    switch (dtype) {
    case shm::int8:
        return reduce_plain<int8_t>(op, output, inputs, count);
    case shm::uint8:
        return reduce_plain<uint8_t>(op, output, inputs, count);
    case shm::int16:
        return reduce_plain<int16_t>(op, output, inputs, count);
    case shm::uint16:
        return reduce_plain<uint16_t>(op, output, inputs, count);
    case shm::int32:
        return reduce_plain<int32_t>(op, output, inputs, count);
    case shm::uint32:
        return reduce_plain<uint32_t>(op, output, inputs, count);
    case shm::int64:
        return reduce_plain<int64_t>(op, output, inputs, count);
    case shm::uint64:
        return reduce_plain<uint64_t>(op, output, inputs, count);
    case shm::float32:
        return reduce_plain<float>(op, output, inputs, count);
    case shm::float64:
        return reduce_plain<double>(op, output, inputs, count);
    case shm::float16:
        return reduce_as<float, uint16_t>(
            op, output, inputs, count, [](uint16_t bits) { return static_cast<float>(half_value(bits)); },
            nearest_half);
    case shm::bfloat16:
        return reduce_as<float, uint16_t>(
            op, output, inputs, count, [](uint16_t bits) { return static_cast<float>(brain_value(bits)); },
            nearest_brain);
    case shm::boolean:
        // Wide, so that 64 times true is not 0.
        return reduce_as<int64_t, uint8_t>(
            op, output, inputs, count, [](uint8_t byte) -> int64_t { return byte; },
            [](int64_t value) -> uint8_t { return value != 0; });
    }
}

size_t difference(int dtype, const void *found, const void *expected, size_t count) {
    const size_t item = shm::item_bytes(dtype);
    if (count == 0 || std::memcmp(found, expected, count * item) == 0) {
        return count;
    }
    for (size_t i = 0; i < count; ++i) {
        if (std::memcmp(static_cast<const char *>(found) + i * item, static_cast<const char *>(expected) + i * item,
                        item) == 0) {
            continue;
        }
        double a = 0, b = 0;
        if (dtype == shm::float32) {
            a = element<float>(found, i), b = element<float>(expected, i);
        } else if (dtype == shm::float64) {
            a = element<double>(found, i), b = element<double>(expected, i);
        } else if (dtype == shm::float16 || dtype == shm::bfloat16) {
            const auto value = dtype == shm::float16 ? half_value : brain_value;
            a = value(element<uint16_t>(found, i)), b = value(element<uint16_t>(expected, i));
        }
        if (!(std::isnan(a) && std::isnan(b))) {
            return i;
        }
    }
    return count;
}

std::string shown(int dtype, const void *elements, size_t index) {
    std::string text = "0x";
    const size_t item = shm::item_bytes(dtype);
    for (size_t byte = item; byte-- > 0;) {
        char digits[3];
        std::snprintf(digits, sizeof(digits), "%02x", element<uint8_t>(elements, index * item + byte));
        text += digits;
    }
    return text;
}

}  // namespace tests
