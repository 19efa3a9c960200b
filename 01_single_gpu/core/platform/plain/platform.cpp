#include "01_single_gpu/core/platform/platform.h"

#include <unistd.h>

#include "01_single_gpu/core/blas_core.h"

std::string train70b::blas_core() { return "unknown"; }

namespace train70b::platform {
void keep_freed_memory() {}
int open_unnamed(const std::string&, int) { return -1; }
bool give_name(int, const std::string&) { return false; }
bool reserve(int file, int64_t bytes) { return ::ftruncate(file, bytes) == 0; }
bool is_in_memory(const std::string&) { return false; }
CoreSet allowed_cores() { return {}; }
bool allow_cores(const CoreSet&) { return false; }
void use_blas_threads(int) {}
}  // namespace train70b::platform
