#pragma once
// Files for tests: a folder that goes away with everything in it, and files as text.
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

namespace train70b::test {

struct Folder {
    std::filesystem::path path;
    Folder() {
        std::string name = (std::filesystem::temp_directory_path() / "train70b_test_XXXXXX").string();
        if (!::mkdtemp(name.data())) throw std::system_error(errno, std::generic_category(), name);
        path = name;
    }
    ~Folder() { std::filesystem::remove_all(path); }
    Folder(const Folder&) = delete;
    std::string operator/(const std::string& name) const { return (path / name).string(); }
    std::string text() const { return path.string(); }
    size_t files() const {
        return std::distance(std::filesystem::directory_iterator(path), std::filesystem::directory_iterator());
    }
};

// A number of 16 bits: a sign, 5 bits of exponent, 10 of fraction.
inline double fp16_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                        : exponent > 0 ? std::ldexp(1024 + fraction, exponent - 25)
                                       : std::ldexp(fraction, -24);
    return bits >> 15 ? -size : size;
}

// JSON that no file of this course resembles: lists in lists.
inline std::string nested_lists(size_t levels) { return std::string(levels, '[') + std::string(levels, ']'); }

inline std::string read_text(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
}
inline void write_text(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
}

}  // namespace train70b::test
