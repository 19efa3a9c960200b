#include "01_single_gpu/cpu_setup.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

extern "C" void openblas_set_num_threads(int);

namespace train70b {

void set_cpu_threads(int ranks_on_node) {
    const char* wish = std::getenv("OPENBLAS_NUM_THREADS");
    const int threads = std::max(1, wish ? std::atoi(wish) : omp_get_num_procs() / ranks_on_node);
    openblas_set_num_threads(threads);
    omp_set_num_threads(threads);
}

void restart_with_cpu_settings(char** argv) {
    constexpr const char* kOnce = "TRAIN70B_STARTED";
    if (std::getenv(kOnce)) return;
    setenv(kOnce, "1", 1);
    setenv("GOMP_SPINCOUNT", "1000", 0);
    execv("/proc/self/exe", argv);  // returns only where that is not possible: then with libgomp's default
}

}  // namespace train70b
