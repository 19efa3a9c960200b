#include "01_single_gpu/complete/run/training_run.h"

#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "01_single_gpu/core/cpu_threads.h"

namespace train70b {

double control_group_memory(const std::string& list, const std::string& root) {
    double smallest = kInfinity;
    std::ifstream lines(list);
    for (std::string line; std::getline(lines, line);) {  // "0::/a/b" or, version 1, "4:memory:/a/b"
        const bool first_version = line.find(":memory:") != line.npos;
        if (!first_version && !line.starts_with("0::")) continue;
        std::string group = line.substr(line.find(':', line.find(':') + 1) + 1);
        for (bool last = false; !last; group.resize(last ? 0 : group.rfind('/'))) {
            std::ifstream file(first_version ? root + "/memory" + group + "/memory.limit_in_bytes"
                                             : root + group + "/memory.max");
            if (double bytes = 0; file >> bytes) smallest = std::min(smallest, bytes);
            last = group.find('/') == group.npos;
        }
    }
    return smallest;
}

std::string memory_shortage(double machine_needs, double process_needs) {
    const double page = double(sysconf(_SC_PAGE_SIZE)), ram = double(sysconf(_SC_PHYS_PAGES)) * page;
    if (machine_needs > ram)
        return fmt::format("{}, but this machine has {}", human_bytes(machine_needs), human_bytes(ram));
    if (const double group = control_group_memory(); machine_needs > group)
        return fmt::format("{}, but the control group may use {}", human_bytes(machine_needs), human_bytes(group));
    struct rlimit limit {};
    if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
    double mapped = 0;  // pages
    std::ifstream("/proc/self/statm") >> mapped;
    const double left = std::max(double(limit.rlim_cur) - mapped * page, 0.0);
    if (process_needs <= left) return "";
    return fmt::format("{}, but ulimit -v leaves {}", human_bytes(process_needs), human_bytes(left));
}

// Lower bounds: the states, stored once over all ranks; the input of every block, and the logits.
void check_memory(const TrainOptions& o, const Flags& flags, double ranks, double nodes) {
    if (o.device_kind() != Device::cpu) return;
    const auto flag = [&](const char* name) { return flags.values().value(name, std::string()); };
    const Llama::Options types = o.llama();
    const bool adamw = flag("optimizer").empty() || flag("optimizer") == "adamw";  // what others need is not known here
    const double weight = double(size_of(types.dtype)), state = adamw && flag("offload") != "nvme" ? 8 : 0;
    const double states = double(o.model.parameters()) * (weight + double(size_of(types.grad_dtype)) + state);
    if (const std::string shortage = memory_shortage(states / nodes, states / ranks); !shortage.empty()) {
        std::string what = o.load_hf.empty() ? "--model " + o.model.name : "--load-hf " + o.load_hf;
        for (const char* name : {"layers", "hidden", "heads", "kv-heads", "head-dim", "ffn", "vocab"})
            if (!flag(name).empty()) what += fmt::format(" --{} {}", name, flag(name));
        usage_error(
            "{}: weights, gradients and optimizer states need at least {} (try a smaller model, or 08_3d_full "
            "--dry-run)",
            what, shortage);
    }
    const double per_token = double(o.model.hidden) * double(o.model.layers) + double(o.model.vocab);
    const double activations = double(o.micro_batch) * double(o.seq_len) * per_token * weight / ranks;
    if (const std::string shortage = memory_shortage(activations, activations); !shortage.empty()) {
        const bool micro = flags.given("--micro-batch") || o.micro_batch == 1;
        usage_error("{} {} with --seq-len {}: activations need at least {} (try a smaller --micro-batch or --seq-len)",
                    micro ? "--micro-batch" : "--global-batch", micro ? o.micro_batch : o.global_batch, o.seq_len,
                    shortage);
    }
}

static void say_missing_ends(const Dataset& data, int64_t document_token) {
    constexpr int64_t kLooked = 1 << 22;
    for (const Dataset::Part& part : data.parts()) {
        if (this_rank != 0) return;
        const std::vector<int32_t> tokens = part.source->read(0, std::min(kLooked, part.source->tokens()));
        if (std::find(tokens.begin(), tokens.end(), document_token) == tokens.end())
            say("data: {}: --document-token {} is not among the first {} tokens: is it the token that ends a "
                "document?\n",
                part.name, document_token, tokens.size());
    }
}

TrainingRun::TrainingRun(const TrainOptions& options, const nlohmann::ordered_json& flags,
                         const std::optional<Stage>& stage)
    : options_(options),
      weights_(options.load_hf.empty() ? std::nullopt : std::make_optional<HfWeights>(options.load_hf, options.model)),
      data(options.data, options.model.vocab, options.seq_len, options.val_fraction),
      model(options.model, options.llama(), stage.value_or(full_model(options.model))),
      trainer(options, model, data),
      outputs(trainer, flags) {}

void TrainingRun::allocate() {
    const LlamaConfig& c = options_.model;
    const Device device = model.options.device;
    const std::string kernels =
        device == Device::cuda   ? fmt::format(" ({})", device_text(device))
        : device == Device::meta ? ""
                                 : fmt::format(" ({} kernels, {} thread{})", cpu::product_kernels(model.options.dtype),
                                               cpu_threads(), cpu_threads() == 1 ? "" : "s");
    say("{}: {} parameters, {} blocks x {} hidden, {}/{} heads, vocabulary {}; {} on {}{}\n", c.name,
        human_count(double(c.parameters())), c.layers, c.hidden, c.heads, c.kv_heads, c.vocab, options_.dtype,
        name_of(device), kernels);
    const auto attention = [&](bool masks) { return attention_text(device, model.options.dtype, c.head_dim(), masks); };
    const bool some = c.hides_keys(options_.seq_len) && !options_.document_token && c.window_share() < 1;
    if (device == Device::cuda)
        say("GPU: {}\nattention: {}{}\n", versions_text(device), attention(options_.masks_keys()),
            some ? "; in layers without windows " + attention(false) : "");
    say("data: {} training tokens; a step is {} sequences of {} = {} tokens, micro-batches of {}\n",
        data.train_tokens(), options_.global_batch, options_.seq_len, options_.global_batch * options_.seq_len,
        options_.micro_batch);
    if (options_.document_token) say_missing_ends(data, *options_.document_token);
    if (data.has_masks()) say("      with masks: the loss is the mean over the targets that they leave\n");
    for (const Dataset::Part& part : data.parts())
        if (data.is_mixture())
            say("      {}: weight {:g}, {} training tokens, {} sequences for validation\n", part.name, part.weight,
                part.source->train_tokens(), part.source->validation_samples());
    if (const std::string mfu = mfu_text(device, model.options.dtype, options_.masks_keys()); !mfu.empty())
        say("{}\n", mfu);
    say("{}", options_.notes);
    const std::string dtype = options_.fp16() ? "fp32" : options_.dtype;
    if (const std::string stored = weights_ ? weights_->dtypes() : dtype; stored != dtype)
        say("weights of {} in {}: trained and saved in {} (--dtype)\n", options_.load_hf, stored, dtype);
    trainer.allocate();
    if (weights_) {
        for (Unit* unit : model.units()) trainer.store->write(*unit, [&] { weights_->load(unit->params); });
        weights_->load_buffers(model);
    }
    weights_.reset();
}

}  // namespace train70b
