#pragma once
// JSON from untrusted files, and JSON that holds text from outside. The parser is iterative, but copying and printing
// its result are recursive, so deep nesting is rejected while parsing.
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace train70b {

constexpr int kMaxJsonDepth = 64;  // levels of nesting

// Usage error "WHERE: ..." if the text is not JSON, is nested too deeply, or lists a key twice in one object.
nlohmann::json parse_json(std::string_view text, const std::string& where);

// Parses a file. Usage error "WHERE: cannot be read (ADVICE)" if it cannot be read or is not a regular file (a FIFO
// would block).
nlohmann::json read_json(const std::string& path, const std::string& where, const std::string& advice);

// JSON that may hold a path or another flag's text: bytes that are not UTF-8, at which dump() throws, become U+FFFD.
template <class Json>
std::string json_text(const Json& json, int indent = -1) {
    return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace train70b
