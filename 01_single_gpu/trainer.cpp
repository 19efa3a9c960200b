#include "01_single_gpu/trainer.h"

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>

#include "01_single_gpu/core/cpu_setup.h"
#include "01_single_gpu/core/profile.h"

namespace train70b {

namespace {
double norm_of(const std::vector<double>& squares) {
    return std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
}
}  // namespace

Trainer::Trainer(const TrainOptions& options, Llama& model, const Dataset& data)
    : Trainer(options, model, data, nlohmann::ordered_json::object()) {}

Trainer::Trainer(const TrainOptions& options, Llama& model, const Dataset& data, const nlohmann::ordered_json& flags)
    : options_(options), model_(model), data_(data), progress_(options.steps) {
    if (options.eval_every > 0 && data.validation_samples() == 0)
        usage_error(
            "--eval-every {}: --data {} has no validation part; give --val-fraction, or a source of at least {} tokens",
            options.eval_every, options.data, 20 * (options.seq_len + 1));
    if (this_rank == 0 && !options.memory_timeline.empty())
        timeline_file_.emplace("--memory-timeline", options.memory_timeline);
    if (this_rank == 0 && !options.trace.empty()) trace_file_.emplace("--trace", options.trace);
    if (!options.save_hf.empty()) hf_.emplace(options.save_hf);
    if (!options.save_reference.empty()) reference_.emplace(options, saved_config(), flags);
    metrics_.open(options.metrics);
    if (timeline_file_) ledger().start_timeline();
    profile().events_on = trace_file_.has_value();

    const LlamaConfig& c = model.config;
    const std::string mfu = mfu_text(model.options.device, model.options.dtype);
    metrics_.write({{"event", "config"},
                    {"flags", flags},
                    {"model",
                     {{"name", c.name},
                      {"layers", c.layers},
                      {"hidden", c.hidden},
                      {"heads", c.heads},
                      {"kv_heads", c.kv_heads},
                      {"ffn", c.ffn},
                      {"vocab", c.vocab},
                      {"parameters", c.parameters()},
                      {"flops_per_token", flops_per_token(c, options.seq_len)}}},
                    {"device", name_of(model.options.device)},
                    {"cpu", {{"blas_core", blas_core()}, {"threads", cpu_threads()}}},
                    {"mfu", mfu.empty() ? nullptr : nlohmann::ordered_json(mfu)}});

    forward_backward = [this](int64_t step) {
        Tensor total;
        for (int64_t i = 0; i < micro_batches(); ++i) {
            Tape tape;
            ledger().phase(fmt::format("forward {}", i));
            Tensor loss = [&] {
                Span span("forward", "phase");
                return model_.forward(tape, micro_batch(step, i)).data;
            }();
            accumulate(total, loss);
            ledger().phase(fmt::format("backward {}", i));
            Span span("backward", "phase");
            tape.backward();
        }
        return total;
    };
    forward_only = [this](const Batch& batch) {
        Tape tape{.recording = false};
        return model_.forward(tape, batch).data;
    };
    gradient_norm = [this] { return norm_of(squares(model_.params(), Which::grad)); };
    parameter_norm = [this] { return norm_of(squares(model_.params(), Which::data)); };
    make_optimizer = AdamW::maker(options.adamw());
    gradient_parts = [](const Param& param) { return std::vector<Tensor>{param.grad}; };
    whole = whole_on_one_rank(model_);
    if (reference_)
        after_gradients = [this](int64_t step) {
            if (step == 1) write([this] { reference_->gradients(whole); });
        };
    memory_per_rank = [](const MemoryPeak& peak) { return nlohmann::ordered_json::array({to_json(peak)}); };
}

Batch Trainer::make_batch(const std::vector<std::vector<int32_t>>& samples, double target_tokens) const {
    const std::vector<Stretch> stretches = tokens.empty() ? std::vector<Stretch>{{0, options_.seq_len}} : tokens;
    std::vector<int32_t> inputs, targets, positions;
    for (const auto [begin, count] : stretches)
        for (const std::vector<int32_t>& sample : samples)
            for (int64_t t = begin; t < begin + count; ++t) {
                inputs.push_back(sample[size_t(t)]);
                targets.push_back(sample[size_t(t) + 1]);
                positions.push_back(static_cast<int32_t>(t));
            }
    const int64_t sequences = int64_t(samples.size()), rows = int64_t(inputs.size());
    const auto on_device = [&](const std::vector<int32_t>& values) {
        return upload(values, {rows}, model_.options.device);
    };
    return {sequences,          rows / sequences,     on_device(inputs),
            on_device(targets), on_device(positions), 1.0 / target_tokens};
}

// Sample i of a step is number (step - 1) * global + i of the stream: micro-batch m of rank r holds the micro_batch
// samples from (m * ranks + r) * micro_batch on, so that any division of the global batch trains on the same tokens.
Batch Trainer::micro_batch(int64_t step, int64_t index) {
    const double begin = now_seconds();
    std::vector<std::vector<int32_t>> samples;
    const int64_t first = (step - 1) * options_.global_batch + (index * data_ranks + data_rank) * options_.micro_batch;
    for (int64_t i = 0; i < options_.micro_batch; ++i) samples.push_back(data_.sample(options_.seed, first + i));
    Batch batch = make_batch(samples, double(options_.global_batch) * double(options_.seq_len));
    data_seconds_ += now_seconds() - begin;
    return batch;
}

void Trainer::write(const std::function<void()>& files) { writing ? writing(files) : files(); }

StepReport Trainer::step(int64_t number) {
    if (start_step) start_step();
    const double begin = now_seconds();
    StepReport report{.step = number, .lr = options_.schedule().at(number)};
    data_seconds_ = 0;
    ledger().reset_peak();
    model_.zero_grads();
    Tensor loss = forward_backward(number);
    if (reduce_gradients) {
        Span span("reduce_gradients", "phase");
        reduce_gradients();
    }
    if (after_gradients) after_gradients(number);
    ledger().phase("update");
    Span span("update", "phase");
    report.loss = read(loss)[0];
    loss = Tensor();
    if (sum_over_ranks) report.loss = sum_over_ranks(report.loss);
    report.grad_norm = gradient_norm();
    check_finite(report);
    const double clip = options_.clip > 0 ? std::min(1.0, options_.clip / (report.grad_norm + 1e-6)) : 1.0;
    update(report.lr, clip);
    synchronize(model_.options.device);

    report.step_s = now_seconds() - begin;
    report.data_s = data_seconds_;
    report.tokens_per_s = double(options_.global_batch) * double(options_.seq_len) / report.step_s;
    if (const auto peak = peak_flops(model_.options.device, model_.options.dtype))
        report.mfu = report.tokens_per_s * flops_per_token(model_.config, options_.seq_len) / (*peak * double(ranks));
    report.memory = ledger().now();
    report.peak = ledger().peak();
    run_peak_.merge(report.peak);
    if (finish_report) finish_report(report);
    if (!options_.metrics.empty()) report.param_norm = parameter_norm();
    return report;
}

void Trainer::check_finite(const StepReport& report) {
    if (std::isfinite(report.loss) && std::isfinite(report.grad_norm)) return;
    const std::vector<Param*> params = model_.params();
    std::string culprit;
    for (Which which : {Which::data, Which::grad}) {
        const std::vector<double> sums = squares(params, which);
        for (size_t i = 0; i < sums.size(); ++i)
            if (!std::isfinite(sums[i]) && culprit.empty())
                culprit = params[i]->name + (which == Which::grad ? " (its gradient)" : "");
    }
    throw std::runtime_error(
        fmt::format("step {}: loss {}, gradient norm {}; first non-finite parameter: {}; a lower --lr or a longer "
                    "--warmup-steps may help",
                    report.step, report.loss, report.grad_norm, culprit.empty() ? "none of this rank's" : culprit));
}

// In rounds of one batch per data rank. A rank for which a round has nothing left computes its first batch once more
// and counts it as nothing, because a forward pass may be a matter of all ranks (chapter 03).
double Trainer::evaluate() {
    const int64_t samples = data_.validation_samples(), at_once = options_.micro_batch;
    Tensor total;
    for (int64_t round = 0; round < samples; round += at_once * data_ranks) {
        const int64_t begin = round + data_rank * at_once;
        const int64_t count = std::clamp<int64_t>(samples - begin, 0, at_once);
        std::vector<std::vector<int32_t>> part;
        for (int64_t i = 0; i < count; ++i) part.push_back(data_.validation_sample(begin + i));
        if (part.empty()) part.push_back(data_.validation_sample(0));
        Batch batch = make_batch(part, double(samples) * double(options_.seq_len));
        if (count == 0) batch.loss_scale = 0;
        accumulate(total, forward_only(batch));
    }
    const double loss = read(total)[0];
    return sum_over_ranks ? sum_over_ranks(loss) : loss;
}

void Trainer::run() {
    if (begin) begin();
    if (!update) {
        optimizer_ = make_optimizer(whole_segments(model_.params()), Memory::optimizer);
        update = [this](double lr, double grad_scale) { optimizer_->step(lr, grad_scale); };
    }
    if (reference_) write([this] { reference_->initial_weights(whole); });
    const double start = now_seconds();
    StepReport last;
    for (int64_t number = 1; number <= options_.steps; ++number) {
        last = step(number);
        progress_.step(last);
        metrics_.write(to_json(last, model_.options.dtype));
        if (reference_) reference_->step(last, samples(number));
        if (reference_ && number == 1) write([this] { reference_->after_step_1(whole); });
        if (options_.eval_every > 0 && (number % options_.eval_every == 0 || number == options_.steps)) {
            const double loss = evaluate();
            progress_.line(
                fmt::format("          validation loss {:.4f} over {} sequences", loss, data_.validation_samples()));
            metrics_.write(
                {{"event", "eval"}, {"step", number}, {"loss", significant_digits(loss, model_.options.dtype)}});
        }
    }
    const double seconds = now_seconds() - start;
    if (reference_) reference_->finish();
    if (hf_) write([this] { hf_->save(saved_config(), model_.options.dtype, whole); });
    finish(last, seconds);
}

LlamaConfig Trainer::saved_config() const {
    LlamaConfig config = model_.config;
    if (config.context == 0) config.context = options_.seq_len;
    return config;
}

std::vector<std::vector<int32_t>> Trainer::samples(int64_t step) const {
    std::vector<std::vector<int32_t>> list;
    for (int64_t i = 0; i < options_.global_batch; ++i)
        list.push_back(data_.sample(options_.seed, (step - 1) * options_.global_batch + i));
    return list;
}

void Trainer::finish(const StepReport& last, double seconds) {
    const double tokens = double(options_.steps) * double(options_.global_batch) * double(options_.seq_len);
    metrics_.write(
        {{"event", "summary"},
         {"steps", options_.steps},
         {"loss",
          options_.steps ? nlohmann::ordered_json(significant_digits(last.loss, model_.options.dtype)) : nullptr},
         {"seconds", significant_digits(seconds)},
         {"tokens_per_s", significant_digits(seconds > 0 ? tokens / seconds : 0)},
         {"memory_per_rank", memory_per_rank(run_peak_)}});
    if (timeline_file_) {
        timeline_file_->write(ledger().timeline_csv());
        timeline_file_->commit();
    }
    if (trace_file_) {
        trace_file_->write(profile().chrome_trace());
        trace_file_->commit();
    }
}

namespace {
// Usage error for a model or a batch that no division over the ranks makes fit into this machine's memory, before any
// of it is allocated. Least bytes: what is held once by all ranks together, and a block's input of each token.
void check_memory(const TrainOptions& o, const nlohmann::ordered_json& flags) {
    const auto flag = [&](const char* name) { return flags.is_object() ? flags.value(name, std::string()) : ""; };
    if (o.device_kind() != Device::cpu || flag("comm") == "fake") return;  // a fake world holds one rank's part
    const auto number = [](const char* name) {
        const char* value = std::getenv(name);
        return std::max(1.0, value ? std::atof(value) : 1);
    };
    if (std::getenv("PMIX_RANK") && !std::getenv("OMPI_COMM_WORLD_SIZE")) return;  // how many ranks is not known yet
    const double ranks = number("OMPI_COMM_WORLD_SIZE"), nodes = ranks / number("OMPI_COMM_WORLD_LOCAL_SIZE");
    const double machine = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGE_SIZE));
    const Llama::Options types = o.llama();
    const double weight = double(size_of(types.dtype)), state = flag("optimizer") == "adamw8bit" ? 2 : 8;
    const double states = double(o.model.parameters()) * (weight + double(size_of(types.grad_dtype)) + state) / nodes;
    if (states > machine) {
        std::string what = o.load_hf.empty() ? "--model " + o.model.name : "--load-hf " + o.load_hf;
        for (const char* name : {"layers", "hidden", "heads", "kv-heads", "ffn", "vocab"})
            if (!flag(name).empty()) what += fmt::format(" --{} {}", name, flag(name));
        usage_error(
            "{}: weights, gradients and optimizer states take at least {}; this machine has {}; a smaller model "
            "would fit, and 08_3d_full --dry-run computes the memory of any",
            what, human_bytes(states), human_bytes(machine));
    }
    const double inputs =
        double(o.micro_batch) * double(o.seq_len) * double(o.model.hidden) * double(o.model.layers) * weight / ranks;
    if (inputs > machine)
        usage_error(
            "--micro-batch {} of --seq-len {}: activations take at least {}; this machine has {}; a smaller "
            "--micro-batch or --seq-len would fit",
            o.micro_batch, o.seq_len, human_bytes(inputs), human_bytes(machine));
}

TrainOptions checked(const TrainOptions& options, const nlohmann::ordered_json& flags) {
    check_memory(options, flags);
    return options;
}
}  // namespace

TrainingRun::TrainingRun(const TrainOptions& options, const nlohmann::ordered_json& flags,
                         const std::optional<Stage>& stage)
    : options_(checked(options, flags)),
      weights_(options.load_hf.empty() ? std::nullopt : std::make_optional<HfWeights>(options.load_hf, options.model)),
      data(options.data, options.model.vocab, options.seq_len, options.val_fraction),
      model(options.model, options.llama(), stage.value_or(whole_model(options.model))),
      trainer(options, model, data, flags) {}

void TrainingRun::materialise() {
    const LlamaConfig& c = options_.model;
    const std::string kernels = model.options.device != Device::cpu
                                    ? ""
                                    : fmt::format(" (OpenBLAS {} kernels, {} thread{})", blas_core(), cpu_threads(),
                                                  cpu_threads() == 1 ? "" : "s");
    say("{}: {} parameters, {} blocks x {} hidden, {}/{} heads, vocabulary {}; {} on {}{}\n", c.name,
        human_count(double(c.parameters())), c.layers, c.hidden, c.heads, c.kv_heads, c.vocab, options_.dtype,
        name_of(model.options.device), kernels);
    say("data: {} tokens to train on; a step is {} sequences of {} = {} tokens, {} at a time\n", data.train_tokens(),
        options_.global_batch, options_.seq_len, options_.global_batch * options_.seq_len, options_.micro_batch);
    if (const std::string mfu = mfu_text(model.options.device, model.options.dtype); !mfu.empty()) say("{}\n", mfu);
    model.materialise(options_.seed);
    if (weights_)
        for (Unit* unit : model.units()) {
            const auto load = [&] { weights_->load(unit->params); };
            model.write_params ? model.write_params(*unit, load) : load();
        }
    weights_.reset();
}

}  // namespace train70b
