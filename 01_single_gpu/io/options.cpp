#include "01_single_gpu/io/options.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <numeric>

#include "01_single_gpu/core/registry.h"
#include "01_single_gpu/io/files.h"
#include "01_single_gpu/io/hf.h"
#include "01_single_gpu/io/reference.h"

namespace train70b {

namespace {
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr const char* kDefaultData = "docs/data/corpus.txt";

DType dtype_of(const std::string& name) {
    return name == "bf16" ? DType::bf16 : name == "fp64" ? DType::f64 : DType::f32;
}
}  // namespace

CommandLine::CommandLine(const std::string& description, TrainOptions& o) : Flags(description), options_(o) {
    const Check count = whole_number_from(1), count0 = whole_number_from(0);
    const Check positive = real_number(0, kInfinity, false), positive0 = real_number(0, kInfinity);

    group("Model");
    add("--model", model_, "shape of the Llama", one_of(preset_names()));
    add("--layers", layers_, "transformer blocks", count);
    add("--hidden", hidden_, "width of the residual stream", count);
    add("--heads", heads_, "query heads", count);
    add("--kv-heads", kv_heads_, "key/value heads (grouped queries) [divides --heads]", count);
    add("--ffn", ffn_, "inner width of the MLP", count);
    add("--vocab", vocab_, "vocabulary (bytes: 256)", count);
    add_input("--load-hf", o.load_hf, "DIR: shape and weights of a Hugging Face Llama");
    add("--init-std", o.init_std, "initial weights", positive);
    add("--seed", o.seed, "of initial weights and batches", whole_number_from(0, INT64_MAX));

    group("Data");
    add_input("--data", o.data, fmt::format("text file, folder of text, or .bin shards [{}]", kDefaultData));
    add("--seq-len", o.seq_len, "tokens of a sequence", count);
    add("--micro-batch", o.micro_batch, "sequences at once per rank", count).default_text("global / ranks");
    add("--global-batch", o.global_batch, "sequences of one step", count);
    add("--val-fraction", o.val_fraction, "held out", real_number(0, 0.9)).default_text("0.1 of a text, 0 of shards");
    add("--eval-every", o.eval_every, "steps between validations; 0: never", count0);

    group("Training");
    add("--steps", o.steps, "optimizer steps", count0);
    add("--lr", o.lr, "peak learning rate", positive0);
    add("--min-lr", o.min_lr, "at the last step", positive0).default_text("lr / 10");
    add("--warmup-steps", o.warmup_steps, "step s has s / W of the peak", count0);
    add("--lr-schedule", o.lr_schedule, "after the warm-up", one_of(names_of(lr_shapes())));
    add("--weight-decay", o.weight_decay, "matrices only", positive0);
    add("--beta1", o.beta1, "AdamW", real_number(0, 0.999999));
    add("--beta2", o.beta2, "AdamW", real_number(0, 0.999999));
    add("--eps", o.eps, "AdamW", positive);
    add("--clip", o.clip, "global gradient norm; 0: off", positive0);

    group("Precision, memory");
    add("--dtype", o.dtype, "of weights and activations; fp64: on the CPU, the yardstick for all others",
        one_of({"fp32", "bf16", "fp64"}));
    add("--grad-dtype", o.grad_dtype, "of gradients; with --dtype fp64 always that", one_of({"fp32", "bf16", "fp64"}));
    add("--recompute", o.recompute, "activations made again in the backward pass", one_of(recompute_names()));
    add("--device", o.device, "where to run", one_of({"auto", "cpu", "cuda"}));

    group("Output");
    add_output("--metrics", o.metrics, "FILE.jsonl: one line per step");
    add_output("--trace", o.trace, "FILE.json: Chrome trace events");
    add_output("--memory-timeline", o.memory_timeline, "FILE.csv: every allocation");
    add_output("--save-hf", o.save_hf, "DIR: the trained model in Hugging Face's format", hf_files());
    add_output("--save-reference", o.save_reference, "DIR: the run for build/bin/compare", reference_files());
}

void CommandLine::parse(int argc, char** argv) {
    Flags::parse(argc, argv);
    TrainOptions& o = options_;
    o.model = model_shape();
    if (o.min_lr < 0) record("--min-lr", fmt::format("{}", o.min_lr = o.lr / 10));
    if (o.min_lr > o.lr) usage_error("--min-lr {} is above --lr {}; at most {} would work", o.min_lr, o.lr, o.lr);
    if (o.dtype == "fp64") {
        if (given("--grad-dtype") && o.grad_dtype != "fp64")
            usage_error("--grad-dtype {}: gradients of --dtype fp64 are fp64; leave it out", o.grad_dtype);
        if (o.device == "cuda") usage_error("--dtype fp64: is for the CPU; --device cpu would do, or --dtype fp32");
        record("--grad-dtype", o.grad_dtype = "fp64");
    } else if (o.grad_dtype == "fp64") {
        usage_error("--grad-dtype fp64: belongs to --dtype fp64; with --dtype {} there is --grad-dtype fp32", o.dtype);
    }
    if (o.dtype == "fp32" && o.grad_dtype == "bf16")
        usage_error("--grad-dtype bf16: gradients may not be narrower than the weights; add --dtype bf16");
    if (o.device == "cuda" && !why_no_cuda().empty())
        usage_error("--device cuda: {}; --device cpu works here", why_no_cuda());
    if (o.data.empty() && !given("--data")) o.data = repository_file(kDefaultData);
    check_path_flags();
}

Flags::Flag CommandLine::add_output(const std::string& flag, std::string& path, const std::string& text,
                                    std::vector<std::string> files) {
    path_flags_.push_back({flag, &path, true, std::move(files)});
    return add(flag, path, text);
}

Flags::Flag CommandLine::add_input(const std::string& flag, std::string& path, const std::string& text) {
    path_flags_.push_back({flag, &path, false, {}});
    return add(flag, path, text);
}

void CommandLine::check_path_flags() const {
    namespace fs = std::filesystem;
    std::vector<PathUse> uses;
    for (const auto& [flag, path, output, files] : path_flags_) {
        if (path->empty() && given(flag)) usage_error("{}: an empty name; name a path, or leave {} out", flag, flag);
        if (path->empty()) continue;
        if (output) {
            for (const std::string& file : files) uses.push_back({flag, *path + "/" + file, true});
            if (files.empty()) uses.push_back({flag, *path, true});
            continue;
        }
        std::error_code error;
        if (!fs::is_directory(*path, error)) uses.push_back({flag, *path, false});
        for (auto it = fs::recursive_directory_iterator(*path, error); it != fs::recursive_directory_iterator();
             it.increment(error))
            if (it->is_regular_file(error)) uses.push_back({flag, it->path().string(), false});
    }
    check_paths(uses);
}

LlamaConfig CommandLine::model_shape() const {
    const TrainOptions& o = options_;
    if (!o.load_hf.empty()) {
        for (const char* flag : {"--model", "--layers", "--hidden", "--heads", "--kv-heads", "--ffn", "--vocab"})
            if (given(flag))
                usage_error("{}: with --load-hf the shape is that of {}/config.json; leave {} out", flag, o.load_hf,
                            flag);
        return read_hf_config(o.load_hf);
    }
    LlamaConfig model = preset(model_);
    if (layers_) model.layers = *layers_;
    if (hidden_) model.hidden = *hidden_;
    if (heads_) model.heads = *heads_;
    if (heads_ && !kv_heads_) model.kv_heads = std::gcd(model.heads, model.kv_heads);
    if (kv_heads_) model.kv_heads = *kv_heads_;
    if (ffn_) model.ffn = *ffn_;
    if (vocab_) model.vocab = *vocab_;
    check_config(model);
    return model;
}

void CommandLine::check_batches(int64_t data_ranks) {
    TrainOptions& o = options_;
    if (o.micro_batch == 0) {
        if (o.global_batch % data_ranks != 0)
            usage_error("--global-batch {} does not divide over {} data-parallel ranks; {} would", o.global_batch,
                        data_ranks, (o.global_batch / data_ranks + 1) * data_ranks);
        record("--micro-batch", fmt::format("{}", o.micro_batch = o.global_batch / data_ranks));
    }
    const int64_t at_once = o.micro_batch * data_ranks;
    if (o.global_batch % at_once != 0)
        usage_error("--global-batch {} is not --micro-batch {} x ranks {} x accumulation; {} would be", o.global_batch,
                    o.micro_batch, data_ranks, (o.global_batch / at_once + 1) * at_once);
}

LrSchedule TrainOptions::schedule() const { return {lr, min_lr, warmup_steps, steps, lr_schedule}; }

Llama::Options TrainOptions::llama() const {
    const DType weights = dtype_of(dtype), grads = weights == DType::f64 ? weights : dtype_of(grad_dtype);
    return {weights, grads, device_kind(), recompute_of(recompute), init_std};
}

AdamW::Hyper TrainOptions::adamw() const { return {beta1, beta2, eps, weight_decay}; }

TrainOptions TrainOptions::without_files() const {
    TrainOptions o = *this;
    o.metrics = o.trace = o.memory_timeline = o.load_hf = o.save_hf = o.save_reference = "";
    o.eval_every = 0;
    return o;
}

Device TrainOptions::device_kind() const {
    if (dry_run) return Device::meta;
    if (device == "cuda") return Device::cuda;
    return device == "auto" && dtype != "fp64" && why_no_cuda().empty() ? Device::cuda : Device::cpu;
}

}  // namespace train70b
