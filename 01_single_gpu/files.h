#pragma once
// Output files appear whole or not at all: written under a temporary name, renamed at the end.
#include <cstdio>
#include <string>

namespace train70b {

class OutputFile {
  public:
    // Opens PATH.tmp; usage error naming the flag when that cannot be written.
    OutputFile(const std::string& flag, const std::string& path);
    ~OutputFile();  // without commit(): the temporary file is removed
    OutputFile(const OutputFile&) = delete;

    FILE* stream() const { return stream_; }
    void write(const void* bytes, size_t count);
    void write(const std::string& text) { write(text.data(), text.size()); }
    void commit();  // close, rename to PATH

  private:
    std::string flag_, path_, temporary_;
    FILE* stream_ = nullptr;
};

// A file of this repository, named from its root: as it lies here, or else where the program was built from.
std::string repository_file(const std::string& path);

double now_seconds();  // steady clock

}  // namespace train70b
