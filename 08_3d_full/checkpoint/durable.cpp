#include "08_3d_full/checkpoint/durable.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "01_single_gpu/core/files.h"

namespace train70b {

namespace {

[[noreturn]] void fail(const std::string& path, const char* what) {
    const int code = errno;
    const std::string text = path + ": cannot be " + what + " (" + std::strerror(code) + ")";
    if (code == ENOSPC || code == EDQUOT) throw DiskFull(text);
    throw std::runtime_error(text);
}

class Descriptor {
  public:
    Descriptor(const std::string& path, int flags, const char* what)
        : path_(path), fd_(::open(path.c_str(), flags, 0644)) {
        if (fd_ < 0) fail(path, what);
    }
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    Descriptor(const Descriptor&) = delete;

    void write(std::string_view bytes) {
        while (!bytes.empty()) {
            const ssize_t count = ::write(fd_, bytes.data(), bytes.size());
            if (count < 0 && errno == EINTR) continue;
            if (count <= 0) fail(path_, "written");
            bytes.remove_prefix(size_t(count));
        }
    }
    // The disk begins while this thread computes the next checksum; fsync then waits for the rest only.
    void start_writeback([[maybe_unused]] int64_t begin, [[maybe_unused]] int64_t count) {
#ifdef __linux__
        ::sync_file_range(fd_, begin, count, SYNC_FILE_RANGE_WRITE);
#endif
    }
    void sync(int allowed_error = 0) {
        if (::fsync(fd_) != 0 && errno != allowed_error) fail(path_, "written to the disk");
    }
    void close() {  // network file systems report here that the disk is full
        const int fd = fd_;
        fd_ = -1;
        if (::close(fd) != 0) fail(path_, "written");
    }

  private:
    const std::string& path_;
    int fd_;
};

}  // namespace

WrittenFile write_file(const std::string& path, const std::vector<std::string_view>& parts, Durable durable) {
    constexpr size_t kChunk = 4 << 20;
    const double begin = now_seconds();
    Descriptor file(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, "created");
    WrittenFile written;
    uLong crc = 0;
    for (const std::string_view part : parts)
        for (size_t at = 0; at < part.size(); at += kChunk) {
            const std::string_view chunk = part.substr(at, kChunk);
            crc = crc32_z(crc, reinterpret_cast<const Bytef*>(chunk.data()), chunk.size());
            file.write(chunk);
            if (durable == Durable::yes) file.start_writeback(written.bytes, int64_t(chunk.size()));
            written.bytes += int64_t(chunk.size());
        }
    if (durable == Durable::yes) file.sync();
    file.close();
    written.crc32 = uint32_t(crc);
    written.seconds = now_seconds() - begin;
    return written;
}

std::string read_whole_file(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) fail(path, "read");
    return {std::istreambuf_iterator<char>(stream), {}};
}

void sync_folder(const std::string& path) {
    Descriptor(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, "opened").sync(EINVAL);  // file systems that sync no folders
}

void make_folder(const std::string& path) {
    if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) fail(path, "created");
}

void rename_durably(const std::string& from, const std::string& to) {
    if (std::rename(from.c_str(), to.c_str()) != 0) fail(from, "renamed");
    sync_folder(std::filesystem::path(to).parent_path().string());
}

void remove_folder(const std::string& path) noexcept {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
}

BackgroundWriter::BackgroundWriter() : thread_([this] { run(); }) {}

BackgroundWriter::~BackgroundWriter() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void BackgroundWriter::start(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
}

bool BackgroundWriter::busy() {
    const std::lock_guard lock(mutex_);
    return !tasks_.empty();
}

void BackgroundWriter::wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty(); });
}

BackgroundWriter::Failure BackgroundWriter::take_failure() {
    const std::lock_guard lock(mutex_);
    return std::exchange(failure_, {});
}

void BackgroundWriter::run() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
        if (stop_) return;
        const std::function<void()>& task = tasks_.front();  // start() only appends: the reference stays valid
        lock.unlock();
        Failure failure;
        try {
            task();
        } catch (const DiskFull& error) { failure = {error.what(), true}; } catch (const std::exception& error) {
            failure = {error.what(), false};
        }
        lock.lock();
        if (failure_.what.empty()) failure_ = failure;
        tasks_.pop_front();
        changed_.notify_all();
    }
}

}  // namespace train70b
