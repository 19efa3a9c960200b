// A library to be preloaded (LD_PRELOAD, Linux) that logs what a process does to the files under one folder, without
// changing it. lose.py reads the logs and computes what a power cut at any moment may have left.
//
//   CRASH_FOLDER   the folder; it exists
//   CRASH_LOG      a folder elsewhere for the logs: <pid>-<start>.jsonl, and .data, the bytes of the writes
//   CRASH_KILL_AT  N: SIGKILL instead of this process's N-th operation; CRASH_KILL_RANK: only in this rank of mpirun
//
// An operation is two lines: what is about to be done, and its result. Times are CLOCK_MONOTONIC, the same clock in all
// processes. Files and folders are named by their inode, so a renamed file is still the same one.
// Seen: open with O_CREAT or O_TRUNC, write, pwrite, writev, pwritev, ftruncate, truncate, fsync, fdatasync, rename,
// mkdir, unlink, rmdir and their *at and *64 forms. Not seen: what stdio writes inside the C library, mmap,
// copy_file_range, links; `lose.py check` finds files that they changed.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {

long long nanoseconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

std::string real(const char* path) {
    char resolved[PATH_MAX];
    return realpath(path, resolved) ? resolved : "";
}

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        char escaped[8];
        if (c == '"' || c == '\\' || static_cast<unsigned char>(c) < ' ') {
            std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned char>(c));
            out += escaped;
        } else {
            out += c;
        }
    }
    return out + "\"";
}

class Log {
  public:
    Log() {
        const char *folder = std::getenv("CRASH_FOLDER"), *logs = std::getenv("CRASH_LOG");
        if (!folder || !logs) return;
        folder_ = real(folder);
        logs_ = real(logs);
        struct stat info {};
        if (folder_.empty() || logs_.empty() || stat(folder, &info) != 0) {
            std::fprintf(stderr, "CRASH_FOLDER %s or CRASH_LOG %s: no such folder\n", folder, logs);
            std::_Exit(2);
        }
        device_ = info.st_dev;
        const char *at = std::getenv("CRASH_KILL_AT"), *rank = std::getenv("CRASH_KILL_RANK");
        const char* mine = std::getenv("OMPI_COMM_WORLD_RANK");
        if (at && (!rank || (mine && std::string(rank) == mine))) kill_at_ = std::atoll(at);
    }

    bool on() const { return !folder_.empty(); }
    bool holds(const std::string& path) const { return path == folder_ || path.starts_with(folder_ + "/"); }

    // An open file or folder under the folder: its inode, or 0.
    long long inode(int fd) const {
        struct stat info {};
        if (!on() || fstat(fd, &info) != 0 || info.st_dev != device_) return 0;
        if (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) return 0;
        char path[PATH_MAX];
        const ssize_t length =
            readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof path);  // also after a rename
        return length > 0 && holds(std::string(path, size_t(length))) ? static_cast<long long>(info.st_ino) : 0;
    }

    // A name under the folder, as the JSON of its folder's inode and the name in it; empty: elsewhere.
    std::string name(int at, const char* path, const char* key) const {
        if (!on() || !path) return {};
        std::string text = path;
        while (text.size() > 1 && text.back() == '/') text.pop_back();
        if (text[0] != '/' && at != AT_FDCWD) text = "/proc/self/fd/" + std::to_string(at) + "/" + text;
        const size_t slash = text.rfind('/');
        const std::string parent = real(slash == std::string::npos ? "." : text.substr(0, slash + 1).c_str());
        struct stat info {};
        if (!holds(parent) || stat(parent.c_str(), &info) != 0) return {};
        const std::string base = slash == std::string::npos ? text : text.substr(slash + 1);
        return std::string(",\"") + key + "\":[" + std::to_string(info.st_ino) + "," + quoted(base) + "," +
               quoted(parent.substr(folder_.size())) + "]";
    }

    // Before the operation: returns its number. data: the bytes that a write is about to write.
    long long begin(const char* operation, const std::string& fields, const iovec* data = nullptr, int count = 0) {
        open_files();
        const long long number = ++operations_;
        long long bytes = 0;
        for (int i = 0; i < count; ++i) bytes += static_cast<long long>(data[i].iov_len);
        std::string line = "{\"begin\":" + std::to_string(number) + ",\"t\":" + std::to_string(nanoseconds()) +
                           ",\"op\":\"" + operation + "\"" + fields;
        if (data) {
            long long at = data_end_.fetch_add(bytes);
            line += ",\"data\":" + std::to_string(at) + ",\"bytes\":" + std::to_string(bytes);
            for (int i = 0; i < count; ++i) {
                put(data_, static_cast<const char*>(data[i].iov_base), data[i].iov_len, at);
                at += static_cast<long long>(data[i].iov_len);
            }
        }
        line += "}\n";
        put(lines_, line.data(), line.size(), -1);
        if (number == kill_at_) syscall(SYS_kill, getpid(), SIGKILL);
        return number;
    }

    void end(long long number, long long result, const std::string& fields = "") {
        const std::string line = "{\"end\":" + std::to_string(number) + ",\"t\":" + std::to_string(nanoseconds()) +
                                 ",\"result\":" + std::to_string(result) + fields + "}\n";
        put(lines_, line.data(), line.size(), -1);
    }

  private:
    void open_files() {
        if (process_ == getpid()) return;
        const std::lock_guard lock(mutex_);
        if (process_ == getpid()) return;
        // Of this process alone: a child that was forked has files of its own.
        const std::string path = logs_ + "/" + std::to_string(getpid()) + "-" + std::to_string(nanoseconds());
        lines_ = file(path + ".jsonl", O_APPEND);
        data_ = file(path + ".data", 0);
        operations_ = 0;
        data_end_ = 0;
        process_ = getpid();
    }
    static int file(const std::string& path, int flags) {
        const int fd = int(syscall(SYS_openat, AT_FDCWD, path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC | flags, 0644));
        if (fd < 0) std::abort();
        return fd;
    }
    static void put(int fd, const char* data, size_t bytes, long long at) {
        while (bytes > 0) {
            const long written =
                at < 0 ? syscall(SYS_write, fd, data, bytes) : syscall(SYS_pwrite64, fd, data, bytes, at);
            if (written <= 0) std::abort();  // a log with holes proves nothing
            data += written;
            bytes -= size_t(written);
            if (at >= 0) at += written;
        }
    }

    std::string folder_, logs_;
    dev_t device_ = 0;
    long long kill_at_ = 0;
    std::mutex mutex_;
    std::atomic<int> process_{0};
    int lines_ = -1, data_ = -1;
    std::atomic<long long> operations_{0}, data_end_{0};
};

Log& the_log() {
    static Log* log = new Log();  // never destroyed: threads may still write
    return *log;
}

template <typename F>
F next(const char* name) {
    return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

// Logs an operation around `call`, keeping errno. after(result): more fields of the second line.
template <typename Call, typename After>
auto logged(const char* operation, const std::string& fields, Call call, After after, const iovec* data = nullptr,
            int count = 0) {
    const int before = errno;
    const long long number = the_log().begin(operation, fields, data, count);
    errno = before;
    const auto result = call();
    const int error = errno;
    the_log().end(number, static_cast<long long>(result), after(result));
    errno = error;
    return result;
}
template <typename Call>
auto logged(const char* operation, const std::string& fields, Call call) {
    return logged(operation, fields, call, [](auto) { return std::string(); });
}

std::string field(const char* key, long long value) { return std::string(",\"") + key + "\":" + std::to_string(value); }

std::string inode_of_path(int at, const char* path) {
    struct stat info {};
    return fstatat(at, path, &info, AT_SYMLINK_NOFOLLOW) == 0 ? field("inode", static_cast<long long>(info.st_ino))
                                                              : "";
}

template <typename Call>
int open_logged(int at, const char* path, int flags, Call call) {
    if ((flags & (O_CREAT | O_TRUNC)) == 0) return call();
    const std::string name = the_log().name(at, path, "name");
    if (name.empty()) return call();
    return logged("open", name + field("truncate", flags & O_TRUNC ? 1 : 0), call, [](int fd) {
        struct stat info {};
        return fd >= 0 && fstat(fd, &info) == 0 ? field("inode", static_cast<long long>(info.st_ino)) : std::string();
    });
}

template <typename Call>
ssize_t write_logged(int fd, const iovec* data, int count, long long at, Call call) {
    const int before = errno;
    const long long inode = the_log().inode(fd);
    if (inode && at < 0) {
        struct stat info {};
        const bool append = (fcntl(fd, F_GETFL) & O_APPEND) != 0;
        at = append && fstat(fd, &info) == 0 ? static_cast<long long>(info.st_size) : lseek(fd, 0, SEEK_CUR);
    }
    errno = before;
    if (!inode) return call();
    return logged(
        "write", field("inode", inode) + field("at", at), call, [](ssize_t) { return std::string(); }, data, count);
}

template <typename Call>
int fd_logged(const char* operation, int fd, const std::string& fields, Call call) {
    const int before = errno;
    const long long inode = the_log().inode(fd);
    errno = before;
    return inode ? logged(operation, field("inode", inode) + fields, call) : call();
}

template <typename Call>
int name_logged(const char* operation, int at, const char* path, Call call) {
    const int before = errno;
    const std::string name = the_log().name(at, path, "name");
    errno = before;
    if (name.empty()) return call();
    const bool makes = std::strcmp(operation, "mkdir") == 0;
    return logged(operation, name, call,
                  [&](int result) { return makes && result == 0 ? inode_of_path(at, path) : std::string(); });
}

// A rename into the folder or out of it is half of one: the other name is missing.
template <typename Call>
int rename_logged(int from_at, const char* from, int to_at, const char* to, Call call) {
    const int before = errno;
    const std::string names = the_log().name(from_at, from, "name") + the_log().name(to_at, to, "to");
    errno = before;
    return names.empty() ? call() : logged("rename", names, call);
}

mode_t mode_of(int flags, va_list arguments) { return flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0; }

}  // namespace

extern "C" {

#define OPEN(function)                                                                      \
    int function(const char* path, int flags, ...) {                                        \
        va_list arguments;                                                                  \
        va_start(arguments, flags);                                                         \
        const mode_t mode = mode_of(flags, arguments);                                      \
        va_end(arguments);                                                                  \
        static const auto call = next<int (*)(const char*, int, ...)>(#function);           \
        return open_logged(AT_FDCWD, path, flags, [&] { return call(path, flags, mode); }); \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(function)                                                                  \
    int function(int at, const char* path, int flags, ...) {                              \
        va_list arguments;                                                                \
        va_start(arguments, flags);                                                       \
        const mode_t mode = mode_of(flags, arguments);                                    \
        va_end(arguments);                                                                \
        static const auto call = next<int (*)(int, const char*, int, ...)>(#function);    \
        return open_logged(at, path, flags, [&] { return call(at, path, flags, mode); }); \
    }
OPENAT(openat)
OPENAT(openat64)
int creat(const char* path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char* path, mode_t mode) { return open64(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

ssize_t write(int fd, const void* data, size_t bytes) {
    static const auto call = next<ssize_t (*)(int, const void*, size_t)>("write");
    const iovec part{const_cast<void*>(data), bytes};
    return write_logged(fd, &part, 1, -1, [&] { return call(fd, data, bytes); });
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
    static const auto call = next<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
    const iovec part{const_cast<void*>(data), bytes};
    return write_logged(fd, &part, 1, at, [&] { return call(fd, data, bytes, at); });
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t at) { return pwrite(fd, data, bytes, at); }
ssize_t writev(int fd, const iovec* data, int count) {
    static const auto call = next<ssize_t (*)(int, const iovec*, int)>("writev");
    return write_logged(fd, data, count, -1, [&] { return call(fd, data, count); });
}
ssize_t pwritev(int fd, const iovec* data, int count, off_t at) {
    static const auto call = next<ssize_t (*)(int, const iovec*, int, off_t)>("pwritev");
    return write_logged(fd, data, count, at, [&] { return call(fd, data, count, at); });
}

int fsync(int fd) {
    static const auto call = next<int (*)(int)>("fsync");
    return fd_logged("fsync", fd, "", [&] { return call(fd); });
}
int fdatasync(int fd) {
    static const auto call = next<int (*)(int)>("fdatasync");
    return fd_logged("fsync", fd, "", [&] { return call(fd); });
}
int ftruncate(int fd, off_t size) {
    static const auto call = next<int (*)(int, off_t)>("ftruncate");
    return fd_logged("truncate", fd, field("size", size), [&] { return call(fd, size); });
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int truncate(const char* path, off_t size) {
    const int fd = open(path, O_WRONLY);
    if (fd < 0) return -1;
    const int result = ftruncate(fd, size), error = errno;
    close(fd);
    errno = error;
    return result;
}
int truncate64(const char* path, off64_t size) { return truncate(path, size); }

int rename(const char* from, const char* to) {
    static const auto call = next<int (*)(const char*, const char*)>("rename");
    return rename_logged(AT_FDCWD, from, AT_FDCWD, to, [&] { return call(from, to); });
}
int renameat(int from_at, const char* from, int to_at, const char* to) {
    static const auto call = next<int (*)(int, const char*, int, const char*)>("renameat");
    return rename_logged(from_at, from, to_at, to, [&] { return call(from_at, from, to_at, to); });
}
int renameat2(int from_at, const char* from, int to_at, const char* to, unsigned flags) {
    static const auto call = next<int (*)(int, const char*, int, const char*, unsigned)>("renameat2");
    return rename_logged(from_at, from, to_at, to, [&] { return call(from_at, from, to_at, to, flags); });
}
int mkdir(const char* path, mode_t mode) {
    static const auto call = next<int (*)(const char*, mode_t)>("mkdir");
    return name_logged("mkdir", AT_FDCWD, path, [&] { return call(path, mode); });
}
int mkdirat(int at, const char* path, mode_t mode) {
    static const auto call = next<int (*)(int, const char*, mode_t)>("mkdirat");
    return name_logged("mkdir", at, path, [&] { return call(at, path, mode); });
}
int unlink(const char* path) {
    static const auto call = next<int (*)(const char*)>("unlink");
    return name_logged("unlink", AT_FDCWD, path, [&] { return call(path); });
}
int unlinkat(int at, const char* path, int flags) {
    static const auto call = next<int (*)(int, const char*, int)>("unlinkat");
    return name_logged("unlink", at, path, [&] { return call(at, path, flags); });
}
int rmdir(const char* path) {
    static const auto call = next<int (*)(const char*)>("rmdir");
    return name_logged("unlink", AT_FDCWD, path, [&] { return call(path); });
}
int remove(const char* path) {
    static const auto call = next<int (*)(const char*)>("remove");
    return name_logged("unlink", AT_FDCWD, path, [&] { return call(path); });
}

}  // extern "C"
