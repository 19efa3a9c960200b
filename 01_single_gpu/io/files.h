#pragma once
// Output files appear whole or not at all: written under a temporary name, renamed at the end.
#include <cstdio>
#include <string>
#include <vector>

namespace train70b {

// A path that a flag names, to be read or to be written.
struct PathUse {
    std::string flag, path;
    bool output;
};
// Usage error, naming both flags, where one file (the same path, or device and inode) is an output and anything else as
// well, or is the temporary name of another output; and for what takes no output, see output_target. Opens nothing.
void check_paths(const std::vector<PathUse>& uses);

// Where output to `path` goes: the end of its symbolic links. Usage error naming the flag for a folder, FIFO, socket or
// block device.
std::string output_target(const std::string& flag, const std::string& path);

class OutputFile {
  public:
    // Opens PATH.tmp, or a character device such as /dev/null itself; usage error naming the flag when that cannot be
    // written.
    OutputFile(const std::string& flag, const std::string& path);
    ~OutputFile();  // without commit(): the temporary file is removed
    OutputFile(const OutputFile&) = delete;

    FILE* stream() const { return stream_; }
    void write(const void* bytes, size_t count);
    void write(const std::string& text) { write(text.data(), text.size()); }
    void commit();  // close, rename to PATH

  private:
    std::string flag_, path_, target_, temporary_;  // target_: temporary_ where it is a device
    FILE* stream_ = nullptr;
};

// A file of this repository, named from its root: as it lies here, or else where the program was built from.
std::string repository_file(const std::string& path);

double now_seconds();  // steady clock

}  // namespace train70b
