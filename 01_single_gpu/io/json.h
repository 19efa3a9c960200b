#pragma once
// JSON from outside. The parser itself keeps a stack of its own, but copying and printing what it has read recurse:
// nesting that no file of this course needs is refused before it is built.
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace train70b {

constexpr int kDeepestJson = 64;  // levels of nesting

// Usage error "WHERE: ..." beyond that depth. A discarded value for what is no JSON. `also` sees every event.
nlohmann::json parse_json(std::string_view text, const std::string& where,
                          const nlohmann::json::parser_callback_t& also = {});

// The same of a file. Usage error "WHERE: cannot be read; ADVICE" for what is none, or no regular one: a FIFO would
// keep its reader waiting.
nlohmann::json read_json(const std::string& path, const std::string& where, const std::string& advice);

}  // namespace train70b
