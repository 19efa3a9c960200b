#include "07_fp8/complete/flags.h"

#include "01_single_gpu/core/registry.h"

namespace train70b {

void add_fp8_flags(Flags& flags, Fp8Options& o, std::string& optimizer) {
    flags.group("Precision, memory");
    flags.add("--fp8", o.recipe, "FP8 scaling recipe of the linear layers", one_of(fp8_values()));
    flags.add_switch("--fp8-strict", o.strict, "fail if the shape of a layer does not support FP8");
    flags.add("--fp8-history", o.history, "length of the amax history in steps, with --fp8 delayed",
              integer_from(1, 65536));
    flags.add("--fp8-margin", o.margin,
              "margin N of scales: leave room for values 2^N times as large, with --fp8 delayed", integer_from(0, 16));
    flags.add("--optimizer", optimizer,
              "optimizer; adamw8bit: moments of 1 byte; muon: orthogonal updates of the matrices in blocks",
              one_of(optimizer_names()));
    flags
        .add_word(  // read behind --optimizer
            "--stochastic-rounding",
            [&optimizer](const std::string& word) {
                if (word == "off") return;
                if (optimizer != "adamw")
                    usage_error("--stochastic-rounding on: not with --optimizer {} (try adamw)", optimizer);
                optimizer = kStochasticRounding;
            },
            "adamw on bf16 weights and moments, rounded up or down at random, without fp32 copies",
            one_of({"on", "off"}))
        .default_text("off");
}

void check_precision(const Fp8Options& options, const std::string& optimizer, const TrainOptions& training,
                     bool offloads) {
    const OptimizerEntry& entry = find_optimizer(optimizer);
    if (!entry.masters && training.dtype != "bf16")
        usage_error("--stochastic-rounding on: weights of --dtype {} need none (try --dtype bf16)", training.dtype);
    if (training.device_kind() == Device::cuda) check_on_gpu(options, "--device cuda");
    if (entry.muon) check_muon(training.mup.has_value(), offloads);
    if (training.fp16() && options.recipe != "off")
        usage_error("--fp8 {}: cannot be combined with --dtype fp16 (try --fp8 off, or --dtype bf16)", options.recipe);
    if (training.dtype != "fp64") return;
    if (options.recipe != "off")
        usage_error("--fp8 {}: cannot be combined with --dtype fp64 (try --fp8 off, or --dtype fp32)", options.recipe);
    if (entry.scale_block > 0)
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
