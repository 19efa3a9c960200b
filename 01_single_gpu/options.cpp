#include "01_single_gpu/options.h"

#include <cmath>
#include <limits>
#include <numeric>

#include "01_single_gpu/hf.h"

namespace train70b {

namespace {
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr const char* kDefaultData = "01_single_gpu/corpus.txt";

DType dtype_of(const std::string& name) { return name == "bf16" ? DType::bf16 : DType::f32; }

// Insertions, deletions and replacements between two words.
size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = std::exchange(row[0], i);
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row.back();
}

std::string nearest_flag(const CLI::App& app, const std::string& unknown) {
    std::string best = "--help";
    size_t distance = unknown.size();
    for (const CLI::Option* option : app.get_options()) {
        const std::string name = option->get_name();
        if (const size_t d = edit_distance(name, unknown); d < distance) distance = d, best = name;
    }
    return best;
}
}  // namespace

CLI::Validator whole_number_from(int64_t least) {
    return CLI::Validator(
        [least](std::string& text) {
            size_t used = 0;
            int64_t value = 0;
            try {
                value = std::stoll(text, &used);
            } catch (const std::exception&) { used = 0; }
            const bool octal = text.size() > 1 && text[0] == '0';  // read as such by some, so by none
            return used == text.size() && used > 0 && !octal && value >= least
                       ? std::string()
                       : fmt::format("{} is not possible; a whole number from {} on", text, least);
        },
        ">=" + std::to_string(least));
}

CLI::Validator real_number(double least, double most, bool least_allowed) {
    return CLI::Validator(
        [=](std::string& text) {
            char* end = nullptr;
            const double value = std::strtod(text.c_str(), &end);
            const bool inside =
                std::isfinite(value) && (least_allowed ? value >= least : value > least) && value <= most;
            if (!text.empty() && *end == '\0' && inside) return std::string();
            const std::string range = most < kInfinity ? fmt::format(" and at most {}", most) : "";
            return fmt::format("{} is not possible; a number {} {}{}", text, least_allowed ? "of at least" : "above",
                               least, range);
        },
        "");
}

CLI::Validator one_of(std::vector<std::string> names) {
    std::string list;
    for (const std::string& name : names) list += (list.empty() ? "" : "|") + name;
    return CLI::Validator(
        [names, list](std::string& text) {
            return std::find(names.begin(), names.end(), text) != names.end()
                       ? std::string()
                       : fmt::format("{} is unknown; one of {}", text, list);
        },
        list);
}

CLI::Option* add_switch(CLI::App& app, const std::string& flag, bool& value, const std::string& text) {
    return app
        .add_option_function<std::string>(
            flag, [&value](const std::string& word) { value = word == "on"; }, text)
        ->check(one_of({"on", "off"}))
        ->default_str(value ? "on" : "off");
}

CommandLine::CommandLine(const std::string& description, TrainOptions& o) : app(description), options_(o) {
    app.get_formatter()->column_width(34);
    const CLI::Validator count = whole_number_from(1), count0 = whole_number_from(0);
    const CLI::Validator positive = real_number(0, kInfinity, false), positive0 = real_number(0, kInfinity);

    app.add_option("--model", model_, "shape of the Llama")->check(one_of(preset_names()))->group("Model");
    app.add_option("--layers", layers_, "transformer blocks")->check(count)->group("Model");
    app.add_option("--hidden", hidden_, "width of the residual stream")->check(count)->group("Model");
    app.add_option("--heads", heads_, "query heads")->check(count)->group("Model");
    app.add_option("--kv-heads", kv_heads_, "key/value heads (grouped queries) [divides --heads]")
        ->check(count)
        ->group("Model");
    app.add_option("--ffn", ffn_, "inner width of the MLP")->check(count)->group("Model");
    app.add_option("--vocab", vocab_, "vocabulary (bytes: 256)")->check(count)->group("Model");
    app.add_option("--load-hf", o.load_hf, "DIR: shape and weights of a Hugging Face Llama")->group("Model");
    app.add_option("--init-std", o.init_std, "initial weights")->check(positive)->group("Model");
    app.add_option("--seed", o.seed, "of initial weights and batches")->check(count0)->group("Model");

    app.add_option("--data", o.data, fmt::format("text file, folder of text, or .bin shards [{}]", kDefaultData))
        ->group("Data");
    app.add_option("--seq-len", o.seq_len, "tokens of a sequence")->check(count)->group("Data");
    app.add_option("--micro-batch", o.micro_batch, "sequences at once per rank [global / ranks]")
        ->check(count)
        ->group("Data");
    app.add_option("--global-batch", o.global_batch, "sequences of one step")->check(count)->group("Data");
    app.add_option("--val-fraction", o.val_fraction, "held out [0.1 of a text, 0 of shards]")
        ->check(real_number(0, 0.9))
        ->group("Data");
    app.add_option("--eval-every", o.eval_every, "steps between validations; 0: never")->check(count0)->group("Data");

    app.add_option("--steps", o.steps, "optimizer steps")->check(count0)->group("Training");
    app.add_option("--lr", o.lr, "peak learning rate")->check(positive0)->group("Training");
    app.add_option("--min-lr", o.min_lr, "at the last step [lr / 10]")->check(positive0)->group("Training");
    app.add_option("--warmup-steps", o.warmup_steps, "step s has s / W of the peak")->check(count0)->group("Training");
    app.add_option("--lr-schedule", o.lr_schedule, "after the warm-up")
        ->check(one_of({"constant", "linear", "cosine", "wsd"}))
        ->group("Training");
    app.add_option("--weight-decay", o.weight_decay, "matrices only")->check(positive0)->group("Training");
    app.add_option("--beta1", o.beta1, "AdamW")->check(real_number(0, 0.999999))->group("Training");
    app.add_option("--beta2", o.beta2, "AdamW")->check(real_number(0, 0.999999))->group("Training");
    app.add_option("--eps", o.eps, "AdamW")->check(positive)->group("Training");
    app.add_option("--clip", o.clip, "global gradient norm; 0: off")->check(positive0)->group("Training");

    app.add_option("--dtype", o.dtype, "of weights and activations")
        ->check(one_of({"fp32", "bf16"}))
        ->group("Precision, memory");
    app.add_option("--grad-dtype", o.grad_dtype, "of gradients")
        ->check(one_of({"fp32", "bf16"}))
        ->group("Precision, memory");
    app.add_option("--recompute", o.recompute, "activations made again in the backward pass")
        ->check(one_of({"none", "selective", "full"}))
        ->group("Precision, memory");
    app.add_option("--device", o.device, "where to run")
        ->check(one_of({"auto", "cpu", "cuda"}))
        ->group("Precision, memory");

    app.add_option("--metrics", o.metrics, "FILE.jsonl: one line per step")->group("Output");
    app.add_option("--trace", o.trace, "FILE.json: Chrome trace events")->group("Output");
    app.add_option("--memory-timeline", o.memory_timeline, "FILE.csv: every allocation")->group("Output");
    app.add_option("--save-hf", o.save_hf, "DIR: the trained model in Hugging Face's format")->group("Output");
    app.add_option("--save-reference", o.save_reference, "DIR: the run for build/bin/compare")->group("Output");
    for (CLI::Option* option : app.get_options()) option->capture_default_str();
}

void CommandLine::parse(int argc, char** argv) {
    app.allow_extras();  // so that the unknown flag is ours to explain
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        if (this_rank == 0) fmt::print("{}", app.help());
        throw EarlyEnd();
    } catch (const CLI::ParseError& error) { usage_error("{}", error.what()); }
    if (const auto extras = app.remaining(); !extras.empty()) {
        if (extras[0].starts_with("-"))
            usage_error("{}: unknown flag; did you mean {}? (--help lists all)", extras[0],
                        nearest_flag(app, extras[0]));
        usage_error("{}: belongs to no flag; write --flag value (--help lists all)", extras[0]);
    }
    TrainOptions& o = options_;
    o.model = model_shape();
    if (o.min_lr < 0) o.min_lr = o.lr / 10;
    if (o.min_lr > o.lr) usage_error("--min-lr {} is above --lr {}; at most {} would work", o.min_lr, o.lr, o.lr);
    if (o.dtype == "fp32" && o.grad_dtype == "bf16")
        usage_error("--grad-dtype bf16: gradients may not be narrower than the weights; add --dtype bf16");
    if (o.device == "cuda" && !why_no_cuda().empty())
        usage_error("--device cuda: {}; --device cpu works here", why_no_cuda());
    if (o.data.empty()) o.data = repository_file(kDefaultData);
}

LlamaConfig CommandLine::model_shape() const {
    const TrainOptions& o = options_;
    if (!o.load_hf.empty()) {
        for (const char* flag : {"--model", "--layers", "--hidden", "--heads", "--kv-heads", "--ffn", "--vocab"})
            if (app.count(flag))
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
        o.micro_batch = o.global_batch / data_ranks;
    }
    const int64_t at_once = o.micro_batch * data_ranks;
    if (o.global_batch % at_once != 0)
        usage_error("--global-batch {} is not --micro-batch {} x ranks {} x accumulation; {} would be", o.global_batch,
                    o.micro_batch, data_ranks, (o.global_batch / at_once + 1) * at_once);
}

nlohmann::ordered_json CommandLine::flags() const {
    nlohmann::ordered_json json;
    for (const CLI::Option* option : app.get_options()) {
        if (option->get_name() == "--help") continue;
        json[option->get_name().substr(2)] = option->count() ? option->as<std::string>() : option->get_default_str();
    }
    return json;
}

LrSchedule TrainOptions::schedule() const { return {lr_shape_of(lr_schedule), lr, min_lr, warmup_steps, steps}; }

Llama::Options TrainOptions::llama() const {
    return {dtype_of(dtype), dtype_of(grad_dtype), device_kind(), recompute_of(recompute), init_std};
}

AdamW::Hyper TrainOptions::adamw() const { return {float(beta1), float(beta2), float(eps), float(weight_decay)}; }

TrainOptions TrainOptions::without_files() const {
    TrainOptions o = *this;
    o.metrics = o.trace = o.memory_timeline = o.load_hf = o.save_hf = o.save_reference = "";
    o.eval_every = 0;
    return o;
}

Device TrainOptions::device_kind() const {
    if (dry_run) return Device::meta;
    if (device == "cuda") return Device::cuda;
    return device == "auto" && why_no_cuda().empty() ? Device::cuda : Device::cpu;
}

}  // namespace train70b
