#pragma once
// A libFuzzer target for one reader of files: tests/fuzz/NAME.cpp defines a Target, run.sh builds and runs it. To add a
// reader, add a file: its sources in a comment "// sources: ...", its seeds, its words, and how to read.
//
// A usage error is what bad input must end in. Everything else is a finding: a crash, an error of a sanitizer, a failed
// CHECK, another exception, 5 seconds, 1 GiB.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "01_single_gpu/core/check.h"

namespace train70b::fuzz {

// A folder in memory where the machine has one; empty before each input.
class Folder {
  public:
    Folder() : path_(root() + "/train70b_fuzz_" + std::to_string(::getpid())) {
        std::filesystem::create_directories(path_);
    }
    const std::string& path() const { return path_; }
    std::string write(const std::string& name, std::string_view content) const {
        const std::string path = path_ + "/" + name;
        std::ofstream(path, std::ios::binary).write(content.data(), std::streamsize(content.size()));
        return path;
    }
    void remove() const { std::filesystem::remove_all(path_); }

  private:
    static std::string root() { return std::filesystem::exists("/dev/shm") ? "/dev/shm" : "/tmp"; }
    std::string path_;
};

struct Target {
    std::function<void(const Folder& folder, std::string_view input)> read;
    std::vector<std::string> seeds;
    std::vector<std::string> words;  // the dictionary: what inputs of this format consist of
};
Target target();  // defined by NAME.cpp

inline std::string repeat(const std::string& text, size_t times) {
    std::string all;
    for (size_t i = 0; i < times; ++i) all += text;
    return all;
}

// The JSON of a value below `levels` lists or objects: 64 are allowed.
inline std::string nested(size_t levels) { return repeat("[", levels) + "1" + repeat("]", levels); }
inline std::string nested_objects(size_t levels) { return repeat("{\"a\":", levels) + "1" + repeat("}", levels); }

}  // namespace train70b::fuzz
