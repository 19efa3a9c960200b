#include "01_single_gpu/trainer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "01_single_gpu/core/cpu_setup.h"
#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/core/version.h"
#include "01_single_gpu/run/generate.h"
#include "01_single_gpu/run/non_finite.h"

namespace train70b {

Trainer::Trainer(const TrainOptions& options, Llama& model, const Dataset& data)
    : Trainer(options, model, data, nlohmann::ordered_json::object()) {}

Trainer::Trainer(const TrainOptions& options, Llama& model, const Dataset& data, const nlohmann::ordered_json& flags)
    : store(&local_store_),
      loop(&accumulate_),
      runtime(&one_rank_),
      batches(options, data),
      options_(options),
      model_(model),
      data_(data),
      local_store_(model, AdamW::maker(options.adamw())),
      accumulate_(model),
      progress_(options.steps) {
    check_evaluation(options, data);
    if (!options.prompt.empty() && !data.is_text())
        usage_error(
            "--prompt: the tokens of --data {} are not bytes of text (leave it out, and the prompt is the "
            "beginning of the held-out data)",
            options.data);
    if (this_rank == 0 && !options.memory_timeline.empty())
        timeline_file_.emplace("--memory-timeline", options.memory_timeline);
    if (this_rank == 0 && !options.trace.empty()) trace_file_.emplace("--trace", options.trace);
    if (!options.save_hf.empty()) hf_.emplace(options.save_hf);
    if (!options.save_reference.empty()) reference_.emplace(options, saved_config(), flags);
    metrics_.open(options.metrics, options.continues);
    if (timeline_file_) ledger().start_timeline();
    profile().events_on = !options.trace.empty();

    const LlamaConfig& c = model.config;
    const std::string mfu = mfu_text(model.options.device, model.options.dtype, options.document_token.has_value());
    metrics_.write({{"event", "config"},
                    {"version", {{"commit", build_commit()}}},
                    {"flags", flags},
                    {"model",
                     {{"name", c.name},
                      {"layers", c.layers},
                      {"hidden", c.hidden},
                      {"heads", c.heads},
                      {"kv_heads", c.kv_heads},
                      {"head_dim", c.head_dim()},
                      {"qkv_bias", c.qkv_bias},
                      {"qk_norm", c.qk_norm},
                      {"tied", c.tied},
                      {"ffn", c.ffn},
                      {"vocab", c.vocab},
                      {"parameters", c.parameters()},
                      {"flops_per_token", flops_per_token(c, options.seq_len)}}},
                    {"device", name_of(model.options.device)},
                    {"cpu", {{"blas_core", blas_core()}, {"threads", cpu_threads()}}},
                    {"mfu", mfu.empty() ? nullptr : nlohmann::ordered_json(mfu)}});
}

// ---- one step -------------------------------------------------------------------------------------------------------

// Tensor-parallel ranks all have the full loss of their batch.
std::vector<double> Trainer::sum_loss(const Tensor& mine, std::vector<double>& votes) const {
    const std::vector<double> numbers = read(mine);
    votes.insert(votes.end(), numbers.begin(), numbers.end());
    votes = groups.pp->sum(groups.dp_cp->sum(votes));
    const auto first = votes.end() - int64_t(numbers.size());
    const std::vector<double> loss(first, votes.end());
    votes.erase(first, votes.end());
    return loss;
}

double Trainer::norm(Which which, std::vector<double>& votes) const {
    votes.push_back(store->squares(which));
    votes = groups.tp->sum(votes);
    const double squares = votes.back();
    votes.pop_back();
    return std::sqrt(groups.pp->sum(squares));
}

double Trainer::norm(Which which) const {
    std::vector<double> none;
    return norm(which, none);
}

Batch Trainer::micro_batch(int64_t step, int64_t index) {
    Batch batch = batches.micro_batch(*groups.dp, step, index);
    document_pairs_[index] = batch.document_pairs;
    return batch;
}

static bool is_finite(const StepReport& r) { return std::isfinite(r.loss) && std::isfinite(r.grad_norm); }

StepReport Trainer::step(int64_t number) {
    runtime->begin_step();
    if (number > 1)
        for (StepState* state : step_states) state->next_step();
    const double begin = now_seconds();
    StepReport report{.step = number, .lr = options_.schedule().at(number)};
    batches.take_seconds();
    document_pairs_.clear();
    ledger().reset_peak();
    for (RunControl* control : controls) control->before_step(number);
    // tag::step[]
    const double targets = batches.begin_step(*groups.dp, *groups.dp_cp, number);
    store->begin_step(micro_batches(number));
    Tensor loss =
        loop->forward_backward({micro_batches(number), [&](int64_t index) { return micro_batch(number, index); }});
    {
        Span span("reduce_gradients", "phase");
        store->finish_gradients();
        sum_partial_gradients(model_, *store);
    }
    if (reference_ && number == 1)
        runtime->write_files(
            [&] { reference_->gradients([&](const Param& p, Which which) { return full(p, which); }); });
    if (observer) observer->gradients_ready(number);
    for (RunControl* control : controls) control->gradients_ready(number);
    ledger().phase("update");
    Span span("update", "phase");
    collect_votes(number);
    const std::vector<double> losses = sum_loss(loss, votes_);
    report.loss = losses[0];
    if (losses.size() > 1) report.z_loss = losses[1];
    const double my_loss = read(loss)[0];
    loss = Tensor();
    report.grad_norm = norm(Which::grad, votes_);
    const double clip = options_.clip > 0 ? std::min(1.0, options_.clip / (report.grad_norm + 1e-6)) : 1.0;
    if (is_finite(report) && targets > 0) store->update(number, report.lr, clip);
    // end::step[]
    synchronize(model_.options.device);

    report.step_s = now_seconds() - begin;
    report.data_s = batches.take_seconds();
    if (batches.ignores_targets()) report.targets = int64_t(targets);
    const StepSizes& sizes = batches.sizes;
    const double tokens = double(sizes.tokens(number));
    report.tokens_per_s = tokens / report.step_s;
    if (sizes.vary()) report.size = {{sizes.sequences(number), sizes.seq_len(number)}};
    report.memory = ledger().now();
    report.peak = ledger().peak();
    run_peak_.merge(report.peak);
    runtime->end_step(report);
    compare_ranks(report, my_loss);
    const double keys = report.attention_pairs ? *report.attention_pairs / tokens : double(sizes.seq_len(number)) / 2;
    report.flops = flops_per_token(model_.config, 2 * keys) * tokens;
    if (const auto peak = peak_flops(model_.options.device, model_.options.dtype))
        report.mfu = report.flops / (report.step_s * *peak * double(runtime->ranks()));
    if (!options_.metrics.empty()) report.param_norm = norm(Which::data);
    each_with_votes([&](RunControl& control, const std::vector<double>& sums) { control.complete(report, sums); });
    if (observer) observer->step_done(report);
    return report;
}

void Trainer::collect_votes(int64_t step) {
    votes_.clear();
    vote_counts_.clear();
    for (RunControl* control : controls) {
        const std::vector<double> mine = control->votes(step);
        votes_.insert(votes_.end(), mine.begin(), mine.end());
        vote_counts_.push_back(mine.size());
    }
}

// The ranks that update together have the same norm. Others may not: a fault in one copy of the model.
void Trainer::compare_ranks(StepReport& report, double my_loss) {
    const Groups peers = runtime->has_peers() ? groups : Groups();
    std::vector<double> mine = {report.step_s, report.waited_s, is_finite(report) ? 1.0 : 0.0};
    if (options_.document_token) {
        mine.push_back(0);
        for (const auto& [index, pairs] : document_pairs_) mine.back() += pairs;
    }
    const std::vector<double> all = gather(peers, mine);
    std::vector<double> step_s, waited_s;
    double pairs = 0;
    bool finite = true;
    for (size_t i = 0; i < all.size(); i += mine.size()) {
        step_s.push_back(all[i]);
        waited_s.push_back(all[i + 1]);
        finite = finite && all[i + 2] == 1;
        if (options_.document_token) pairs += all[i + 3];
    }
    // Every rank counts its sequences whole: those of one data-parallel rank are counted once by each of its ranks.
    if (options_.document_token) report.attention_pairs = pairs * double(groups.dp->size()) / double(step_s.size());
    if (step_s.size() > 1) report.straggler = find_straggler(step_s, waited_s);
    if (finite) return;
    const NonFinite first = find_non_finite(model_, *store, peers, report, my_loss);
    record(first.alarm(report.step));
    throw CommonError(fmt::format("step {}: {} (try a lower --lr or more --warmup-steps)", report.step, first.text()));
}

std::vector<std::optional<double>> Trainer::evaluate_sources() {
    std::vector<std::optional<double>> losses(data_.parts().size());
    for (size_t part = 0; part < losses.size(); ++part) {
        Tensor total;
        int64_t targets = 0;
        for (int64_t round = 0; round < batches.validation_rounds(*groups.dp, part); ++round)
            accumulate(total, loop->forward_only(batches.validation_batch(*groups.dp, part, round, targets)));
        if (!total) continue;
        std::vector<double> counted;  // of all ranks: a stage of a pipeline counts the same as any other
        if (batches.ignores_targets()) counted = {double(targets)};
        const double loss = sum_loss(total, counted)[0];
        const double tokens = batches.validation_tokens(part);
        const double all = counted.empty() ? tokens : counted[0] / double(groups.pp->size());
        if (all > 0) losses[part] = loss * (tokens / all);
    }
    return losses;
}

double Trainer::mean_of_sources(const std::vector<std::optional<double>>& losses) const {
    if (losses.size() == 1 && losses[0]) return *losses[0];
    double sum = 0, weights = 0, by_samples = 0, samples = 0;
    for (size_t i = 0; i < losses.size(); ++i) {
        if (!losses[i]) continue;
        const Dataset::Part& part = data_.parts()[i];
        sum += part.weight * *losses[i];
        weights += part.weight;
        by_samples += double(part.source->validation_samples()) * *losses[i];
        samples += double(part.source->validation_samples());
    }
    if (samples == 0) return std::numeric_limits<double>::quiet_NaN();  // no source has a target
    return weights > 0 ? sum / weights : by_samples / samples;
}

double Trainer::evaluate() { return mean_of_sources(evaluate_sources()); }

void Trainer::write_evaluation(int64_t step) {
    const std::vector<std::optional<double>> losses = evaluate_sources();
    const double loss = mean_of_sources(losses);
    const DType dtype = model_.options.dtype;
    nlohmann::ordered_json event = {{"event", "eval"}, {"step", step}, {"loss", significant_digits(loss, dtype)}};
    std::string text;
    for (size_t i = 0; data_.is_mixture() && i < losses.size(); ++i) {
        const std::string& name = data_.parts()[i].name;
        if (!losses[i] && data_.parts()[i].source->validation_samples() > 0) {
            text += fmt::format("{} {} no targets", text.empty() ? ":" : ",", name);
            event["sources"][name] = nullptr;
        }
        if (!losses[i]) continue;
        text += fmt::format("{} {} {:.4f}", text.empty() ? ":" : ",", name, *losses[i]);
        event["sources"][name] = significant_digits(*losses[i], dtype);
    }
    const bool known = std::any_of(losses.begin(), losses.end(), [](const auto& of_source) { return bool(of_source); });
    const int64_t sequences = data_.validation_samples();
    progress_.line(
        known ? fmt::format("          validation loss {:.4f} over {} sequences{}", loss, sequences, text)
              : fmt::format("          no validation loss: all targets of the {} sequences are ignored", sequences));
    metrics_.write(event);
}

std::vector<int32_t> Trainer::generate(int64_t count) {
    std::vector<int32_t> prompt;
    for (const char c : options_.prompt) prompt.push_back(static_cast<unsigned char>(c));
    if (prompt.empty()) prompt = data_.opening(16);
    const Generator generator{model_, *loop, groups, batches, options_.seq_len};
    return generator.generate(std::move(prompt), count, options_.seed);
}

void Trainer::print_sample(int64_t step) {
    constexpr int64_t kTokens = 64;
    const std::vector<int32_t> tokens = generate(kTokens);
    progress_.line("          sample: " + one_line(printable(tokens, data_.is_text())));
    metrics_.write({{"event", "sample"}, {"step", step}, {"tokens", tokens}});
}

// ---- the run --------------------------------------------------------------------------------------------------------

void Trainer::start() { store->weights_changed(); }

void Trainer::run() {
    start();
    if (!options_.trace.empty()) runtime->start_trace();
    const auto full_of = [this](const Param& param, Which which) { return full(param, which); };
    if (reference_) runtime->write_files([&] { reference_->initial_weights(full_of); });
    int64_t first = 1, last_number = options_.steps;
    for (RunControl* control : controls) {
        first = std::max(first, control->first_step());
        last_number = std::min(last_number, control->last_step());
    }
    int64_t number = first;
    // A text is small and in the page cache: a thread that is woken in every step would cost more than it saves.
    if (!options_.dry_run && !data_.is_text()) batches.start_reading(*groups.dp, first, last_number);
    const double start = now_seconds();
    StepReport last;
    for (bool goes_on = true; goes_on && number <= last_number; ++number) {
        last = step(number);
        progress_.step(last);
        metrics_.write(to_json(last, model_.options.dtype));
        if (last.targets == 0)
            note(fmt::format("          step {}: all targets of the global batch are ignored: no update", number), {});
        if (reference_) reference_->step(last, batches.samples(number), batches.ignores_targets());
        if (reference_ && number == 1) runtime->write_files([&] { reference_->after_step_1(full_of); });
        if (options_.eval_every > 0 && (number % options_.eval_every == 0 || number == last_number))
            write_evaluation(number);
        if (options_.sample_every > 0 && (number % options_.sample_every == 0 || number == last_number))
            print_sample(number);
        goes_on = after_step(last);
    }
    batches.stop_reading();
    for (RunControl* control : controls) control->finish();
    const double seconds = now_seconds() - start;
    if (reference_) reference_->finish();
    if (hf_)
        runtime->write_files([&] {
            hf_->save(saved_config(), model_.options.dtype,
                      [this](const Param& param, Which which) { return saved(param, full(param, which)); });
        });
    finish(last, first, number - 1, seconds);
}

void Trainer::each_with_votes(
    const std::function<void(RunControl& control, const std::vector<double>& sums)>& body) const {
    auto vote = votes_.begin();
    for (size_t i = 0; i < controls.size(); ++i) {
        const auto end = vote + int64_t(vote_counts_[i]);
        body(*controls[i], {vote, end});
        vote = end;
    }
}

bool Trainer::after_step(const StepReport& report) {
    bool goes_on = true;
    each_with_votes([&](RunControl& control, const std::vector<double>& sums) {
        goes_on = control.after_step(report, sums) && goes_on;
    });
    return goes_on;
}

LlamaConfig Trainer::saved_config() const {
    LlamaConfig config = model_.config;
    if (config.context == 0) config.context = options_.seq_len;
    return config;
}

// Hugging Face's Llama has no multiplier of the logits: in its files the final norm's weight has muP's.
Tensor Trainer::saved(const Param& param, const Tensor& full) const {
    if (!full || param.name != "model.norm.weight" || model_.loss_options.logit_scale == 1) return full;
    Tensor scaled = Tensor::like(full, Memory::workspace);
    copy(scaled, full);
    scale(scaled, model_.loss_options.logit_scale);
    return scaled;
}

// "rank 3 (tp 1, dp 0, pp 1)"
std::string Trainer::rank_title() const {
    std::string where;
    for (const auto& [name, group] :
         {std::pair("tp", groups.tp), {"cp", groups.cp}, {"dp", groups.dp}, {"pp", groups.pp}})
        if (group->size() > 1) where += fmt::format("{}{} {}", where.empty() ? "" : ", ", name, group->rank());
    return fmt::format("rank {}{}", this_rank, where.empty() ? "" : " (" + where + ")");
}

void Trainer::note(const std::string& line, const nlohmann::ordered_json& event) {
    progress_.line(line);
    if (!event.is_null()) record(event);
}

void Trainer::record(const nlohmann::ordered_json& event) {
    metrics_.write(event);
    for (RunControl* control : controls) control->recorded(event);
}

void Trainer::finish(const StepReport& last, int64_t first_step, int64_t last_step, double seconds) {
    const int64_t steps = last_step - first_step + 1;
    const double tokens = double(batches.sizes.tokens_until(last_step + 1) - batches.sizes.tokens_until(first_step));
    nlohmann::ordered_json summary = {
        {"event", "summary"},
        {"steps", last_step},
        {"loss", steps ? nlohmann::ordered_json(significant_digits(last.loss, model_.options.dtype)) : nullptr},
        {"seconds", significant_digits(seconds)},
        {"tokens_per_s", significant_digits(seconds > 0 ? tokens / seconds : 0)}};
    if (last.noise_scale) summary["noise_scale"] = number_or_null(*last.noise_scale);
    summary["memory_per_rank"] = runtime->memory_per_rank(run_peak_);
    metrics_.write(summary);
    if (timeline_file_) {
        timeline_file_->write(ledger().timeline_csv());
        timeline_file_->commit();
    }
    if (!options_.trace.empty()) runtime->write_trace(trace_file_ ? &*trace_file_ : nullptr, rank_title());
    if (trace_file_) trace_file_->commit();
}

}  // namespace train70b
