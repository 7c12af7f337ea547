#include "check.hpp"

#include <unistd.h>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace tests {

Options options;

namespace {

std::vector<std::pair<std::string, void (*)()>> &all() {
    static std::vector<std::pair<std::string, void (*)()>> found;
    return found;
}

volatile sig_atomic_t running = 0;

void too_long(int) {
    const std::string &name = all()[running].first;
    for (const char *text : {"TOO LONG ", name.c_str(), "\n"}) {
        if (write(2, text, std::strlen(text)) < 0) {
            break;
        }
    }
    _exit(3);
}

bool run(size_t index) {
    const auto &[name, body] = all()[index];
    running = static_cast<int>(index);
    alarm(options.limit);
    const auto begin = std::chrono::steady_clock::now();
    bool good = true;
    try {
        body();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
        good = false;
    }
    alarm(0);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    std::printf("%-6s %6.2f s  %s\n", good ? "ok" : "FAILED", taken.count(), name.c_str());
    std::fflush(stdout);
    return good;
}

int usage() {
    std::printf(
        "usage: native_tests [--operations=N] [--most-mib=N] [--limit=SECONDS] [--patience=SECONDS] [--seed=N] "
        "[TEST...]\n");
    for (const auto &one : all()) {
        std::printf("  %s\n", one.first.c_str());
    }
    return 2;
}

}  // namespace

Registered::Registered(const char *name, void (*body)()) { all().emplace_back(name, body); }

void give_up(const char *file, int line, const std::string &text) {
    const char *slash = std::strrchr(file, '/');
    const std::string where = std::string(slash == nullptr ? file : slash + 1) + ":" + std::to_string(line) + ": ";
    std::fprintf(stderr, "%s\n", (where + text).c_str());
    throw Failed(where + text);
}

int run_all(int count, char **arguments) {
    std::vector<std::string> names;
    for (int i = 1; i < count; ++i) {
        const std::string argument = arguments[i];
        const size_t equals = argument.find('=');
        const std::string key = argument.substr(0, equals);
        const double value = equals == std::string::npos ? 0 : std::atof(argument.c_str() + equals + 1);
        if (key == "--operations") {
            options.operations = static_cast<size_t>(value);
        } else if (key == "--most-mib") {
            options.most_bytes = static_cast<size_t>(value) << 20;
        } else if (key == "--limit") {
            options.limit = static_cast<unsigned>(value);
        } else if (key == "--patience") {
            options.patience = value;
        } else if (key == "--seed") {
            options.seed = static_cast<uint64_t>(value);
        } else if (key.starts_with("-")) {
            return usage();
        } else {
            names.push_back(argument);
        }
    }
    std::signal(SIGALRM, too_long);
    std::vector<size_t> chosen;
    for (size_t i = 0; i < all().size(); ++i) {
        if (names.empty()) {
            chosen.push_back(i);
        }
    }
    for (const std::string &name : names) {
        const size_t before = chosen.size();
        for (size_t i = 0; i < all().size(); ++i) {
            if (all()[i].first == name) {
                chosen.push_back(i);
            }
        }
        if (chosen.size() == before) {
            std::fprintf(stderr, "no test is called %s\n", name.c_str());
            return usage();
        }
    }
    size_t failed = 0;
    for (const size_t index : chosen) {
        failed += run(index) ? 0 : 1;
    }
    std::printf("%zu of %zu tests failed\n", failed, chosen.size());
    return failed == 0 ? 0 : 1;
}

}  // namespace tests

int main(int count, char **arguments) { return tests::run_all(count, arguments); }
