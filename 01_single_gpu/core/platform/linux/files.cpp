#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

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

}  // namespace train70b::platform
