#pragma once
#include <cstdlib>
#include <optional>
#include <string>

namespace train70b {

// As std::from_chars, which libc++ has for double only from 20 on: the whole text; no blanks, leading + or 0x1p-3.
inline std::optional<double> parse_number(const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    const bool plain = text.find_first_not_of("+-.0123456789einfatyEINFATY") == text.npos && !text.starts_with('+');
    return plain && !text.empty() && *end == '\0' ? std::make_optional(value) : std::nullopt;
}

}  // namespace train70b
