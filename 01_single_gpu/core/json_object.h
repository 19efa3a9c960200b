#pragma once
// An object of a JSON file, read key by key: a usage error names the file, the key, its value and what it must be.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "01_single_gpu/core/check.h"

namespace train70b {

// Null counts as absent, as in Hugging Face's files. The JSON must outlive this.
class JsonObject {
  public:
    JsonObject(std::string file, const nlohmann::json& object) : file_(std::move(file)), object_(object) {
        if (!object_.is_object()) usage_error("{}: is not a JSON object", file_);
    }

    const nlohmann::json& json() const { return object_; }
    bool has(const char* key) const {
        read_.insert(key);
        return object_.contains(key) && !object_[key].is_null();
    }
    bool is_null(const char* key) const { return object_.contains(key) && !has(key); }
    // The keys that nothing here asked for, without those that say nothing: null, false, 0, and what is empty.
    std::vector<std::string> unread() const {
        std::vector<std::string> keys;
        for (const auto& [key, value] : object_.items())
            if (!value.empty() && value != "" && value != false && value != 0 && !read_.contains(key))
                keys.push_back(key);
        return keys;
    }

    int64_t integer(const char* key, int64_t max = INT32_MAX, int64_t min = 1) const {
        const nlohmann::json& value = needed(key);
        if (!value.is_number_unsigned() || value.get<uint64_t>() < uint64_t(min) ||
            value.get<uint64_t>() > uint64_t(max))
            refuse(key, fmt::format("must be an integer from {} to {}", min, max));
        return value.get<int64_t>();
    }
    double real(const char* key, double min, double max) const {
        const double value = any_number(key);
        if (!(value >= min && value <= max)) refuse(key, fmt::format("must be a number from {} to {}", min, max));
        return value;
    }
    std::string text(const char* key, const std::vector<std::string>& allowed = {}) const {
        const nlohmann::json& value = needed(key);
        if (!value.is_string()) refuse(key, "must be a string");
        const std::string text = value.get<std::string>();
        if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), text) == allowed.end())
            refuse(key, "is unknown");
        return text;
    }
    double any_number(const char* key) const {
        if (!needed(key).is_number()) refuse(key, "must be a number");
        return object_[key].get<double>();
    }
    bool flag(const char* key, bool otherwise) const {
        if (has(key) && !object_[key].is_boolean()) refuse(key, "must be true or false");
        return has(key) ? object_[key].get<bool>() : otherwise;
    }
    const nlohmann::json& list(const char* key) const {
        if (!needed(key).is_array()) refuse(key, "must be a list");
        return object_[key];
    }
    std::vector<int64_t> integers(const char* key) const {
        std::vector<int64_t> values;
        for (const nlohmann::json& item : list(key)) {
            if (!item.is_number_unsigned() || item.get<uint64_t>() > INT32_MAX)
                refuse(key, "must be a list of integers");
            values.push_back(item.get<int64_t>());
        }
        return values;
    }
    // Usage error unless the key is absent or has this value.
    void only(const char* key, const nlohmann::json& value, const char* why) const {
        if (has(key) && object_[key] != value) refuse(key, why);
    }
    JsonObject inner(const char* key) const {
        if (!needed(key).is_object()) refuse(key, "must be an object");
        return JsonObject(file_ + ": " + key, object_[key]);
    }
    // After the last key: usage error for another one, but for the comment "_", and for null.
    void refuse_others() const {
        for (const auto& [key, value] : object_.items()) {
            if (key == "_" || (read_.contains(key) && !value.is_null())) continue;
            std::string known;
            for (const std::string& one : read_) known += (known.empty() ? "" : ", ") + one;
            refuse(key.c_str(), fmt::format("is not a key with a value ({})", known));
        }
    }
    [[noreturn]] void refuse(const char* key, const std::string& why) const {
        std::string value = object_.contains(key) ? object_[key].dump() : "";
        if (value.size() > 60) value = "...";
        usage_error("{}: {} {}{}{}", file_, key, value, value.empty() ? "" : ": ", why);
    }

  private:
    const nlohmann::json& needed(const char* key) const {
        if (!has(key)) usage_error("{}: {} is missing", file_, key);
        return object_[key];
    }

    std::string file_;
    const nlohmann::json& object_;
    mutable std::set<std::string> read_;  // keys
};

}  // namespace train70b
