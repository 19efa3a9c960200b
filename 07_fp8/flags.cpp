#include "07_fp8/flags.h"

#include "01_single_gpu/core/registry.h"
#include "07_fp8/adamw8bit.h"

namespace train70b {

void add_fp8_flags(Flags& flags, Fp8Options& o, std::string& optimizer) {
    flags.group("Precision, memory");
    flags.add("--fp8", o.recipe, "FP8 scaling recipe of the linear layers", one_of(fp8_values()));
    flags.add_switch("--fp8-strict", o.strict, "fail if the shape of a layer does not support FP8");
    flags.add("--fp8-history", o.history, "length of the amax history in steps, with --fp8 delayed",
              integer_from(1, 65536));
    flags.add("--fp8-margin", o.margin,
              "margin N of scales: leave room for values 2^N times as large, with --fp8 delayed", integer_from(0, 16));
    flags.add("--optimizer", optimizer, "optimizer; moments of 4 bytes or 1 byte", one_of(names_of(optimizers())));
}

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

void check_precision(const Fp8Options& options, const std::string& optimizer, const std::string& dtype) {
    if (dtype != "fp64") return;
    if (options.recipe != "off")
        usage_error("--fp8 {}: cannot be combined with --dtype fp64 (try --fp8 off, or --dtype fp32)", options.recipe);
    if (optimizer != "adamw")
        usage_error("--optimizer {}: cannot be combined with --dtype fp64 (try --optimizer adamw)", optimizer);
}

void check_fp8(const Fp8Options& options, const LlamaConfig& config, int64_t rows, int64_t tensor_ranks) {
    if (options.recipe == "off" || !options.strict) return;
    const int64_t divisor = make_recipe(options, 0, Device::cpu, Comm())->divisor();
    for (const LayerShape& layer : layer_shapes(config, tensor_ranks))
        if (const std::string why = why_not_fp8(layer, rows, divisor); !why.empty())
            usage_error("--fp8-strict on: --fp8 {}: {}", options.recipe, why);
}

}  // namespace train70b
