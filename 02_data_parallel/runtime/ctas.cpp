#include "02_data_parallel/runtime/ctas.h"

#include <algorithm>
#include <cstdlib>

namespace train70b {

int ctas_of(GroupLoad load) {
    if (const char* number = std::getenv("NCCL_MAX_CTAS"); number && std::atoi(number) > 0)
        return std::atoi(number);  // for NCCL, too, the environment overrides the program
    switch (load) {
        case GroupLoad::heavy: return 16;
        case GroupLoad::light:
        case GroupLoad::alone: return 2;
        case GroupLoad::channel: return 4;
    }
    return 0;
}

std::map<const CtaShare*, std::pair<const void*, int>>& CtaShare::shares() {
    static auto* open = new std::map<const CtaShare*, std::pair<const void*, int>>();  // outlives static groups
    return *open;
}

CtaShare::CtaShare(int ctas, const void* lane) {
    shares()[this] = {lane, ctas};
    most = std::max(most, sum());
}

int CtaShare::sum() {
    std::map<const void*, int> most;
    for (const auto& [share, of] : shares()) most[of.first] = std::max(most[of.first], of.second);
    int sum = 0;
    for (const auto& [lane, ctas] : most) sum += ctas;
    return sum;
}

}  // namespace train70b
