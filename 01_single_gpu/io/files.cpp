#include "01_single_gpu/io/files.h"

#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>

#include "01_single_gpu/core/check.h"

namespace train70b {

namespace {

namespace fs = std::filesystem;

bool is_character_device(const std::string& path) {
    struct stat info {};
    return ::stat(path.c_str(), &info) == 0 && S_ISCHR(info.st_mode);
}

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
        path = fs::weakly_canonical(fs::absolute(name), error).string();
        if (error) path = name;
    }
    bool operator==(const FileId& other) const {
        return !device && inode == other.inode && (inode || path == other.path);
    }
};

}  // namespace

std::string output_target(const std::string& flag, const std::string& path) {
    struct stat info {};
    const bool exists = ::stat(path.c_str(), &info) == 0;
    if (path.empty()) usage_error("{}: empty path (must name a file)", flag);
    if (path.ends_with("/") || (exists && S_ISDIR(info.st_mode)))
        usage_error("{} {}: is a folder (must name a file)", flag, path);
    const auto refuse = [&](const char* what) {
        usage_error("{} {}: is a {} (must be a regular file, or a device such as /dev/null)", flag, path, what);
    };
    if (exists && S_ISFIFO(info.st_mode)) refuse("FIFO");
    if (exists && S_ISSOCK(info.st_mode)) refuse("socket");
    if (exists && S_ISBLK(info.st_mode)) refuse("block device");

    constexpr int kMaxLinks = 40;  // as in Linux
    fs::path target = path;
    std::error_code error;
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

OutputFile::OutputFile(const std::string& flag, const std::string& path)
    : flag_(flag), path_(path), target_(output_target(flag, path)), temporary_(target_) {
    if (!is_character_device(target_)) temporary_ += ".tmp";
    stream_ = std::fopen(temporary_.c_str(), "wb");
    if (!stream_)
        usage_error("{} {}: cannot be written: {} (must be in an existing, writable folder)", flag, path,
                    std::strerror(errno));
}

OutputFile::~OutputFile() {
    if (!stream_) return;
    std::fclose(stream_);
    if (temporary_ != target_) std::remove(temporary_.c_str());
}

void OutputFile::write(const void* bytes, size_t count) {
    if (std::fwrite(bytes, 1, count, stream_) != count)
        throw std::runtime_error(fmt::format("{} {}: write failed ({})", flag_, path_, std::strerror(errno)));
}

void OutputFile::commit() {
    const bool written = std::fflush(stream_) == 0 && !std::ferror(stream_), device = temporary_ == target_;
    std::fclose(stream_);
    stream_ = nullptr;
    if (!written || (!device && std::rename(temporary_.c_str(), target_.c_str()) != 0)) {
        const std::string why = std::strerror(errno);
        if (!device) std::remove(temporary_.c_str());
        throw std::runtime_error(fmt::format("{} {}: cannot be completed ({})", flag_, path_, why));
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
    return std::filesystem::exists(path) ? path : std::string(TRAIN70B_SOURCE_DIR) + "/" + path;
}

double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace train70b
