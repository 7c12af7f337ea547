// The key-value store through which oneCCL connects the ranks of a group; Python reads and writes it.

#pragma once

#include <oneapi/ccl.hpp>

#include <string>

namespace oneccl {

// Returns how many bytes the value has, 0 where there is none yet, -1 to give up.
using Get = int (*)(void *context, const char *key, char *value, int capacity);
using Set = int (*)(void *context, const char *key, const char *value, int size);

class GroupStore final : public ccl::kvs_interface {
public:
    GroupStore(Get get, Set set, void *context);

    ccl::vector_class<char> get(const ccl::string_class &key) override;
    void set(const ccl::string_class &key, const ccl::vector_class<char> &value) override;
    int get_id() override { return id_; }

    // The end of a communicator sets keys, when the store may be gone: from now on, they are ignored.
    void close() { closed_ = true; }

private:
    Get get_;
    Set set_;
    void *context_;
    int id_;
    std::string last_key_;
    std::string own_name_;  // the key of this process's name
    bool closed_ = false;
};

}  // namespace oneccl
