#pragma once
// What only Linux and OpenBLAS have: linux/. Elsewhere, as on macOS, and with another BLAS: plain/, which can be tried
// on Linux (-DTRAIN70B_PLAIN=ON): its blas_core() is "unknown", and nothing calls check_environment() before main().
// Files of /proc and /sys need no stand-in: one that does not exist says nothing.
#include "01_single_gpu/core/cpu_threads.h"

namespace train70b::platform {

void keep_freed_memory();                               // instead of returning it to the kernel
int open_unnamed(const std::string& folder, int mode);  // a file that vanishes without give_name(); -1: there is none
bool give_name(int file, const std::string& path);
bool reserve(int file, int64_t bytes);         // disk space; else errno says why not. plain: writing may still fail
bool is_in_memory(const std::string& folder);  // as on Linux's tmpfs
CoreSet allowed_cores();                       // of the calling thread; none: unknown
bool allow_cores(const CoreSet& cores);
void use_blas_threads(int threads);  // with their memory; usage error if there is no room. plain: does nothing

}  // namespace train70b::platform
