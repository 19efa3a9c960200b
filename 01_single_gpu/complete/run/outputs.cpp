#include "01_single_gpu/complete/run/outputs.h"

#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/report/reference.h"

namespace train70b {

using nlohmann::ordered_json;

namespace {

// Of a run that fails, the file has rank 0's events until then; the other ranks' are added at the end.
class TraceFile : public RunControl {
  public:
    explicit TraceFile(Trainer& trainer) : trainer_(trainer) {
        if (this_rank == 0) file_.emplace("--trace", trainer.options.trace, kTraceTail);
        profile().events_on = true;
    }
    ~TraceFile() override { put(); }

    int64_t first_step() override {
        trainer_.runtime->start_trace();
        if (file_) file_->write(trace_head() + trace_title(this_rank, title()));
        return 1;
    }
    bool after_step(const StepReport&) override {
        if (profile().events.size() > kMostEvents || now_seconds() - last_ > 1) put();
        return true;
    }
    void finish() override {
        put();
        trainer_.runtime->merge_traces(file_ ? &*file_ : nullptr, events_, title());
        file_.reset();
        profile().events_on = false;
    }

  private:
    // "rank 3 (tp 1, dp 0, pp 1)"
    std::string title() const {
        const Groups& groups = trainer_.groups;
        std::string where;
        for (const auto& [name, group] :
             {std::pair("tp", groups.tp), {"cp", groups.cp}, {"dp", groups.dp}, {"pp", groups.pp}})
            if (group->size() > 1) where += fmt::format("{}{} {}", where.empty() ? "" : ", ", name, group->rank());
        return fmt::format("rank {}{}", this_rank, where.empty() ? "" : " (" + where + ")");
    }
    void put() {
        const std::vector<Profile::Event> events = std::exchange(profile().events, {});
        if (this_rank > 0) events_.write(events);
        if (file_ && file_->begun()) file_->write(trace_text(events, this_rank, {}));
        last_ = now_seconds();
    }

    Trainer& trainer_;
    std::optional<GrowingFile> file_;  // on rank 0
    EventFile events_;                 // on the others
    double last_ = 0;
};

class TimelineFile : public RunControl {
  public:
    explicit TimelineFile(const std::string& path) {
        if (this_rank != 0) return;
        file_.emplace("--memory-timeline", path);
        ledger().start_timeline();
    }
    ~TimelineFile() override { put(); }

    int64_t first_step() override {
        if (file_) file_->write(ledger().take_timeline());
        return 1;
    }
    bool after_step(const StepReport&) override { return put(), true; }
    void finish() override {
        put();
        file_.reset();
    }

  private:
    void put() {
        if (file_ && file_->begun()) file_->write(ledger().take_timeline());
    }

    std::optional<GrowingFile> file_;
};

LlamaConfig saved_config(const Trainer& trainer) {
    LlamaConfig config = trainer.model.config;
    config.context = std::max(config.context, trainer.options.seq_len);
    return config;
}

class HfExport : public RunControl {
  public:
    explicit HfExport(Trainer& trainer) : trainer_(trainer), saver_(trainer.options.save_hf, trainer.options.load_hf) {}

    void finish() override {
        const auto full = [&](const Param& param, Which which) {
            return with_logit_scale(param, trainer_.full(param, which));
        };
        trainer_.runtime->write_files([&] { saver_.save(saved_config(trainer_), trainer_.model.options.dtype, full); });
    }

  private:
    // Hugging Face's Llama has no multiplier of the logits: in its files the final norm's weight has muP's.
    Tensor with_logit_scale(const Param& param, const Tensor& full) const {
        const double logit_scale = trainer_.model.loss_options.logit_scale;
        if (!full || param.name != "model.norm.weight" || logit_scale == 1) return full;
        Tensor scaled = Tensor::like(full, Memory::workspace);
        copy(scaled, full);
        scale(scaled, logit_scale);
        return scaled;
    }

    Trainer& trainer_;
    HfSaver saver_;
};

// Calls report(trainer, step) after so many steps and after the last one.
class Periodical : public RunControl {
  public:
    using Report = void(Trainer&, int64_t step);
    Periodical(Trainer& trainer, int64_t every, Report* report) : trainer_(trainer), every_(every), report_(report) {}
    bool after_step(const StepReport& report) override {
        if (report.step % every_ == 0 || report.step == trainer_.last_step()) report_(trainer_, report.step);
        return true;
    }

  private:
    Trainer& trainer_;
    const int64_t every_;
    Report* const report_;
};

// Usage error if a loaded model, whose tokens are not bytes, would train on text or continue it.
void check_text(const TrainOptions& o, const Dataset& data, bool generates) {
    if (o.load_hf.empty() || o.model.vocab == 256 || (o.steps == 0 && !generates)) return;
    if (std::ranges::count(o.hf_ignore, "vocab_size") > 0) return;
    for (const Dataset::Part& part : data.parts())
        if (part.source->is_text())
            usage_error(
                "--data {}: is text, whose tokens are bytes, but the vocabulary of --load-hf {} has {} (make shards of "
                "its tokens: docs/make_shards.py, docs/convert_tokens.py; or take bytes: --hf-ignore vocab_size)",
                part.source->path, o.load_hf, o.model.vocab);
}

}  // namespace

RunOutputs::RunOutputs(Trainer& trainer, const ordered_json& flags) : RunOutputs() {
    const TrainOptions& o = trainer.options;
    const auto add = [&](std::unique_ptr<RunControl> control) {
        trainer.controls.push_back(control.get());
        controls_.push_back(std::move(control));
    };
    check_evaluation(o, trainer.data);
    if (!o.prompt.empty() && !trainer.data.is_text())
        usage_error(
            "--prompt: the tokens of --data {} are not bytes of text (leave it out, and the prompt is the "
            "beginning of the held-out data)",
            o.data);
    check_text(o, trainer.data, flags.contains("generate") && flags["generate"] != "0");
    if (!o.trace.empty()) add(std::make_unique<TraceFile>(trainer));
    if (!o.memory_timeline.empty()) add(std::make_unique<TimelineFile>(o.memory_timeline));
    if (!o.save_hf.empty()) add(std::make_unique<HfExport>(trainer));
    if (!o.save_reference.empty()) add(reference_run(trainer, saved_config(trainer), flags));
    if (!o.metrics.empty()) add(metrics_file(trainer, flags));
    if (o.eval_every > 0) add(std::make_unique<Periodical>(trainer, o.eval_every, report_evaluation));
    if (o.sample_every > 0) add(std::make_unique<Periodical>(trainer, o.sample_every, report_sample));
}

// In the opposite order: of folders within one another the inner one is removed first (OutputFolder).
RunOutputs::~RunOutputs() {
    while (!controls_.empty()) controls_.pop_back();
}

}  // namespace train70b
