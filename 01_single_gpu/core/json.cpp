#include "01_single_gpu/core/json.h"

#include <set>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/files.h"

namespace train70b {

using nlohmann::json;

json parse_json(std::string_view text, const std::string& where) {
    std::vector<std::set<std::string>> keys;  // of the open objects and lists
    const auto on_event = [&](int depth, json::parse_event_t event, json& parsed) {
        using Event = json::parse_event_t;
        if (event == Event::object_start || event == Event::array_start) {
            if (depth >= kMaxJsonDepth) usage_error("{}: nested deeper than {} levels", where, kMaxJsonDepth);
            keys.emplace_back();
        } else if (event == Event::object_end || event == Event::array_end) {
            keys.pop_back();
        } else if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second) {
            usage_error("{}: lists {} twice", where, parsed.dump());
        }
        return true;
    };
    try {
        return json::parse(text.begin(), text.end(), on_event);
    } catch (const json::parse_error& error) {
        usage_error("{}: truncated or corrupt: byte {} is not valid JSON", where, error.byte);
    } catch (const json::out_of_range&) { usage_error("{}: has a number beyond 1e308", where); }
}

json read_json(const std::string& path, const std::string& where, const std::string& advice) {
    const InputFile file(where, path, advice);
    std::string text(size_t(file.bytes()), '\0');
    file.read(0, text.data(), file.bytes());
    return parse_json(text, where);
}

}  // namespace train70b
