#include "07_fp8/complete/optimizers.h"

#include "01_single_gpu/core/registry.h"
#include "07_fp8/complete/adamw8bit.h"

namespace train70b {

const std::vector<OptimizerEntry>& optimizers() {
    static std::vector<OptimizerEntry> list = {
        {"adamw", [](auto& hyper, auto) { return AdamW::maker(hyper); }, stats_dtype},
        {"adamw8bit", [](auto& hyper, auto) { return AdamW8bit::maker(hyper); }, [](DType) { return DType::u8; },
         kMomentBlock},
        {.name = "muon", .maker = Muon::maker, .moments = stats_dtype, .muon = true}};
    return list;
}

const OptimizerEntry& find_optimizer(const std::string& name) { return find_entry(optimizers(), "--optimizer", name); }

MakeOptimizer make_optimizer_of(const std::string& name, const AdamW::Hyper& hyper) {
    return find_optimizer(name).maker(hyper, std::make_shared<Orthogonalizer>());
}

double moment_bytes(const std::string& optimizer, DType dtype, double muon_share) {
    const OptimizerEntry& entry = find_optimizer(optimizer);
    const double moments = 2 - (entry.muon ? muon_share : 0);
    return moments * double(size_of(entry.moments(dtype))) +
           (entry.scale_block > 0 ? 8.0 / double(entry.scale_block) : 0);
}

double state_bytes(const std::string& optimizer, DType dtype, double muon_share) {
    return double(master_bytes(dtype)) + moment_bytes(optimizer, dtype, muon_share);
}

}  // namespace train70b
