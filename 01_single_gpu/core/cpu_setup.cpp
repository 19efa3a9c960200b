#include "01_single_gpu/core/cpu_setup.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>

#include "01_single_gpu/core/check.h"

extern "C" void openblas_set_num_threads(int);
extern "C" char* openblas_get_corename();

namespace train70b {

void set_cpu_threads(int ranks_on_node) {
    constexpr int kMost = 1024;
    int threads = std::max(1, omp_get_num_procs() / ranks_on_node);
    if (const char* requested = std::getenv("OPENBLAS_NUM_THREADS"); requested && *requested) {
        threads = std::atoi(requested);
        if (threads < 1 || threads > kMost)
            usage_error("OPENBLAS_NUM_THREADS={}: must be an integer from 1 to {}", requested, kMost);
    }
    openblas_set_num_threads(threads);
    omp_set_num_threads(threads);
}

int cpu_threads() { return omp_get_max_threads(); }

CpuFeatures cpu_features() {
    CpuFeatures features;
#if defined(__x86_64__)
    __builtin_cpu_init();
    features.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    features.avx512 = features.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
    features.avx512_bf16 = features.avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return features;
}

std::string blas_core() { return openblas_get_corename(); }

namespace {
enum Level { sse, avx, avx2, avx512, avx512_bf16 };
struct Core {
    const char* name;
    Level level;
};
// OpenBLAS's names of x86-64 cores (its cpuid_x86.c) with the widest vectors that their kernels use.
constexpr Core kCores[] = {{"Prescott", sse},
                           {"Core2", sse},
                           {"Penryn", sse},
                           {"Dunnington", sse},
                           {"Nehalem", sse},
                           {"Atom", sse},
                           {"Nano", sse},
                           {"Opteron", sse},
                           {"Opteron_SSE3", sse},
                           {"Barcelona", sse},
                           {"Bobcat", sse},
                           {"Sandybridge", avx},
                           {"Bulldozer", avx},
                           {"Piledriver", avx},
                           {"Steamroller", avx},
                           {"Excavator", avx2},
                           {"Haswell", avx2},
                           {"Zen", avx2},
                           {"SkylakeX", avx512},
                           {"Cooperlake", avx512_bf16},
                           {"Sapphirerapids", avx512_bf16}};

const Core* find_core(const std::string& name) {
    const Core* core =
        std::find_if(std::begin(kCores), std::end(kCores), [&](const Core& c) { return name == c.name; });
    return core == std::end(kCores) ? nullptr : core;
}
}  // namespace

std::string better_blas_core(const CpuFeatures& features, const std::string& reported) {
    const Level can = features.avx512_bf16 ? avx512_bf16 : features.avx512 ? avx512 : features.avx2 ? avx2 : sse;
    const Core* known = find_core(reported);
    if (!known || can <= known->level) return "";  // a name that is not in the table is a newer core
    return can == avx512_bf16 ? "Cooperlake" : can == avx512 ? "SkylakeX" : "Haswell";
}

std::string mixed_blas_cores(const std::vector<std::string>& core_of_rank) {
    std::map<std::string, std::vector<size_t>> ranks_of;
    for (size_t rank = 0; rank < core_of_rank.size(); ++rank) ranks_of[core_of_rank[rank]].push_back(rank);
    if (ranks_of.size() < 2) return "";
    std::string text, oldest = core_of_rank[0];
    for (const auto& [core, ranks] : ranks_of) {
        text += fmt::format("{}{} on {} rank{} from {} on", text.empty() ? "" : ", ", core, ranks.size(),
                            ranks.size() == 1 ? "" : "s", ranks[0]);
        const Core *now = find_core(core), *before = find_core(oldest);
        if (now && (!before || now->level < before->level)) oldest = core;
    }
    return fmt::format(
        "OpenBLAS runs different kernels: {}; products differ in their last bits between ranks "
        "(set OPENBLAS_CORETYPE={} in every rank's environment)",
        text, oldest);
}

constexpr std::pair<const char*, const char*> kSettings[] = {
    {"GOMP_SPINCOUNT", "1000"}, {"CUDA_MODULE_LOADING", "EAGER"}, {"CUDA_DEVICE_MAX_CONNECTIONS", "32"}};

void restart_with_settings(char** argv) {
    // The marker holds the process id, which exec keeps, so that child processes decide for themselves. (It is not
    // unset: Open MPI does not find its daemon after unsetenv() has moved the entries of the environment.)
    constexpr const char* kMarker = "TRAIN70B_STARTED";
    const std::string number = std::to_string(getpid());
    if (const char* marker = std::getenv(kMarker); marker && marker == number) return;
    setenv(kMarker, number.c_str(), 1);
    for (const auto& [name, value] : kSettings) setenv(name, value, 0);
    const std::string core = better_blas_core(cpu_features(), blas_core());
    if (!core.empty()) setenv("OPENBLAS_CORETYPE", core.c_str(), 0);
    execv("/proc/self/exe", argv);  // returns only on failure: continue with the defaults
}

}  // namespace train70b
