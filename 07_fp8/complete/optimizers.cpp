#include "07_fp8/complete/optimizers.h"

#include "01_single_gpu/core/registry.h"
#include "07_fp8/complete/adamw8bit.h"

namespace train70b {

const std::vector<OptimizerEntry>& optimizers() {
    static std::vector<OptimizerEntry> list = {
        {"adamw", AdamW::maker, stats_dtype},
        {"adamw8bit", AdamW8bit::maker, [](DType) { return DType::u8; }, kMomentBlock}};
    return list;
}

const OptimizerEntry& find_optimizer(const std::string& name) { return find_entry(optimizers(), "--optimizer", name); }

MakeOptimizer make_optimizer_of(const std::string& name, const AdamW::Hyper& hyper) {
    return find_optimizer(name).maker(hyper);
}

double moment_bytes(const std::string& optimizer, DType dtype) {
    const OptimizerEntry& entry = find_optimizer(optimizer);
    return 2 * double(size_of(entry.moments(dtype))) + (entry.scale_block > 0 ? 8.0 / double(entry.scale_block) : 0);
}

double state_bytes(const std::string& optimizer, DType dtype) {
    return double(master_bytes(dtype)) + moment_bytes(optimizer, dtype);
}

}  // namespace train70b
