#include "01_single_gpu/core/cpu_setup.h"

#include <omp.h>
#include <sched.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <map>
#include <optional>
#include <utility>

#include "01_single_gpu/core/check.h"

extern "C" void openblas_set_num_threads(int);
extern "C" int openblas_get_num_threads();
extern "C" char* openblas_get_corename();
extern "C" void* blas_memory_alloc(int);
extern "C" void blas_memory_free(void*);

namespace train70b {

namespace {
constexpr int kMostThreads = 1024, kMostBlasThreads = 64;  // of the second, as Debian's OpenBLAS is built
}

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
    const Core* core = std::find_if(std::begin(kCores), std::end(kCores), [&](const Core& c) {
        return ::strcasecmp(name.c_str(), c.name) == 0;
    });  // as OpenBLAS compares
    return core == std::end(kCores) ? nullptr : core;
}
}  // namespace

std::string better_blas_core(const CpuFeatures& features, const std::string& reported) {
    const Level can = features.avx512_bf16 ? avx512_bf16 : features.avx512 ? avx512 : features.avx2 ? avx2 : sse;
    const Core* known = find_core(reported);
    if (!known || can <= known->level) return "";  // a name that is not in the table is a newer core
    return can == avx512_bf16 ? "Cooperlake" : can == avx512 ? "SkylakeX" : "Haswell";
}

std::string cpu_lacks(const CpuFeatures& features, const std::string& core) {
    const Core* known = find_core(core);  // the products of Cooperlake in bf16 are not called here
    const bool no_avx512 = known && known->level >= avx512 && !features.avx512;
    const bool no_avx2 = known && known->level >= avx2 && !features.avx2;
    if (!no_avx512 && !no_avx2) return "";
    return fmt::format("OPENBLAS_CORETYPE={}: this CPU has no {} (leave it out{})", core,
                       no_avx512 ? "AVX-512" : "AVX2", no_avx2 ? "" : ", or try Haswell");
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

namespace {
constexpr std::pair<const char*, const char*> kSettings[] = {
    {"GOMP_SPINCOUNT", "1000"}, {"CUDA_DEVICE_MAX_CONNECTIONS", "32"}, {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"}};

// Whether a launcher started this process as one of several. A launcher that does not say how many counts as one.
bool one_of_several_ranks() {
    for (const char* size : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
        if (const char* number = std::getenv(size)) return std::atoi(number) > 1;
    return std::getenv("PMIX_RANK") || std::getenv("PMI_RANK");
}
}  // namespace

void restart_with_settings(char** argv) {
    bool changed = false;
    const auto set = [&changed](const char* name, const char* value) {
        if (!std::getenv(name)) changed = ::setenv(name, value, 1) == 0 || changed;
    };
    for (const auto& [name, value] : kSettings) set(name, value);
    if (one_of_several_ranks()) set("CUDA_MODULE_LOADING", "EAGER");
    const std::string core = better_blas_core(cpu_features(), blas_core());
    if (!core.empty()) set("OPENBLAS_CORETYPE", core.c_str());
    if (changed) execv("/proc/self/exe", argv);  // returns only on failure: continue with the defaults
}

// ---- before main() begins -------------------------------------------------------------------------------------------

namespace {

// What the libraries read when they are loaded: OpenBLAS maps a buffer for each thread then, libgomp reports a number
// of threads that is none in lines of its own. getenv() does not work yet.
std::string environment_problem(char** environment) {
    const auto value = [&](const std::string& name) -> std::optional<std::string> {
        for (char** each = environment; *each; ++each)
            if (const std::string_view text = *each; text.starts_with(name + "="))
                return std::string(text.substr(name.size() + 1));
        return {};
    };
    if (const std::string lacks = cpu_lacks(cpu_features(), value("OPENBLAS_CORETYPE").value_or("")); !lacks.empty())
        return lacks;
    const auto openmp = value("OMP_NUM_THREADS");
    const int of_openmp = openmp ? thread_count(openmp->substr(0, openmp->find(','))) : kMostThreads;
    if (of_openmp == 0)
        return fmt::format("OMP_NUM_THREADS={}: must be an integer from 1 to {}", *openmp, kMostThreads);
    cpu_set_t cpus;
    const int cores = ::sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    return no_room_for_blas(std::min({cores, of_openmp, kMostBlasThreads}));
}

void check_environment(int, char** argv, char** environment) {
    const std::string problem = environment_problem(environment);
    if (problem.empty()) return;
    for (char** each = environment; *each; ++each)  // the others of this machine would say the same
        if (const std::string_view rank = *each;
            rank.starts_with("OMPI_COMM_WORLD_LOCAL_RANK=") && !rank.ends_with("=0"))
            ::_exit(2);
    const std::string_view program = argv[0];
    const std::string line = one_line(fmt::format("{}: {}", program.substr(program.rfind('/') + 1), problem)) + "\n";
    if (::write(STDERR_FILENO, line.data(), line.size()) < 0) {}
    ::_exit(2);
}
// Called before the libraries' own initialization.
[[gnu::section(".preinit_array"), gnu::used]] void (*const kCheckEnvironment)(int, char**, char**) = check_environment;

}  // namespace

}  // namespace train70b
