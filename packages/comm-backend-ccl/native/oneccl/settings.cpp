#include "oneccl/settings.hpp"

#include <cstdlib>

namespace oneccl {

namespace {

// All of them guarded by `library`.
std::vector<std::pair<std::string, std::string>> settings;
std::vector<std::pair<std::string, std::string> *> ours;  // those that are in the environment
int users = 0;

}  // namespace

void add_setting(const char *name, const std::string &value) {
    if (!value.empty()) {
        settings.emplace_back(name, value);
    }
}

SettingsInEnvironment::SettingsInEnvironment() {
    if (users++ > 0) {
        return;
    }
    for (auto &one : settings) {
        if (getenv(one.first.c_str()) == nullptr) {
            setenv(one.first.c_str(), one.second.c_str(), 1);
            ours.push_back(&one);
        }
    }
}

SettingsInEnvironment::~SettingsInEnvironment() {
    if (--users > 0) {
        return;
    }
    for (auto *one : ours) {
        // oneCCL adds to some, such as a second provider, and that once only.
        if (const char *now = getenv(one->first.c_str())) {
            one->second = now;
        }
        unsetenv(one->first.c_str());
    }
    ours.clear();
}

}  // namespace oneccl
