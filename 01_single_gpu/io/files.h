#pragma once
// Output files are atomic: written under a temporary name and renamed when they are complete.
#include <cstdio>
#include <string>
#include <vector>

namespace train70b {

// A path that a flag reads or writes.
struct PathUse {
    std::string flag, path;
    bool output;
};
// Usage error, naming both flags, if an output file (by path, or by device and inode) is also an input or another
// output, or the temporary name of another output. Also checks output_target(). Opens no files.
void check_paths(const std::vector<PathUse>& uses);

// The file that is written for `path`, with symbolic links resolved. Usage error, naming the flag, for a folder, FIFO,
// socket or block device.
std::string output_target(const std::string& flag, const std::string& path);

class OutputFile {
  public:
    // Opens PATH.tmp (a character device such as /dev/null directly). Usage error, naming the flag, if it cannot be
    // written.
    OutputFile(const std::string& flag, const std::string& path);
    ~OutputFile();  // removes the temporary file if commit() was not called
    OutputFile(const OutputFile&) = delete;

    FILE* stream() const { return stream_; }
    void write(const void* bytes, size_t count);
    void write(const std::string& text) { write(text.data(), text.size()); }
    void commit();  // close, rename to PATH

  private:
    std::string flag_, path_, target_, temporary_;  // a device: temporary_ == target_
    FILE* stream_ = nullptr;
};

// The path of a repository file, given relative to its root: in the working directory, else in the source directory of
// the build.
std::string repository_file(const std::string& path);

double now_seconds();  // steady clock

}  // namespace train70b
