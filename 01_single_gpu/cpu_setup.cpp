#include "01_single_gpu/cpu_setup.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

extern "C" {
void openblas_set_num_threads(int);
char* openblas_get_corename();
}

namespace train70b {

void set_cpu_threads(int ranks_on_node) {
    const char* wish = std::getenv("OPENBLAS_NUM_THREADS");
    const int threads = std::max(1, wish ? std::atoi(wish) : omp_get_num_procs() / ranks_on_node);
    openblas_set_num_threads(threads);
    omp_set_num_threads(threads);
}

namespace {
bool blas_is_older_than_cpu() {
#ifdef __x86_64__
    const std::string core = openblas_get_corename();
    return (core == "Haswell" || core == "Zen") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}
}  // namespace

void restart_with_cpu_settings(char** argv) {
    constexpr const char* kOnce = "TRAIN70B_STARTED";
    if (std::getenv(kOnce)) return;
    setenv(kOnce, "1", 1);
    setenv("GOMP_SPINCOUNT", "1000", 0);
    if (blas_is_older_than_cpu()) setenv("OPENBLAS_CORETYPE", "SkylakeX", 0);
    execv("/proc/self/exe", argv);  // returns only where that is not possible: then with the libraries' defaults
}

}  // namespace train70b
