// A test is a function that throws; main runs all of them, or those named on the command line.

#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace tests {

struct Options {
    size_t operations = 20000;             // of the stress test
    size_t most_bytes = size_t{24} << 20;  // of all ranks' tensors in one operation of every_operation
    unsigned limit = 120;                  // seconds for one test
    uint64_t seed = 1;
    double patience = 20;  // seconds that nothing may take
};
extern Options options;

struct Failed : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// Prints at once: a rank that gives up may leave others hanging.
[[noreturn]] void give_up(const char *file, int line, const std::string &text);

struct Registered {
    Registered(const char *name, void (*body)());
};

}  // namespace tests

#define TEST(name)                                                 \
    static void name();                                            \
    static const tests::Registered registered_##name{#name, name}; \
    static void name()

// CHECK(condition, "what " << value)
#define CHECK(condition, values)                               \
    do {                                                       \
        if (!(condition)) {                                    \
            std::ostringstream report_;                        \
            report_ << "not " #condition ": " << values;       \
            tests::give_up(__FILE__, __LINE__, report_.str()); \
        }                                                      \
    } while (false)
