#pragma once
// What only Linux and OpenBLAS have: linux/. Elsewhere, as on macOS, and with another BLAS: plain/, which can be tried
// on Linux (-DTRAIN70B_PLAIN=ON). Files of /proc and /sys need no stand-in: one that does not exist says nothing.
#include "01_single_gpu/core/cpu_threads.h"

namespace train70b::platform {

void keep_freed_memory();  // for what is allocated next. plain: the C library decides
// To be written; it leaves nothing behind if the program ends before give_name(). -1, as always in plain: there is none.
int open_unnamed(const std::string& folder, int mode);
bool give_name(int file, const std::string& path);

CoreSet allowed_cores();  // of the calling thread; empty, as always in plain: unknown
bool allow_cores(const CoreSet& cores);
// OpenBLAS's, with the memory that they need; usage error if there is no room. plain: as the environment said.
void use_blas_threads(int threads);
// Here are blas_core() too ("unknown" in plain), and the call of check_environment() before main() (none in plain).

}  // namespace train70b::platform
