// Settings that oneCCL and libfabric read from the environment.

#pragma once

#include <string>
#include <utility>
#include <vector>

namespace oneccl {

// An empty value leaves the choice to oneCCL.
void add_setting(const char *name, const std::string &value);

// Sets them in the environment, which programs started from here would inherit, for as long as one of these lives:
// a thread that makes a group lets go of `library` while it waits for other ranks, and another may make one then. What
// the user has set stays. Made and destroyed by callers that hold `library`.
class SettingsInEnvironment {
public:
    SettingsInEnvironment();
    ~SettingsInEnvironment();
    SettingsInEnvironment(const SettingsInEnvironment &) = delete;
    SettingsInEnvironment &operator=(const SettingsInEnvironment &) = delete;
};

}  // namespace oneccl
