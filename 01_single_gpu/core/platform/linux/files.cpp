#include <fcntl.h>
#include <linux/magic.h>
#include <malloc.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/platform/platform.h"

namespace train70b::platform {

void keep_freed_memory() {  // returning it to the kernel costs a page fault per 4 KiB at every step
    [[maybe_unused]] static const int keep = ::mallopt(M_MMAP_MAX, 0) + ::mallopt(M_TRIM_THRESHOLD, -1);
}

int open_unnamed(const std::string& folder, int mode) {
    return ::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, mode);
}

bool give_name(int file, const std::string& path) {
    const std::string open_file = fmt::format("/proc/self/fd/{}", file);
    return ::linkat(AT_FDCWD, open_file.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0;
}

bool reserve(int file, int64_t bytes) {
    while ((errno = ::posix_fallocate(file, 0, bytes)) == EINTR) {}
    return errno == 0;
}

bool is_in_memory(const std::string& folder) {
    struct statfs system {};
    return ::statfs(folder.c_str(), &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
}

}  // namespace train70b::platform
