// What reductions have to come to, one element at a time and without the engine's code.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tests {

using Bytes = std::vector<char>;

struct Random {
    uint64_t state;
    uint64_t next();
    size_t below(size_t limit) { return static_cast<size_t>(next() % limit); }
};

// Elements of which even the product of 64 is no NaN; with `any_bits` all that there can be.
void fill(void *to, int dtype, size_t count, Random &random, bool any_bits = false);
// (first half) op (second half) of the inputs, where the first half is the largest power of two below their number.
void reduce(int dtype, int op, void *output, const std::vector<const void *> &inputs, size_t count);
// The first element that differs, or `count`; all NaN are the same.
size_t difference(int dtype, const void *found, const void *expected, size_t count);
std::string shown(int dtype, const void *elements, size_t index);

double half_value(uint16_t bits);
double brain_value(uint16_t bits);
uint16_t nearest_half(double value);
uint16_t nearest_brain(double value);

}  // namespace tests
