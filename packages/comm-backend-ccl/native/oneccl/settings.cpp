#include "oneccl/settings.hpp"

#include <cstdlib>

namespace oneccl {

namespace {

std::vector<std::pair<std::string, std::string>> settings;  // guarded by `library`

}  // namespace

void add_setting(const char *name, const std::string &value) {
    if (!value.empty()) {
        settings.emplace_back(name, value);
    }
}

SettingsInEnvironment::SettingsInEnvironment() {
    for (auto &one : settings) {
        if (getenv(one.first.c_str()) == nullptr) {
            setenv(one.first.c_str(), one.second.c_str(), 1);
            ours_.push_back(&one);
        }
    }
}

SettingsInEnvironment::~SettingsInEnvironment() {
    for (auto *one : ours_) {
        // oneCCL adds to some, such as a second provider, and that once only.
        if (const char *now = getenv(one->first.c_str())) {
            one->second = now;
        }
        unsetenv(one->first.c_str());
    }
}

}  // namespace oneccl
