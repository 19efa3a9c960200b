#include <sched.h>

#include <algorithm>

#include "01_single_gpu/core/blas_core.h"
#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/environment.h"
#include "01_single_gpu/core/platform/platform.h"

extern "C" char* openblas_get_corename();
extern "C" void openblas_set_num_threads(int);
extern "C" int openblas_get_num_threads();
extern "C" void* blas_memory_alloc(int);
extern "C" void blas_memory_free(void*);

std::string train70b::blas_core() { return openblas_get_corename(); }

namespace train70b::platform {

// Called before the libraries' own initialization.
[[gnu::section(".preinit_array"), gnu::used]] static void (*const kCheck)(int, char**, char**) = check_environment;

CoreSet allowed_cores() {
    cpu_set_t set;
    CoreSet cores;
    const bool known = ::sched_getaffinity(0, sizeof set, &set) == 0;
    for (size_t core = 0; core < cores.size(); ++core) cores[core] = known && CPU_ISSET(core, &set);
    return cores;
}

bool allow_cores(const CoreSet& cores) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (size_t core = 0; core < cores.size(); ++core)
        if (cores[core]) CPU_SET(core, &set);
    return ::sched_setaffinity(0, sizeof set, &set) == 0;
}

void use_blas_threads(int threads) {
    // One buffer for each thread, and one for the caller; it has those of the threads that it started with.
    const int more = std::min(threads, kMostBlasThreads) + 1 - openblas_get_num_threads();
    if (const std::string problem = no_room_for_blas(more); !problem.empty()) throw UsageError(problem);
    openblas_set_num_threads(threads);
    blas_memory_free(blas_memory_alloc(0));  // the caller's
}

}  // namespace train70b::platform
