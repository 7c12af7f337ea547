// Each build of the codecs that this machine can run gives the bits of the portable one, and keeps the stated bounds.

#include "kernels/kernels.hpp"

#include "check.hpp"
#include "float_mode.hpp"
#include "reference.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

using namespace tests;

namespace {

using Values = std::vector<float>;

enum Kind { usual, wide, tiny, zeros, huge, most, extreme, kinds };

Values values_of(Kind kind, size_t count, Random &random) {
    Values found(count);
    for (float &value : found) {
        const float one = static_cast<float>(static_cast<double>(random.below(2000001)) / 1e6 - 1.0);
        const int exponent = static_cast<int>(random.below(200)) - 100;
        value = kind == zeros  ? (random.below(2) ? 0.0f : -0.0f)
                : kind == wide ? std::ldexp(one, exponent)
                : kind == tiny ? one * 1e-40f
                : kind == huge ? one * std::numeric_limits<float>::max()
                : kind == most ? std::copysign(std::numeric_limits<float>::max(), one)
                               : one;
    }
    if (kind == extreme && count > 0) {
        found[random.below(count)] = random.below(2) ? INFINITY : NAN;
    }
    return found;
}

bool same_bits(const Values &one, const Values &other) {
    for (size_t i = 0; i < one.size(); ++i) {
        const bool both_nan = one[i] != one[i] && other[i] != other[i];
        if (!both_nan && std::memcmp(&one[i], &other[i], sizeof(float)) != 0) {
            return false;
        }
    }
    return true;
}

struct Coded {
    std::vector<char> wire;
    Values error, decoded, added;
};

Coded coded(const shm::Codecs &build, int codec, const Values &source, const Values *error, size_t block) {
    const size_t count = source.size(), bytes = shm::encoded_bytes(codec, count, block);
    Coded found{std::vector<char>(bytes + 8, 0x5a), error ? *error : Values(), Values(count, 7.0f),
                Values(count, 0.5f)};
    build.encode(codec, source.data(), error ? found.error.data() : nullptr, count, block, found.wire.data());
    for (size_t beyond = 0; beyond < 8; ++beyond) {
        CHECK(found.wire[bytes + beyond] == 0x5a, "codec " << codec << " wrote beside " << count << " elements");
    }
    build.decode(codec, found.wire.data(), found.decoded.data(), count, block, false);
    build.decode(codec, found.wire.data(), found.added.data(), count, block, true);
    return found;
}

}  // namespace

TEST(codecs_give_the_same_bits) {
    Random random{options.seed};
    const shm::Codecs &portable = shm::kernels_named("portable")->codecs;
    for (const char *name : {"portable", "avx2", "avx512", "neon"}) {
        const shm::Kernels *build = shm::kernels_named(name);
        if (build == nullptr) {
            continue;
        }
        for (int codec = 0; codec < shm::codecs; ++codec) {
            for (const size_t count : {0, 1, 2, 7, 15, 16, 17, 31, 100, 255, 256, 257, 4095, 4096, 4097, 10000}) {
                for (const size_t block : {16, 256, 4096}) {
                    const auto kind = static_cast<Kind>(random.below(kinds));
                    const Values source = values_of(kind, count, random), error = values_of(usual, count, random);
                    const bool feeds_back = random.below(2) != 0;
                    const Coded expected = coded(portable, codec, source, feeds_back ? &error : nullptr, block);
                    const Coded got = coded(build->codecs, codec, source, feeds_back ? &error : nullptr, block);
                    // The bits of a NaN in float16 are the processor's.
                    const bool is_any = kind == extreme && codec == shm::codec_fp16;
                    CHECK((is_any || got.wire == expected.wire) && same_bits(got.decoded, expected.decoded) &&
                              same_bits(got.added, expected.added) && same_bits(got.error, expected.error),
                          name << ", codec " << codec << ", " << count << " elements of kind " << kind << ", blocks of "
                               << block);
                    for (size_t i = 0; i < count; ++i) {
                        const float sum = 0.5f + got.decoded[i];
                        CHECK(got.added[i] == sum || sum != sum, name << ", codec " << codec << ": added " << i);
                    }
                }
            }
        }
    }
}

TEST(codecs_do_not_depend_on_the_float_mode_of_the_thread) {
    Random random{options.seed};
    constexpr size_t count = 1000, block = 128;
    for (int codec = 0; codec < shm::codecs; ++codec) {
        for (const Kind kind : {usual, wide, tiny}) {
            const shm::Codecs &build = shm::kernels().codecs;
            const Values source = values_of(kind, count, random), error = values_of(tiny, count, random);
            const Coded expected = coded(build, codec, source, &error, block);
            Values total = source, mode_total = source, lost = error, mode_lost = error;
            std::vector<char> wire(expected.wire.size()), mode_wire = wire;
            const void *const wires[] = {expected.wire.data()};
            build.decode_reduce_encode(codec, wires, 1, total.data(), 3.0f, lost.data(), count, block, wire.data());
            const OtherFloatMode mode;
            const Coded got = coded(build, codec, source, &error, block);
            build.decode_reduce_encode(codec, wires, 1, mode_total.data(), 3.0f, mode_lost.data(), count, block,
                                       mode_wire.data());
            CHECK(got.wire == expected.wire && same_bits(got.error, expected.error) &&
                      same_bits(got.decoded, expected.decoded) && same_bits(got.added, expected.added),
                  "codec " << codec << ", kind " << kind);
            CHECK(mode_wire == wire && same_bits(mode_total, total) && same_bits(mode_lost, lost),
                  "codec " << codec << ", kind " << kind << " in one pass");
            CHECK(mode.is_set(), "codec " << codec << " changed the mode of its caller");
        }
    }
}

TEST(codecs_keep_their_bounds) {
    Random random{options.seed};
    // Of the 126 elements in the last block, the mean of the largest numbers is rounded up.
    constexpr size_t count = 4990, block = 256;
    for (int codec = 0; codec < shm::codecs; ++codec) {
        for (const Kind kind : {usual, wide, tiny, zeros, huge, most}) {
            const Values source = values_of(kind, count, random);
            const Coded found = coded(shm::kernels().codecs, codec, source, nullptr, block);
            for (size_t at = 0; at < count; at += block) {
                double largest = 0;
                for (size_t i = at; i < std::min(count, at + block); ++i) {
                    largest = std::max(largest, std::fabs(static_cast<double>(source[i])));
                }
                for (size_t i = at; i < std::min(count, at + block); ++i) {
                    const double magnitude = std::fabs(static_cast<double>(source[i]));
                    const double lost = std::fabs(static_cast<double>(found.decoded[i]) - source[i]);
                    double bound = 0;
                    switch (codec) {
                    case shm::codec_fp16:
                        bound = magnitude > 65504 ? INFINITY : std::max(0x1p-11 * magnitude, 0x1p-25);
                        break;
                    case shm::codec_bf16:
                        bound = magnitude > 3.38e38 ? INFINITY : std::max(0x1p-8 * magnitude, 0x1p-134);
                        break;
                    case shm::codec_fp8_e4m3:
                        bound = std::max(0x1p-4 * magnitude, largest / 448 * 0x1p-10);
                        break;
                    case shm::codec_fp8_e5m2:
                        bound = std::max(0x1p-3 * magnitude, largest / 57344 * 0x1p-17);
                        break;
                    case shm::codec_int8:
                        bound = largest / 254;
                        break;
                    case shm::codec_int4:
                        bound = largest / 14;
                        break;
                    default:
                        bound = largest;
                    }
                    constexpr double least = 57344 * 1.2e-38;  // below which a block may become zeros
                    CHECK(
                        lost <= bound * (1 + 1e-4) || (shm::has_blocks(codec) && lost <= least),
                        "codec " << codec << ", kind " << kind << ": " << source[i] << " became " << found.decoded[i]);
                }
            }
        }
    }
}

TEST(codecs_reduce_in_one_pass_as_in_several) {
    Random random{options.seed};
    for (const char *name : {"portable", "avx2", "avx512", "neon"}) {
        const shm::Kernels *build = shm::kernels_named(name);
        if (build == nullptr) {
            continue;
        }
        const shm::Codecs &codecs = build->codecs;
        for (int codec = 0; codec < shm::codecs; ++codec) {
            for (const size_t count : {0, 1, 17, 128, 257, 4097, 10000}) {
                for (const size_t block : {16, 128, 4096}) {
                    const auto kind = static_cast<Kind>(random.below(kinds));
                    const size_t bytes = shm::encoded_bytes(codec, count, block);
                    const float divisor = random.below(2) ? 1.0f : 3.0f;
                    const bool feeds_back = random.below(2) != 0;
                    std::vector<std::vector<char>> wires(random.below(4), std::vector<char>(bytes));
                    std::vector<const void *> addresses;
                    for (std::vector<char> &wire : wires) {
                        codecs.encode(codec, values_of(kind, count, random).data(), nullptr, count, block, wire.data());
                        addresses.push_back(wire.data());
                    }
                    const Values own = values_of(kind, count, random), error = values_of(usual, count, random);
                    Values expected = own, expected_error = error, got = own, got_error = error;
                    std::vector<char> expected_wire(bytes), wire(bytes + 8, 0x5a);
                    for (const void *one : addresses) {
                        codecs.decode(codec, one, expected.data(), count, block, true);
                    }
                    for (float &value : expected) {
                        value /= divisor;
                    }
                    codecs.encode(codec, expected.data(), feeds_back ? expected_error.data() : nullptr, count, block,
                                  expected_wire.data());
                    codecs.decode(codec, expected_wire.data(), expected.data(), count, block, false);
                    codecs.decode_reduce_encode(codec, addresses.data(), addresses.size(), got.data(), divisor,
                                                feeds_back ? got_error.data() : nullptr, count, block, wire.data());
                    const bool is_any = kind == extreme && codec == shm::codec_fp16;
                    CHECK((is_any || std::equal(expected_wire.begin(), expected_wire.end(), wire.begin())) &&
                              same_bits(got, expected) && same_bits(got_error, expected_error),
                          name << ", codec " << codec << ", " << count << " elements of kind " << kind << ", "
                               << wires.size() << " inputs, blocks of " << block);
                    for (size_t beyond = 0; beyond < 8; ++beyond) {
                        CHECK(wire[bytes + beyond] == 0x5a, "codec " << codec << " wrote beside " << count);
                    }
                }
            }
        }
    }
}

TEST(codecs_feed_errors_back) {
    // What was lost is added later: the sum of what was decoded follows the sum of what was sent.
    Random random{options.seed};
    constexpr size_t count = 1000;
    for (int codec = 0; codec < shm::codecs; ++codec) {
        Values error(count, 0.0f), sent(count, 0.0f), arrived(count, 0.0f);
        for (int turn = 0; turn < 50; ++turn) {
            const Values source = values_of(usual, count, random);
            std::vector<char> wire(shm::encoded_bytes(codec, count, 64));
            shm::kernels().codecs.encode(codec, source.data(), error.data(), count, 64, wire.data());
            shm::kernels().codecs.decode(codec, wire.data(), arrived.data(), count, 64, true);
            for (size_t i = 0; i < count; ++i) {
                sent[i] += source[i];
            }
        }
        for (size_t i = 0; i < count; ++i) {
            CHECK(std::fabs(sent[i] - arrived[i] - error[i]) < 1e-3f,
                  "codec " << codec << ": of " << sent[i] << " arrived " << arrived[i] << ", kept " << error[i]);
        }
    }
}
