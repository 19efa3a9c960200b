#include "01_single_gpu/io/json.h"

#include <filesystem>
#include <fstream>

#include "01_single_gpu/core/check.h"

namespace train70b {

using nlohmann::json;

json parse_json(std::string_view text, const std::string& where, const json::parser_callback_t& callback) {
    const auto on_event = [&](int depth, json::parse_event_t event, json& parsed) {
        const bool opens = event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
        if (opens && depth >= kMaxJsonDepth) usage_error("{}: nested deeper than {} levels", where, kMaxJsonDepth);
        return callback ? callback(depth, event, parsed) : true;
    };
    return json::parse(text.begin(), text.end(), on_event, /*allow_exceptions=*/false);
}

json read_json(const std::string& path, const std::string& where, const std::string& advice) {
    std::error_code error;
    const bool regular = std::filesystem::is_regular_file(path, error);
    if (!regular && std::filesystem::exists(path, error)) usage_error("{}: is not a regular file ({})", where, advice);
    std::ifstream stream(path, std::ios::binary);
    if (!regular || !stream) usage_error("{}: cannot be read ({})", where, advice);
    return parse_json(std::string(std::istreambuf_iterator<char>(stream), {}), where);
}

}  // namespace train70b
