#include "01_single_gpu/core/check.h"

#include <algorithm>
#include <cstdio>

namespace train70b {

std::string fill_in(std::string_view text, std::initializer_list<std::string> values) {
    std::string filled;
    auto value = values.begin();
    for (size_t i = 0; i < text.size(); ++i) {
        if (text.substr(i, 2) == "{}" && value != values.end()) {
            filled += *value++;
            ++i;
        } else {
            filled += text[i];
        }
    }
    return filled;
}

size_t utf8_length(std::string_view text) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    const size_t length = byte(0) < 0x80 ? 1 : byte(0) < 0xc2 ? 0 : byte(0) < 0xe0 ? 2 : byte(0) < 0xf0 ? 3 : 4;
    if (length == 0 || byte(0) > 0xf4 || length > text.size()) return 0;
    uint32_t code = byte(0) & (0xff >> (length + (length > 1)));
    for (size_t i = 1; i < length; ++i) {
        if ((byte(i) & 0xc0) != 0x80) return 0;
        code = code << 6 | (byte(i) & 0x3f);
    }
    const bool too_long = (length == 3 && code < 0x800) || (length == 4 && (code < 0x10000 || code > 0x10ffff));
    const bool surrogate = code >= 0xd800 && code < 0xe000, control = code < 0x20 || (code >= 0x7f && code < 0xa0);
    return too_long || surrogate || control ? 0 : length;
}

std::string one_line(std::string_view message) {
    constexpr size_t kFirst = 1000, kLast = 500;
    std::string line;
    for (size_t i = 0; i < message.size();) {
        const size_t length = utf8_length(message.substr(i));
        if (length == 0) line += fmt::format("\\x{:02x}", static_cast<unsigned char>(message[i]));
        line += message.substr(i, length);
        i += std::max<size_t>(length, 1);
    }
    if (line.size() <= kFirst + kLast) return line;
    size_t first = kFirst, last = line.size() - kLast;  // not within a character
    while ((line[first] & 0xc0) == 0x80) --first;
    while ((line[last] & 0xc0) == 0x80) ++last;
    return line.substr(0, first) + " ... " + line.substr(last);
}

void print_error_line(const std::string& line) {
    std::fflush(stdout);
    std::fputs((line + "\n").c_str(), stderr);
    std::fflush(stderr);
}

void check_failed(const char* expression, const char* file, int line, const std::string& text) {
    print_error_line(fmt::format("rank {}: check failed: {}{}{} ({}:{})", this_rank, expression,
                                 text.empty() ? "" : ": ", one_line(text), file, line));
    end_all_ranks(1);
    std::abort();
}

}  // namespace train70b
