#include "01_single_gpu/core/blas_core.h"

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

std::string better_blas_core(CpuVectors cpu, std::string_view reported) {
    return cpu >= avx2 && reported == "Prescott" ? "Haswell" : "";
}

std::string mixed_kernels(const std::vector<std::string>& of_rank) {
    std::map<std::string, std::vector<size_t>> ranks_of;
    for (size_t rank = 0; rank < of_rank.size(); ++rank) ranks_of[of_rank[rank]].push_back(rank);
    if (ranks_of.size() < 2) return "";
    std::string text;
    for (const auto& [kernels, ranks] : ranks_of)
        text += fmt::format("{}{} on {} rank{} from {} on", text.empty() ? "" : ", ", kernels, ranks.size(),
                            ranks.size() == 1 ? "" : "s", ranks[0]);
    return fmt::format(
        "products are computed by different kernels: {}; they differ in their last bits between ranks (set "
        "ONEDNN_MAX_CPU_ISA and OPENBLAS_CORETYPE to what all have, in every rank's environment)",
        text);
}

}  // namespace train70b
