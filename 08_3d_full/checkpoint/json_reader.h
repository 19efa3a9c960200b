#pragma once
// Reads a JSON object of which every entry is checked: usage error, naming the file and the key.
#include "01_single_gpu/core/json.h"

namespace train70b {

class JsonReader {
  public:
    JsonReader(std::string path, const nlohmann::json& object) : path_(std::move(path)), object_(object) {}

    std::string text(const char* key, const std::vector<std::string>& values = {}) const {
        const nlohmann::json& value = at(key);
        if (!value.is_string()) refuse(key, "must be a string");
        const std::string text = value.get<std::string>();
        if (!values.empty() && std::find(values.begin(), values.end(), text) == values.end())
            refuse(key, fmt::format("is {}, which is unknown", quoted(text)));
        return text;
    }
    int64_t number(const char* key, int64_t least, int64_t most = INT64_MAX) const {
        const nlohmann::json& value = at(key);
        if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(most)) ||
            value.get<int64_t>() < least)
            refuse(key, fmt::format("must be an integer from {} to {}", least, most));
        return value.get<int64_t>();
    }
    double real(const char* key) const {
        if (!at(key).is_number()) refuse(key, "must be a number");
        return at(key).get<double>();
    }
    const nlohmann::json& array(const char* key) const {
        if (!at(key).is_array()) refuse(key, "must be a list");
        return at(key);
    }
    const nlohmann::json& object(const char* key) const {
        if (!at(key).is_object()) refuse(key, "must be an object");
        return at(key);
    }
    [[noreturn]] void refuse(const char* key, const std::string& why) const {
        usage_error("{}: \"{}\" {}", path_, key, why);
    }

  private:
    const nlohmann::json& at(const char* key) const {
        const auto found = object_.find(key);
        if (found == object_.end()) refuse(key, "is missing");
        return *found;
    }
    std::string path_;
    const nlohmann::json& object_;
};

}  // namespace train70b
