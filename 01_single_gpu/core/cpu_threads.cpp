#include "01_single_gpu/core/cpu_threads.h"

#include <omp.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/environment.h"
#include "01_single_gpu/core/launcher.h"
#include "01_single_gpu/core/platform/platform.h"

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

// What the environment says of threads, 0 for nothing. A list of OpenMP has a number for each level of nesting.
static int threads_wished(const char* variable) {
    const char* text = std::getenv(variable);
    if (!text || !*text) return 0;
    const int threads = thread_count(std::string_view(text).substr(0, std::string_view(text).find(',')));
    if (threads == 0) usage_error("{}={}: must be an integer from 1 to {}", variable, text, kMostThreads);
    return threads;
}

void use_cpu_threads(int ranks) {
    const int cores = cores_at_start().any() ? int(cores_at_start().count()) : omp_get_num_procs();
    const int of_openmp = threads_wished("OMP_NUM_THREADS"), of_blas = threads_wished("OPENBLAS_NUM_THREADS");
    const int threads = of_openmp ? of_openmp : of_blas ? of_blas : std::max(1, cores / ranks);
    platform::use_blas_threads(of_blas ? of_blas : threads);
    omp_set_num_threads(threads);
}

void set_cpu_threads(int ranks) {
    check_launch(ranks);
    use_cpu_threads(ranks);
}

int cores_within_reach() {
    const CoreSet own = platform::allowed_cores();
    if (own.none() || !platform::allow_cores(CoreSet().set())) return 0;
    const CoreSet reached = platform::allowed_cores();
    platform::allow_cores(own);
    return int(reached.count());
}

int ranks_that_share(const std::vector<CoreSet>& cores_of_rank, int rank) {
    const CoreSet& own = cores_of_rank[size_t(rank)];
    double share = 0;  // of a core that n ranks may use: 1/n
    for (size_t core = 0; core < own.size(); ++core)
        if (own[core])
            share += 1.0 / double(std::count_if(cores_of_rank.begin(), cores_of_rank.end(),
                                                [&](const CoreSet& cores) { return cores[core]; }));
    return share > 0 ? int(std::ceil(double(own.count()) / share - 1e-6)) : int(cores_of_rank.size());
}

std::string idle_cores(const std::vector<CoreSet>& cores_of_rank, int within_reach) {
    CoreSet used;
    for (const CoreSet& cores : cores_of_rank) used |= cores;
    const int idle = within_reach - int(used.count());
    if (cpu_threads() > 1 || idle <= 0 || used.none() || std::getenv("OMP_NUM_THREADS")) return "";
    return fmt::format(
        "threads: a rank is bound to {} of {} cores, and {} idle (mpirun --bind-to none, or srun --cpus-per-task)",
        cores_of_rank[0].count(), within_reach, idle);
}

int cpu_threads() { return omp_get_max_threads(); }

}  // namespace train70b
