#include "01_single_gpu/core/blas_core.h"

#include <strings.h>

#include <algorithm>
#include <map>

#include "01_single_gpu/core/check.h"

namespace train70b {

using enum CpuVectors;

CpuVectors cpu_vectors() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return sse;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512cd") ||
        !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl"))
        return avx2;
    return __builtin_cpu_supports("avx512bf16") ? avx512_bf16 : avx512;
#else
    return sse;
#endif
}

namespace {
struct Cores {
    CpuVectors vectors;
    std::initializer_list<const char*> names;
};
// OpenBLAS's names of x86-64 cores (its cpuid_x86.c).
constexpr Cores kCores[] = {
    {sse, {"Prescott", "Core2", "Penryn", "Dunnington", "Nehalem", "Atom", "Nano"}},
    {sse, {"Opteron", "Opteron_SSE3", "Barcelona", "Bobcat"}},
    {avx, {"Sandybridge", "Bulldozer", "Piledriver", "Steamroller"}},
    {avx2, {"Excavator", "Haswell", "Zen"}},
    {avx512, {"SkylakeX"}},
    {avx512_bf16, {"Cooperlake", "Sapphirerapids"}},
};

CpuVectors vectors_of(std::string_view core) {
    for (const Cores& cores : kCores)
        for (const char* name : cores.names)
            if (::strcasecmp(std::string(core).c_str(), name) == 0) return cores.vectors;  // as OpenBLAS compares
    return unknown;
}
}  // namespace

std::string better_blas_core(CpuVectors cpu, std::string_view reported) {
    if (cpu <= vectors_of(reported) || cpu < avx2) return "";
    return cpu == avx512_bf16 ? "Cooperlake" : cpu == avx512 ? "SkylakeX" : "Haswell";
}

std::string cpu_lacks(CpuVectors cpu, std::string_view core) {
    const CpuVectors needed = std::min(vectors_of(core), avx512);  // products in bf16 of Cooperlake are not called here
    if (needed < avx2 || cpu >= needed || vectors_of(core) == unknown) return "";
    return fmt::format("OPENBLAS_CORETYPE={}: this CPU has no {} (leave it out{})", core,
                       needed == avx2 ? "AVX2" : "AVX-512", cpu >= avx2 ? ", or try Haswell" : "");
}

std::string mixed_blas_cores(const std::vector<std::string>& core_of_rank) {
    std::map<std::string, std::vector<size_t>> ranks_of;
    for (size_t rank = 0; rank < core_of_rank.size(); ++rank) ranks_of[core_of_rank[rank]].push_back(rank);
    if (ranks_of.size() < 2) return "";
    std::string text, oldest = core_of_rank[0];
    for (const auto& [core, ranks] : ranks_of) {
        text += fmt::format("{}{} on {} rank{} from {} on", text.empty() ? "" : ", ", core, ranks.size(),
                            ranks.size() == 1 ? "" : "s", ranks[0]);
        if (vectors_of(core) < vectors_of(oldest)) oldest = core;
    }
    return fmt::format(
        "OpenBLAS runs different kernels: {}; products differ in their last bits between ranks "
        "(set OPENBLAS_CORETYPE={} in every rank's environment)",
        text, oldest);
}

}  // namespace train70b
