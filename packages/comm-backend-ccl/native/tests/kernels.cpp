// Each build of the kernels that this machine can run against the reference, and with that against each other.

#include "kernels/kernels.hpp"

#include "check.hpp"
#include "float_mode.hpp"
#include "reference.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>

using namespace tests;

namespace {

constexpr size_t longest = 1000;

const std::vector<const shm::Kernels *> &builds() {
    static const std::vector<const shm::Kernels *> all = [] {
        std::vector<const shm::Kernels *> found;
        for (const char *name : {"portable", "avx2", "avx512", "neon"}) {
            if (const shm::Kernels *one = shm::kernels_named(name)) {
                found.push_back(one);
            } else {
                std::printf("       this machine has no %s\n", name);
            }
        }
        return found;
    }();
    return all;
}

std::vector<size_t> counts() {
    std::vector<size_t> found;
    for (size_t count = 0; count <= 70; ++count) {
        found.push_back(count);
    }
    found.insert(found.end(), {511, 512, 513, longest});
    return found;
}

// Elements of a dtype from an address that is aligned to 64 bytes and `offset` elements.
class Tensor {
public:
    Tensor(int dtype, size_t offset) : bytes_((longest + offset + 1) * shm::item_bytes(dtype) + 192, 0x5a) {
        const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
        begin_ = (64 - address % 64) % 64 + offset * shm::item_bytes(dtype);
    }
    char *data() { return bytes_.data() + begin_; }
    const Bytes &bytes() const { return bytes_; }
    // Whether nothing but the first `bytes` differs from what `before` was.
    bool untouched(const Bytes &before, size_t bytes) const {
        return std::memcmp(bytes_.data(), before.data(), begin_) == 0 &&
               std::memcmp(bytes_.data() + begin_ + bytes, before.data() + begin_ + bytes,
                           bytes_.size() - begin_ - bytes) == 0;
    }

private:
    Bytes bytes_;
    size_t begin_;
};

void compare(const shm::Kernels &build, int dtype, int op, size_t input_count, bool any_bits, Random &random) {
    const size_t item = shm::item_bytes(dtype);
    std::vector<Tensor> inputs;
    std::vector<const void *> pointers;
    for (size_t one = 0; one < input_count; ++one) {
        inputs.emplace_back(dtype, random.below(9));
    }
    for (Tensor &input : inputs) {
        fill(input.data(), dtype, longest, random, any_bits);
        pointers.push_back(input.data());
    }
    Bytes expected(longest * item);
    reduce(dtype, op, expected.data(), pointers, longest);
    size_t turn = 0;
    for (const size_t count : counts()) {
        // Into one or several outputs, and into an input.
        const bool aliased = ++turn % 3 == 0;
        const size_t output_count = 1 + random.below(3), into = random.below(input_count);
        std::vector<Tensor> outputs;
        std::vector<void *> targets;
        std::vector<Bytes> before;
        for (size_t one = 0; one < output_count; ++one) {
            outputs.emplace_back(dtype, random.below(9));
        }
        const Bytes kept(pointers[into] == nullptr ? Bytes() : inputs[into].bytes());
        for (Tensor &output : outputs) {
            targets.push_back(output.data());
            before.push_back(output.bytes());
        }
        if (aliased) {
            targets[output_count - 1] = inputs[into].data();
        }
        build.reduce(dtype, op, targets.data(), static_cast<int>(output_count), pointers.data(),
                     static_cast<int>(input_count), count, turn % 2 == 0);
        for (size_t one = 0; one < output_count; ++one) {
            const size_t at = difference(dtype, targets[one], expected.data(), count);
            CHECK(at == count, build.name << ", dtype " << dtype << ", op " << op << ", " << input_count
                                          << " inputs of " << count << ", output " << one << (aliased ? " aliased" : "")
                                          << ": element " << at << " is " << shown(dtype, targets[one], at) << ", not "
                                          << shown(dtype, expected.data(), at));
            const bool is_input = aliased && one == output_count - 1;
            const Tensor &tensor = is_input ? inputs[into] : outputs[one];
            CHECK(tensor.untouched(is_input ? kept : before[one], count * item),
                  build.name << " wrote beside " << count << " elements of dtype " << dtype << ", op " << op);
        }
        if (aliased) {
            std::memcpy(inputs[into].data(), kept.data() + (inputs[into].data() - inputs[into].bytes().data()),
                        longest * item);
        }
    }
}

// One element through a reduction of one input is only converted.
std::vector<uint16_t> through(const shm::Kernels &build, int dtype, int op, const std::vector<uint16_t> &a,
                              const std::vector<uint16_t> *b = nullptr) {
    std::vector<uint16_t> result(a.size());
    void *outputs[] = {result.data()};
    const void *inputs[] = {a.data(), b == nullptr ? nullptr : b->data()};
    build.reduce(dtype, op, outputs, 1, inputs, b == nullptr ? 1 : 2, a.size(), false);
    return result;
}

std::vector<uint16_t> all_values() {
    std::vector<uint16_t> values(65536);
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<uint16_t>(i);
    }
    return values;
}

}  // namespace

// In parts, of which the last is shorter.
TEST(kernels_reduce_long_tensors_into_several) {
    Random random{options.seed};
    for (const shm::Kernels *build : builds()) {
        for (const int dtype : {shm::int8, shm::bfloat16, shm::float32, shm::float64}) {
            const size_t count = (size_t{20} << 10) / shm::item_bytes(dtype) + 7,
                         bytes = count * shm::item_bytes(dtype);
            std::vector<Bytes> inputs(3, Bytes(bytes));
            std::vector<const void *> pointers;
            for (Bytes &input : inputs) {
                fill(input.data(), dtype, count, random, false);
                pointers.push_back(input.data());
            }
            Bytes expected(bytes);
            reduce(dtype, shm::sum, expected.data(), pointers, count);
            for (const bool streams : {false, true}) {
                // The second is an input as well.
                std::vector<Bytes> all(inputs);
                std::vector<const void *> from{all[0].data(), all[1].data(), all[2].data()};
                Bytes first(bytes), third(bytes);
                void *outputs[] = {first.data(), all[1].data(), third.data()};
                build->reduce(dtype, shm::sum, outputs, 3, from.data(), 3, count, streams);
                for (const void *output : outputs) {
                    const size_t at = difference(dtype, output, expected.data(), count);
                    CHECK(at == count, build->name << ", dtype " << dtype << ": element " << at);
                }
            }
        }
    }
}

TEST(kernels_reduce) {
    Random random{options.seed};
    constexpr size_t numbers[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64};
    for (const shm::Kernels *build : builds()) {
        for (int dtype = 0; dtype < shm::dtypes; ++dtype) {
            for (int op = 0; op < shm::ops; ++op) {
                for (const size_t number : numbers) {
                    if (shm::reduces(dtype, op)) {
                        compare(*build, dtype, op, number, number % 2 == 0, random);
                    }
                }
            }
        }
    }
}

TEST(kernels_keep_every_16_bit_float) {
    const std::vector<uint16_t> values = all_values();
    for (const shm::Kernels *build : builds()) {
        for (const int dtype : {shm::float16, shm::bfloat16}) {
            for (const int op : {shm::sum, shm::minimum, shm::average}) {
                const std::vector<uint16_t> found = through(*build, dtype, op, values);
                const size_t at = difference(dtype, found.data(), values.data(), values.size());
                CHECK(at == values.size(), build->name << ", dtype " << dtype << ", op " << op << ": " << std::hex << at
                                                       << " became " << found[at]);
            }
        }
    }
}

// Sums, products and means of two give every kind of float32 that there is to round: ties, denormals, too large ones.
TEST(kernels_round_16_bit_floats) {
    Random random{options.seed};
    const std::vector<uint16_t> values = all_values();
    for (const int dtype : {shm::float16, shm::bfloat16}) {
        const auto value = dtype == shm::float16 ? half_value : brain_value;
        const auto nearest = dtype == shm::float16 ? nearest_half : nearest_brain;
        for (int round = 0; round < 24; ++round) {
            std::vector<uint16_t> others(values.size());
            for (size_t i = 0; i < others.size(); ++i) {
                // At random, or near in magnitude: within some exponents.
                const uint64_t bits = random.next();
                const int near = static_cast<int>(i & 0x7fff) + static_cast<int>(bits % 0x4000) - 0x2000;
                others[i] = static_cast<uint16_t>(round % 2 == 0 ? bits : (bits & 0x8000) | (near & 0x7fff));
            }
            const int op = round % 3 == 0 ? shm::product : round % 3 == 1 ? shm::sum : shm::average;
            std::vector<uint16_t> expected(values.size());
            for (size_t i = 0; i < values.size(); ++i) {
                const auto a = static_cast<float>(value(values[i])), b = static_cast<float>(value(others[i]));
                const float result = op == shm::product ? a * b : op == shm::sum ? a + b : (a + b) / 2;
                expected[i] = nearest(result);
            }
            for (const shm::Kernels *build : builds()) {
                const std::vector<uint16_t> found = through(*build, dtype, op, values, &others);
                const size_t at = difference(dtype, found.data(), expected.data(), values.size());
                CHECK(at == values.size(), build->name << ", dtype " << dtype << ", op " << op << " of " << std::hex
                                                       << values[at] << " and " << others[at] << ": " << found[at]
                                                       << ", not " << expected[at]);
            }
        }
    }
}

// Every pair of: zeros, denormals, the smallest and largest normal number, 1, infinities and NaN, with both signs.
// Instructions for the least and the greatest differ in which zero they take. The thread's mode changes nothing.
std::vector<uint64_t> extremes(int fraction_bits, int exponent_bits) {
    const uint64_t one = 1, infinite = ((one << exponent_bits) - 1) << fraction_bits;
    std::vector<uint64_t> found;
    for (const uint64_t sign : {uint64_t{0}, one << (fraction_bits + exponent_bits)}) {
        for (const uint64_t bits : {uint64_t{0}, one, (one << fraction_bits) - 1, one << fraction_bits,
                                    ((one << (exponent_bits - 1)) - 1) << fraction_bits, infinite - 1, infinite,
                                    infinite + 1, infinite | one << (fraction_bits - 1)}) {
            found.push_back(sign | bits);
        }
    }
    return found;
}

TEST(kernels_combine_extremes) {
    struct Format {
        int dtype, fraction_bits, exponent_bits;
    };
    for (const auto &[dtype, fraction_bits, exponent_bits] :
         {Format{shm::float16, 10, 5}, Format{shm::bfloat16, 7, 8}, Format{shm::float32, 23, 8},
          Format{shm::float64, 52, 11}}) {
        const std::vector<uint64_t> values = extremes(fraction_bits, exponent_bits);
        const size_t item = shm::item_bytes(dtype), count = values.size() * values.size();
        Bytes first(count * item), second(count * item), expected(count * item), found(count * item);
        for (size_t i = 0; i < count; ++i) {
            std::memcpy(first.data() + i * item, &values[i / values.size()], item);
            std::memcpy(second.data() + i * item, &values[i % values.size()], item);
        }
        for (int op = 0; op < shm::ops; ++op) {
            // Two are combined at once, three by way of float32.
            for (const std::vector<const void *> &inputs :
                 {std::vector<const void *>{first.data(), second.data()},
                  std::vector<const void *>{second.data(), first.data(), second.data()}}) {
                if (!shm::reduces(dtype, op)) {
                    continue;
                }
                reduce(dtype, op, expected.data(), inputs, count);
                for (const shm::Kernels *build : builds()) {
                    void *outputs[] = {found.data()};
                    {
                        const OtherFloatMode mode;
                        build->reduce(dtype, op, outputs, 1, inputs.data(), static_cast<int>(inputs.size()), count,
                                      false);
                        CHECK(mode.is_set(), build->name << " changed the mode of its caller");
                    }
                    const size_t at = difference(dtype, found.data(), expected.data(), count);
                    CHECK(at == count, build->name << ", dtype " << dtype << ", op " << op << " of "
                                                   << shown(dtype, first.data(), at) << " and "
                                                   << shown(dtype, second.data(), at) << ": "
                                                   << shown(dtype, found.data(), at) << ", not "
                                                   << shown(dtype, expected.data(), at));
                }
            }
        }
    }
}

// The reference itself, where the right answer is known.
TEST(reference_rounds_to_even) {
    struct Known {
        double value;
        uint16_t half, brain;
    };
    for (const Known &known :
         {Known{1, 0x3c00, 0x3f80}, Known{-2, 0xc000, 0xc000}, Known{65504, 0x7bff, 0x4780},
          Known{65519, 0x7bff, 0x4780}, Known{65520, 0x7c00, 0x4780}, Known{1e30, 0x7c00, 0x714a},
          Known{0x1p-24, 0x0001, 0x3380}, Known{0x1p-25, 0, 0x3300}, Known{0x1.8p-24, 2, 0x33c0}, Known{0x1p-133, 0, 1},
          Known{0x1p-134, 0, 0}, Known{-0x1.8p-133, 0x8000, 0x8002}, Known{1 + 0x1p-11, 0x3c00, 0x3f80},
          Known{1 + 0x1p-8, 0x3c04, 0x3f80}, Known{1 + 0x1.8p-7, 0x3c0c, 0x3f82}, Known{3.4e38, 0x7c00, 0x7f80}}) {
        CHECK(nearest_half(known.value) == known.half && nearest_brain(known.value) == known.brain,
              known.value << ": " << std::hex << nearest_half(known.value) << " " << nearest_brain(known.value));
    }
}

TEST(kernels_copy) {
    Random random{options.seed};
    Bytes from(200000), to(200000);
    for (char &byte : from) {
        byte = static_cast<char>(random.next());
    }
    for (const shm::Kernels *build : builds()) {
        for (int turn = 0; turn < 600; ++turn) {
            const size_t bytes = turn < 200 ? static_cast<size_t>(turn) : random.below(turn < 400 ? 9000 : 190000);
            const size_t read = random.below(200), write = 1 + random.below(200);
            for (const auto copy : {build->copy, build->show, build->stream, build->stream_pages}) {
                std::memset(to.data(), 0x5a, write + bytes + 300);
                copy(to.data() + write, from.data() + read, bytes);
                CHECK(std::memcmp(to.data() + write, from.data() + read, bytes) == 0,
                      build->name << ": " << bytes << " bytes from " << read << " to " << write);
                CHECK(to[write - 1] == 0x5a && to[write + bytes] == 0x5a,
                      build->name << " wrote beside " << bytes << " bytes");
            }
        }
    }
}
