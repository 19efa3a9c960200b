#include "01_single_gpu/core/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <utility>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/platform/platform.h"
#include "01_single_gpu/core/say.h"

namespace train70b {

namespace {

namespace fs = std::filesystem;

// Identifies a file: by device and inode if it exists, otherwise by its path.
struct FileId {
    std::optional<std::pair<dev_t, ino_t>> inode;
    std::string path;
    bool device = false;  // a character device: several outputs may write to it

    explicit FileId(const std::string& name) {
        struct stat info {};
        if (::stat(name.c_str(), &info) == 0) {
            inode = {info.st_dev, info.st_ino};
            device = S_ISCHR(info.st_mode);
            return;
        }
        std::error_code error;
        path = fs::absolute(name, error).string();
        if (!error) path = fs::weakly_canonical(path, error).string();
        if (error) path = name;
    }
    bool operator==(const FileId& other) const {
        return !device && inode == other.inode && (inode || path == other.path);
    }
};

}  // namespace

std::string output_target(const std::string& flag, const std::string& path) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (path.empty()) usage_error("{}: empty path (must name a file)", flag);
    if (path.ends_with("/") || fs::is_directory(status))
        usage_error("{} {}: is a folder (must name a file)", flag, path);
    const auto refuse = [&](const char* what) {
        usage_error("{} {}: is a {} (must be a regular file, or a device such as /dev/null)", flag, path, what);
    };
    if (fs::is_fifo(status)) refuse("FIFO");
    if (fs::is_socket(status)) refuse("socket");
    if (fs::is_block_file(status)) refuse("block device");

    constexpr int kMaxLinks = 40;  // as in Linux
    fs::path target = path;
    for (int links = 0; fs::is_symlink(fs::symlink_status(target, error)); ++links) {
        if (links == kMaxLinks) usage_error("{} {}: circular symbolic links (must name a file)", flag, path);
        const fs::path next = fs::read_symlink(target, error);
        target = next.is_absolute() ? next : target.parent_path() / next;
    }
    return target.string();
}

void check_paths(const std::vector<PathUse>& uses) {
    struct Output {
        const PathUse* use;
        FileId file, temporary;
    };
    std::vector<Output> outputs;
    for (const PathUse& use : uses)
        if (use.output) {
            const std::string target = output_target(use.flag, use.path);
            outputs.push_back({&use, FileId(target), FileId(target + ".tmp")});
        }
    for (const PathUse& use : uses) {
        if (use.output || outputs.empty()) continue;
        const FileId input(use.path);
        for (const Output& output : outputs)
            if (output.file == input || output.temporary == input)
                usage_error("{} {}: would overwrite {}, which {} reads (use another file)", output.use->flag,
                            output.use->path, use.path, use.flag);
    }
    for (const Output& a : outputs)
        for (const Output& b : outputs) {
            if (a.use == b.use) continue;
            if (a.file == b.file)
                usage_error("{} {}: {} writes the same file, {} (use two files)", b.use->flag, b.use->path, a.use->flag,
                            a.use->path);
            if (a.temporary == b.file)
                usage_error("{} {}: is the temporary file of {} {} (use another file)", b.use->flag, b.use->path,
                            a.use->flag, a.use->path);
        }
}

// ---- reading ------------------------------------------------------------------------------------------------------

InputFile::InputFile(const std::string& name, const std::string& path, const std::string& advice) : name_(name) {
    const auto refuse = [&](const std::string& why) { usage_error("{}: {} ({})", name, why, advice); };
    // O_NONBLOCK: opening a FIFO must not wait for its other end.
    file_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    struct stat info {};
    const bool known = file_ >= 0 && ::fstat(file_, &info) == 0, regular = known && S_ISREG(info.st_mode);
    const std::string why = std::strerror(errno);
    if (file_ >= 0 && !regular) ::close(file_);
    if (!known) refuse("cannot be read: " + why);
    if (!regular) refuse("is not a regular file");
    bytes_ = info.st_size;
}

InputFile::InputFile(InputFile&& other) noexcept
    : name_(std::move(other.name_)), file_(std::exchange(other.file_, -1)), bytes_(other.bytes_) {}

InputFile::~InputFile() {
    if (file_ >= 0) ::close(file_);
}

void InputFile::read(int64_t begin, void* to, int64_t count) const {
    char* at = static_cast<char*>(to);
    while (count > 0) {
        const ssize_t got = ::pread(file_, at, size_t(count), begin);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0)
            throw std::runtime_error(fmt::format("{}: {}", name_,
                                                 got < 0 ? fmt::format("cannot be read ({})", std::strerror(errno))
                                                         : "has become shorter while it was in use"));
        at += got, begin += got, count -= got;
    }
}

// ---- writing ------------------------------------------------------------------------------------------------------

OutputFile::OutputFile(const std::string& flag, const std::string& path)
    : flag_(flag), path_(path), target_(output_target(flag, path)) {
    constexpr mode_t kMode = 0666;
    int file = -1;
    struct stat info {};
    if (std::error_code error; fs::is_character_file(target_, error)) {
        file = ::open(target_.c_str(), O_WRONLY | O_CLOEXEC);
    } else {
        temporary_ = target_ + ".tmp";
        const bool taken = ::lstat(temporary_.c_str(), &info) == 0;  // otherwise errno also tells of a name too long
        if (taken) usage_error("{} {}: {} exists and would be overwritten (remove it)", flag, path, temporary_);
        if (errno == ENOENT) {
            const std::string folder = fs::path(target_).parent_path().string();
            file = platform::open_unnamed(folder.empty() ? "." : folder, kMode);
            unnamed_ = file >= 0;
            if (!unnamed_) file = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
        }
    }
    stream_ = file >= 0 ? ::fdopen(file, "wb") : nullptr;
    if (!stream_)
        usage_error("{} {}: cannot be written: {} (must be in an existing, writable folder)", flag, path,
                    std::strerror(errno));
}

OutputFile::~OutputFile() {
    if (!stream_) return;
    std::fclose(stream_);
    if (!temporary_.empty() && !unnamed_) std::remove(temporary_.c_str());
}

void OutputFile::write(const void* bytes, size_t count) {
    if (std::fwrite(bytes, 1, count, stream_) != count)
        throw std::runtime_error(fmt::format("{} {}: write failed ({})", flag_, path_, std::strerror(errno)));
}

void OutputFile::show() {
    bool written = std::fflush(stream_) == 0 && !std::ferror(stream_);
    if (written && unnamed_) {
        written = platform::give_name(::fileno(stream_), temporary_);
        unnamed_ = !written;
    }
    const bool named = !temporary_.empty() && !unnamed_;
    if (!written || (named && std::rename(temporary_.c_str(), target_.c_str()) != 0))
        throw std::runtime_error(fmt::format("{} {}: cannot be completed ({})", flag_, path_, std::strerror(errno)));
    temporary_.clear();
}

void OutputFile::commit() {
    show();
    std::fclose(std::exchange(stream_, nullptr));
}

GrowingFile::GrowingFile(const std::string& flag, const std::string& path, std::string tail)
    : file_(std::in_place, flag, path), tail_(std::move(tail)) {
    std::setvbuf(file_->stream(), nullptr, _IONBF, 0);  // what fails to be written is not kept for a second attempt
}

void GrowingFile::write(const std::string& text) {
    if (!file_ || text.empty()) return;
    try {
        std::fseek(file_->stream(), bytes_, SEEK_SET);  // onto the tail
        file_->write(text + tail_);
        file_->show();
        bytes_ += int64_t(text.size());
    } catch (const std::runtime_error& error) {
        warn(fmt::format("{}; what follows is missing, and the run goes on", error.what()));
        const int file = ::fileno(file_->stream());
        if (::ftruncate(file, bytes_) == 0 && ::pwrite(file, tail_.data(), bytes_ ? tail_.size() : 0, bytes_) < 0) {}
        file_.reset();
    }
}

void OptionalOutput::open() {
    if (given() && this_rank == 0) file_ = std::make_unique<OutputFile>(flag, path);
}

void OptionalOutput::write(const std::string& text) {
    if (!file_) return;
    file_->write(text);
    file_->commit();
}

std::string repository_file(const std::string& path) {
    std::error_code error;
    const fs::path installed = fs::read_symlink("/proc/self/exe", error).parent_path() / "../share/train70b" / path;
    return fs::exists(path, error)        ? path
           : fs::exists(installed, error) ? installed.lexically_normal().string()
                                          : std::string(TRAIN70B_SOURCE_DIR) + "/" + path;
}

static double steady_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
// The watchdog's thread reads the clock too.
static std::atomic<double> clock_offset = 0, clock_drift = 0, clock_since = 0;

double now_seconds() {
    const double now = steady_seconds();
    return now + clock_offset + clock_drift * (now - clock_since);
}

void set_clock_error(double offset, double drift) {
    clock_since = steady_seconds();
    clock_offset = offset;
    clock_drift = drift;
}

}  // namespace train70b
