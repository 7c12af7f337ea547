// Settings that oneCCL and libfabric read from the environment.

#pragma once

#include <string>
#include <utility>
#include <vector>

namespace oneccl {

// An empty value leaves the choice to oneCCL.
void add_setting(const char *name, const std::string &value);

// Sets them in the environment, which programs started from here would inherit, for as long as this lives. What the
// user has set stays.
class SettingsInEnvironment {
public:
    SettingsInEnvironment();
    ~SettingsInEnvironment();
    SettingsInEnvironment(const SettingsInEnvironment &) = delete;
    SettingsInEnvironment &operator=(const SettingsInEnvironment &) = delete;

private:
    std::vector<std::pair<std::string, std::string> *> ours_;
};

}  // namespace oneccl
