#include "01_single_gpu/files.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "01_single_gpu/check.h"

namespace train70b {

OutputFile::OutputFile(const std::string& flag, const std::string& path)
    : flag_(flag), path_(path), temporary_(path + ".tmp") {
    stream_ = std::fopen(temporary_.c_str(), "wb");
    if (!stream_)
        usage_error("{} {}: cannot be written ({}); name a file in an existing, writable folder", flag, path,
                    std::strerror(errno));
}

OutputFile::~OutputFile() {
    if (!stream_) return;
    std::fclose(stream_);
    std::remove(temporary_.c_str());
}

void OutputFile::write(const void* bytes, size_t count) {
    if (std::fwrite(bytes, 1, count, stream_) != count)
        throw std::runtime_error(fmt::format("{} {}: write failed ({})", flag_, path_, std::strerror(errno)));
}

void OutputFile::commit() {
    const bool written = std::fflush(stream_) == 0 && !std::ferror(stream_);
    std::fclose(stream_);
    stream_ = nullptr;
    if (!written || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
        const std::string why = std::strerror(errno);
        std::remove(temporary_.c_str());
        throw std::runtime_error(fmt::format("{} {}: could not be completed ({})", flag_, path_, why));
    }
}

std::string repository_file(const std::string& path) {
    return std::filesystem::exists(path) ? path : std::string(TRAIN70B_SOURCE_DIR) + "/" + path;
}

double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace train70b
