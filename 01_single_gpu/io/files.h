#pragma once
// Output files are atomic: written under a temporary name and renamed when they are complete.
#include <cstdio>
#include <memory>
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

// The file of a flag that may be left out, such as --bench-csv; there is one on rank 0 only.
class OptionalOutput {
  public:
    explicit OptionalOutput(std::string flag) : flag(std::move(flag)) {}

    bool given() const { return !path.empty(); }
    void open();                          // before the work whose result it will hold: usage error as of OutputFile
    void write(const std::string& text);  // the whole file

    const std::string flag;
    std::string path;  // empty: the flag was not given

  private:
    std::unique_ptr<OutputFile> file_;
};

// The path of a repository file, given relative to its root: in the working directory, else in the source directory of
// the build.
std::string repository_file(const std::string& path);

double now_seconds();  // steady clock

}  // namespace train70b
