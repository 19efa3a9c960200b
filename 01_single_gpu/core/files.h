#pragma once
// Input files are read at any position. Output files appear when they are complete, or grow during the run.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
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

// An open regular file. Not memory-mapped: reading a mapped file that was truncated meanwhile ends in SIGBUS.
class InputFile {
  public:
    // Usage error "NAME: ..." for what cannot be read or is no regular file. name: the path, or a flag and the path.
    InputFile(const std::string& name, const std::string& path, const std::string& advice);
    ~InputFile();
    InputFile(InputFile&& other) noexcept;
    InputFile& operator=(InputFile&&) = delete;

    int64_t bytes() const { return bytes_; }
    // Bytes [begin, begin + count). Throws, naming the file, if it cannot be read or is shorter by now.
    void read(int64_t begin, void* to, int64_t count) const;

  private:
    std::string name_;
    int file_ = -1;
    int64_t bytes_ = 0;
};

class OutputFile {
  public:
    // Opens a file without a name in the folder of PATH, so that a process that is killed leaves nothing behind;
    // PATH.tmp where the file system has no such files; a character device such as /dev/null itself. Usage error,
    // naming the flag, if it cannot be written or PATH.tmp exists.
    OutputFile(const std::string& flag, const std::string& path);
    ~OutputFile();  // removes PATH.tmp if commit() was not called
    OutputFile(const OutputFile&) = delete;

    FILE* stream() const { return stream_; }
    void write(const void* bytes, size_t count);
    void write(const std::string& text) { write(text.data(), text.size()); }
    void show();    // now it is PATH, and may still grow
    void commit();  // close; now it is PATH

  private:
    std::string flag_, path_, target_;
    std::string temporary_;  // PATH.tmp; empty: a device
    bool unnamed_ = false;   // temporary_ does not exist yet
    FILE* stream_ = nullptr;
};

// An output that appears with its first text and grows: a run that fails leaves what was before. Where no more can be
// written (a full disk), a warning says so, and the run goes on.
class GrowingFile {
  public:
    // tail: stands behind the text at any time. Usage error as of OutputFile.
    GrowingFile(const std::string& flag, const std::string& path, std::string tail = "");
    void write(const std::string& text);
    bool begun() const { return bytes_ > 0; }

  private:
    std::optional<OutputFile> file_;  // empty after a failure
    const std::string tail_;
    int64_t bytes_ = 0;  // of the text
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

// The path of a repository file, given relative to its root: in the working directory, else where `cmake --install` put
// it beside this program, else in the source directory of the build.
std::string repository_file(const std::string& path);

double now_seconds();  // steady clock
// For tests: makes this process's clock wrong from now on, as that of another machine. drift: seconds per second.
void set_clock_error(double offset, double drift);

}  // namespace train70b
