#include "07_fp8/complete/optimizers.h"

#include "01_single_gpu/core/registry.h"
#include "07_fp8/complete/adamw8bit.h"
#include "07_fp8/complete/adamw_bf16.h"

namespace train70b {

const std::vector<OptimizerEntry>& optimizers() {
    static std::vector<OptimizerEntry> list = {
        {"adamw", [](auto& hyper, auto) { return AdamW::maker(hyper); }, stats_dtype},
        {"adamw8bit", [](auto& hyper, auto) { return AdamW8bit::maker(hyper); }, [](DType) { return DType::u8; },
         kMomentBlock},
        {.name = kStochasticRounding,
         .maker = [](auto& hyper, auto) { return AdamWBf16::maker(hyper); },
         .moments = [](DType) { return DType::bf16; },
         .masters = false},
        {.name = "muon", .maker = Muon::maker, .moments = stats_dtype, .muon = true}};
    return list;
}

std::vector<std::string> optimizer_names() {
    std::vector<std::string> names = names_of(optimizers());
    std::erase(names, kStochasticRounding);
    return names;
}

const OptimizerEntry& find_optimizer(const std::string& name) { return find_entry(optimizers(), "--optimizer", name); }

static double moment_bytes(const OptimizerEntry& entry, DType dtype, double muon_share) {
    const double moments = 2 - (entry.muon ? muon_share : 0);
    return moments * double(size_of(entry.moments(dtype))) +
           (entry.scale_block > 0 ? 8.0 / double(entry.scale_block) : 0);
}

double state_bytes(const std::string& optimizer, DType dtype, double muon_share) {
    const OptimizerEntry& entry = find_optimizer(optimizer);
    return (entry.masters ? double(master_bytes(dtype)) : 0) + moment_bytes(entry, dtype, muon_share);
}

double checkpoint_bytes(const std::string& optimizer, DType dtype, double muon_share) {
    const OptimizerEntry& entry = find_optimizer(optimizer);
    return double(size_of(entry.masters ? stats_dtype(dtype) : dtype)) + moment_bytes(entry, dtype, muon_share);
}

}  // namespace train70b
