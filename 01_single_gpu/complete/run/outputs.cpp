#include "01_single_gpu/complete/run/outputs.h"

#include <nlohmann/json.hpp>

#include "01_single_gpu/core/cpu_threads.h"
#include "01_single_gpu/core/version.h"

namespace train70b {

using nlohmann::ordered_json;

// ---- trace and timeline ---------------------------------------------------------------------------------------------

TraceFile::TraceFile(Trainer& trainer) : trainer_(trainer) {
    if (this_rank == 0) file_.emplace("--trace", trainer.options.trace, kTraceTail);
    profile().events_on = true;
}

// "rank 3 (tp 1, dp 0, pp 1)"
std::string TraceFile::title() const {
    const Groups& groups = trainer_.groups;
    std::string where;
    for (const auto& [name, group] :
         {std::pair("tp", groups.tp), {"cp", groups.cp}, {"dp", groups.dp}, {"pp", groups.pp}})
        if (group->size() > 1) where += fmt::format("{}{} {}", where.empty() ? "" : ", ", name, group->rank());
    return fmt::format("rank {}{}", this_rank, where.empty() ? "" : " (" + where + ")");
}

int64_t TraceFile::first_step() {
    trainer_.runtime->start_trace();
    if (file_) file_->write(trace_head() + trace_title(this_rank, title()));
    return 1;
}

void TraceFile::put() {
    const std::vector<Profile::Event> events = std::exchange(profile().events, {});
    if (this_rank > 0) events_.write(events);
    if (file_ && file_->begun()) file_->write(trace_text(events, this_rank, {}));
    last_ = now_seconds();
}

bool TraceFile::after_step(const StepReport&) {
    if (profile().events.size() > kMostEvents || now_seconds() - last_ > 1) put();
    return true;
}

void TraceFile::finish() {
    put();
    trainer_.runtime->merge_traces(file_ ? &*file_ : nullptr, events_, title());
    file_.reset();
    profile().events_on = false;
}

TimelineFile::TimelineFile(const std::string& path) {
    if (this_rank != 0) return;
    file_.emplace("--memory-timeline", path);
    ledger().start_timeline();
}

int64_t TimelineFile::first_step() {
    if (file_) file_->write(ledger().take_timeline());
    return 1;
}

void TimelineFile::put() {
    if (file_ && file_->begun()) file_->write(ledger().take_timeline());
}

void TimelineFile::finish() {
    put();
    file_.reset();
}

// ---- weights --------------------------------------------------------------------------------------------------------

namespace {
LlamaConfig saved_config(const Trainer& trainer) {
    LlamaConfig config = trainer.model.config;
    config.context = std::max(config.context, trainer.options.seq_len);
    return config;
}

// Hugging Face's Llama has no multiplier of the logits: in its files the final norm's weight has muP's.
Tensor with_logit_scale(const Param& param, const Tensor& full, double logit_scale) {
    if (!full || param.name != "model.norm.weight" || logit_scale == 1) return full;
    Tensor scaled = Tensor::like(full, Memory::workspace);
    copy(scaled, full);
    scale(scaled, logit_scale);
    return scaled;
}
}  // namespace

HfExport::HfExport(Trainer& trainer) : trainer_(trainer), saver_(trainer.options.save_hf, trainer.options.load_hf) {}

void HfExport::finish() {
    const Llama& model = trainer_.model;
    const auto full = [&](const Param& param, Which which) {
        return with_logit_scale(param, trainer_.full(param, which), model.loss_options.logit_scale);
    };
    trainer_.runtime->write_files([&] { saver_.save(saved_config(trainer_), model.options.dtype, full); });
}

ReferenceRun::ReferenceRun(Trainer& trainer, const ordered_json& flags)
    : trainer_(trainer),
      writer_(trainer.options, saved_config(trainer), flags),
      full_([&trainer](const Param& param, Which which) { return trainer.full(param, which); }) {}

int64_t ReferenceRun::first_step() {
    trainer_.runtime->write_files([&] { writer_.initial_weights(full_); });
    return 1;
}

void ReferenceRun::gradients_ready(int64_t step) {
    if (step == 1) trainer_.runtime->write_files([&] { writer_.gradients(full_); });
}

bool ReferenceRun::after_step(const StepReport& report) {
    const Batches& batches = trainer_.batches;
    writer_.step(report, batches.global_batch(report.step), batches.ignores_targets());
    if (report.step == 1) trainer_.runtime->write_files([&] { writer_.after_step_1(full_); });
    return true;
}

void ReferenceRun::finish() { writer_.finish(); }

// ---- metrics --------------------------------------------------------------------------------------------------------

MetricsFile::MetricsFile(Trainer& trainer, const ordered_json& flags) : trainer_(trainer) {
    const TrainOptions& o = trainer.options;
    file_.open(o.metrics, o.append_metrics);
    const LlamaConfig& c = trainer.model.config;
    const Llama::Options& model = trainer.model.options;
    const std::string mfu = mfu_text(model.device, model.dtype, o.masks_keys());
    file_.write({{"event", "config"},
                 {"version", {{"commit", build_commit()}}},
                 {"flags", flags},
                 {"model",
                  {{"name", c.name},
                   {"layers", c.layers},
                   {"hidden", c.hidden},
                   {"heads", c.heads},
                   {"kv_heads", c.kv_heads},
                   {"head_dim", c.head_dim()},
                   {"kv_lora_rank", c.latent.kv_rank},
                   {"q_lora_rank", c.latent.q_rank},
                   {"qk_rope_head_dim", c.latent.rope_dim},
                   {"qkv_bias", c.qkv_bias},
                   {"qk_norm", c.qk_norm},
                   {"window", c.window},
                   {"window_share", c.window_share()},
                   {"sinks", c.sinks},
                   {"tied", c.tied},
                   {"mtp", c.multi_token},
                   {"ffn", c.ffn},
                   {"vocab", c.vocab},
                   {"experts", c.experts.count},
                   {"parameters", c.parameters()},
                   {"active_parameters", c.active_parameters()},
                   {"flops_per_token", flops_per_token(c, c.attended(double(o.seq_len)))}}},
                 {"device", name_of(model.device)},
                 {"cpu", {{"blas_core", cpu::product_kernels(model.dtype)}, {"threads", cpu_threads()}}},
                 {"mfu", mfu.empty() ? nullptr : ordered_json(mfu)}});
}

void MetricsFile::before_step(int64_t step) {
    if (first_step_) return;
    first_step_ = step;
    begin_ = now_seconds();
}

void MetricsFile::complete(StepReport& report) { report.param_norm = trainer_.norm(Which::data); }

bool MetricsFile::after_step(const StepReport& report) {
    file_.write(to_json(report, trainer_.model.options.dtype));
    skipped_ += report.skipped.value_or(false);
    last_ = report;
    return true;
}

void MetricsFile::finish() {
    const bool any = last_.step > 0;
    const double seconds = any ? now_seconds() - begin_ : 0;
    const StepSizes& sizes = trainer_.batches.sizes();
    const double tokens = any ? double(sizes.tokens_until(last_.step + 1) - sizes.tokens_until(*first_step_)) : 0;
    ordered_json summary = {
        {"event", "summary"},
        {"steps", trainer_.steps_done()},
        {"loss", any ? ordered_json(significant_digits(last_.loss, trainer_.model.options.dtype)) : nullptr},
        {"seconds", significant_digits(seconds)},
        {"tokens_per_s", significant_digits(seconds > 0 ? tokens / seconds : 0)}};
    if (trainer_.options.skip_step || trainer_.options.fp16()) summary["skipped"] = skipped_;
    if (last_.noise_scale) summary["noise_scale"] = number_or_null(*last_.noise_scale);
    summary["memory_per_rank"] = trainer_.runtime->memory_per_rank(trainer_.peak());
    file_.write(summary);
}

// ---- all of them ----------------------------------------------------------------------------------------------------

RunOutputs::RunOutputs(Trainer& trainer, const ordered_json& flags) {
    const TrainOptions& o = trainer.options;
    const auto add = [&](RunControl& control) { trainer.controls.push_back(&control); };
    check_evaluation(o, trainer.data);
    check_prompt(o, trainer.data);
    check_text(o, trainer.data, flags.contains("generate") && flags["generate"] != "0");
    if (!o.trace.empty()) add(trace_.emplace(trainer));
    if (!o.memory_timeline.empty()) add(timeline_.emplace(o.memory_timeline));
    if (!o.save_hf.empty()) add(hf_.emplace(trainer));
    if (!o.save_reference.empty()) add(reference_.emplace(trainer, flags));
    if (!o.metrics.empty()) add(metrics_.emplace(trainer, flags));
    if (o.eval_every > 0) add(evaluation_.emplace(trainer));
    if (o.sample_every > 0) add(samples_.emplace(trainer));
}

}  // namespace train70b
