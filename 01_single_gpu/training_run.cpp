#include "01_single_gpu/training_run.h"

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "01_single_gpu/core/cpu_setup.h"
#include "01_single_gpu/core/profile.h"

namespace train70b {

double machine_memory() { return double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGE_SIZE)); }

// Lower bounds: the states, stored once over all ranks, and the input of every block.
void check_memory(const TrainOptions& o, const nlohmann::ordered_json& flags, double ranks, double nodes) {
    if (o.device_kind() != Device::cpu) return;
    const auto flag = [&](const char* name) { return flags.value(name, std::string()); };
    const double machine = machine_memory();
    const Llama::Options types = o.llama();
    const double weight = double(size_of(types.dtype)), state = flag("optimizer") == "adamw8bit" ? 2 : 8;
    const double states = double(o.model.parameters()) * (weight + double(size_of(types.grad_dtype)) + state) / nodes;
    if (states > machine) {
        std::string what = o.load_hf.empty() ? "--model " + o.model.name : "--load-hf " + o.load_hf;
        for (const char* name : {"layers", "hidden", "heads", "kv-heads", "head-dim", "ffn", "vocab"})
            if (!flag(name).empty()) what += fmt::format(" --{} {}", name, flag(name));
        usage_error(
            "{}: weights, gradients and optimizer states need at least {}, but this machine has {} (try a smaller "
            "model, or 08_3d_full --dry-run)",
            what, human_bytes(states), human_bytes(machine));
    }
    const double inputs =
        double(o.micro_batch) * double(o.seq_len) * double(o.model.hidden) * double(o.model.layers) * weight / ranks;
    if (inputs > machine)
        usage_error(
            "--micro-batch {} with --seq-len {}: activations need at least {}, but this machine has {} (try a smaller "
            "--micro-batch or --seq-len)",
            o.micro_batch, o.seq_len, human_bytes(inputs), human_bytes(machine));
}

TrainingRun::TrainingRun(const TrainOptions& options, const nlohmann::ordered_json& flags,
                         const std::optional<Stage>& stage)
    : options_(options),
      weights_(options.load_hf.empty() ? std::nullopt : std::make_optional<HfWeights>(options.load_hf, options.model)),
      data(options.data, options.model.vocab, options.seq_len, options.val_fraction),
      model(options.model, options.llama(), stage.value_or(full_model(options.model))),
      prometheus(options.prometheus),
      trainer(options, model, data, flags),
      spike_alarm_(trainer, options) {
    trainer.controls = {&spike_alarm_, &prometheus};
    if (options.noise_scale) trainer.controls.push_back(&noise_scale_.emplace(trainer, model, options));
}

void TrainingRun::allocate() {
    const LlamaConfig& c = options_.model;
    const Device device = model.options.device;
    const std::string kernels = device == Device::cuda ? fmt::format(" ({})", device_text(device))
                                : device == Device::meta
                                    ? ""
                                    : fmt::format(" (OpenBLAS {} kernels, {} thread{})", blas_core(), cpu_threads(),
                                                  cpu_threads() == 1 ? "" : "s");
    say("{}: {} parameters, {} blocks x {} hidden, {}/{} heads, vocabulary {}; {} on {}{}\n", c.name,
        human_count(double(c.parameters())), c.layers, c.hidden, c.heads, c.kv_heads, c.vocab, options_.dtype,
        name_of(device), kernels);
    say("data: {} training tokens; a step is {} sequences of {} = {} tokens, micro-batches of {}\n",
        data.train_tokens(), options_.global_batch, options_.seq_len, options_.global_batch * options_.seq_len,
        options_.micro_batch);
    for (const auto& [ramp, what] :
         {std::pair(options_.batch_ramp, "sequences of a step"), {options_.seq_ramp, "tokens of a sequence"}})
        if (ramp) say("      {}: from {} to {} over {} steps\n", what, ramp.from, ramp.to, ramp.steps);
    if (data.has_masks()) say("      with masks: the loss is the mean over the targets that they leave\n");
    for (const Dataset::Part& part : data.parts())
        if (data.is_mixture())
            say("      {}: weight {:g}, {} training tokens, {} sequences for validation\n", part.name, part.weight,
                part.source->train_tokens(), part.source->validation_samples());
    if (const std::string mfu = mfu_text(device, model.options.dtype, options_.document_token.has_value());
        !mfu.empty())
        say("{}\n", mfu);
    trainer.allocate();
    if (weights_)
        for (Unit* unit : model.units()) trainer.store->write(*unit, [&] { weights_->load(unit->params); });
    weights_.reset();
}

}  // namespace train70b
