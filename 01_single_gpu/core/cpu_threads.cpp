#include "01_single_gpu/core/cpu_threads.h"

#include <omp.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "01_single_gpu/core/check.h"

extern "C" void openblas_set_num_threads(int);
extern "C" int openblas_get_num_threads();
extern "C" void* blas_memory_alloc(int);
extern "C" void blas_memory_free(void*);

namespace train70b {

int thread_count(std::string_view text) {
    int threads = 0;
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
    const bool whole = error == std::errc() && stop == text.data() + text.size();
    return whole && threads >= 1 && threads <= kMostThreads ? threads : 0;
}

std::string no_room_for_blas(int buffers) {
    constexpr size_t kBuffer = 128 << 20;  // bytes, on x86-64; elsewhere less
    struct rlimit limit {};
    if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || buffers < 1) return "";
    const size_t bytes = size_t(buffers) * kBuffer;
    void* const room = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room != MAP_FAILED) {
        ::munmap(room, bytes);
        return "";
    }
    return fmt::format("ulimit -v {}: leaves no room for OpenBLAS, which needs {} x 128 MiB (try ulimit -v {}{})",
                       limit.rlim_cur >> 10, buffers, (limit.rlim_cur + bytes + 2 * kBuffer) >> 10,
                       buffers > 1 ? ", or one thread: OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1" : "");
}

void set_cpu_threads(int ranks_on_node) {
    int threads = std::max(1, omp_get_num_procs() / ranks_on_node);
    if (const char* requested = std::getenv("OPENBLAS_NUM_THREADS"); requested && *requested) {
        threads = thread_count(requested);
        if (threads == 0)
            usage_error("OPENBLAS_NUM_THREADS={}: must be an integer from 1 to {}", requested, kMostThreads);
    }
    // One buffer for each thread, and one for the caller; it has those of the threads that it started with.
    const int more = std::min(threads, kMostBlasThreads) + 1 - openblas_get_num_threads();
    if (const std::string problem = no_room_for_blas(more); !problem.empty()) throw UsageError(problem);
    openblas_set_num_threads(threads);
    blas_memory_free(blas_memory_alloc(0));  // the caller's
    omp_set_num_threads(threads);
}

int cpu_threads() { return omp_get_max_threads(); }

}  // namespace train70b
