#include "01_single_gpu/complete/report/report.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "01_single_gpu/complete/muon.h"
#include "01_single_gpu/complete/trainer.h"
#include "01_single_gpu/core/cpu_threads.h"
#include "01_single_gpu/core/json.h"
#include "01_single_gpu/core/version.h"

namespace train70b {

using nlohmann::ordered_json;

namespace {
class MetricsFile : public RunControl {
  public:
    MetricsFile(Trainer& trainer, const ordered_json& flags) : trainer_(trainer) {
        if (this_rank != 0) return;
        const TrainOptions& o = trainer.options;
        const std::string target = output_target("--metrics", o.metrics);
        std::error_code error;  // a killed run may have left half a line
        if (o.append_metrics && std::filesystem::is_regular_file(target, error)) {
            std::ifstream lines(target, std::ios::binary);
            int64_t complete = 0;
            for (std::string line; std::getline(lines, line) && !lines.eof();) complete += int64_t(line.size()) + 1;
            std::filesystem::resize_file(target, uintmax_t(complete), error);
        }
        stream_ = std::fopen(target.c_str(), o.append_metrics ? "a" : "w");
        if (!stream_)
            usage_error("--metrics {}: cannot be written: {} (must be in an existing, writable folder)", o.metrics,
                        std::strerror(errno));
        std::setvbuf(stream_, nullptr, _IONBF, 0);  // what fails to be written is not kept for a second attempt

        const LlamaConfig& c = trainer_.model.config;
        const Llama::Options& model = trainer_.model.options;
        const std::string mfu = mfu_text(model.device, model.dtype, o.masks_keys());
        write({{"event", "config"},
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
    ~MetricsFile() override {
        if (stream_) std::fclose(stream_);
    }

    void before_step(int64_t step) override {
        if (first_step_) return;
        first_step_ = step;
        begin_ = now_seconds();
    }
    void complete(StepReport& report) override { report.param_norm = trainer_.norm(Which::data); }
    bool after_step(const StepReport& report) override {
        write(to_json(report, trainer_.model.options.dtype));
        skipped_ += report.skipped.value_or(false);
        last_ = report;
        return true;
    }
    void recorded(const ordered_json& event) override { write(event); }
    void finish() override {
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
        write(summary);
    }

  private:
    void write(const ordered_json& line) {
        if (!stream_) return;
        const std::string text = json_text(line) + "\n";
        const long whole_lines = std::ftell(stream_);
        if (std::fwrite(text.data(), 1, text.size(), stream_) == text.size()) return;
        const std::string why = std::strerror(errno);
        if (whole_lines >= 0 && ::ftruncate(::fileno(stream_), whole_lines) != 0) {}  // a device has no length
        warn(fmt::format("--metrics {}: write failed ({}); metrics {} are missing, and the run goes on",
                         trainer_.options.metrics, why,
                         line.contains("step") ? fmt::format("from step {} on", line["step"].dump()) : "of the rest"));
        std::fclose(std::exchange(stream_, nullptr));
    }

    Trainer& trainer_;
    FILE* stream_ = nullptr;  // on rank 0
    std::optional<int64_t> first_step_;
    double begin_ = 0;
    int64_t skipped_ = 0;  // steps
    StepReport last_;
};
}  // namespace

std::unique_ptr<RunControl> metrics_file(Trainer& trainer, const ordered_json& flags) {
    return std::make_unique<MetricsFile>(trainer, flags);
}

Table memory_table(const LlamaConfig& config, const Llama::Options& options, int64_t micro_batch, int64_t seq_len,
                   const MemoryPeak& peak, const std::string& optimizer) {
    const int64_t n = config.parameters(), weight = size_of(options.dtype), grad = size_of(options.grad_dtype);
    const int64_t state = AdamW::state_bytes(options.dtype);
    const ActivationFormula act =
        activation_formula(config, micro_batch, seq_len, options.dtype, options.recompute,
                           {.loss_chunk = options.loss_chunk, .recompute_every = options.recompute_every});
    Table table("", {"peak bytes", "measured", "formula", Column("formula").left()});
    const auto row = [&](Memory kind, const Cell& expected, const std::string& text) {
        table.row({kMemoryNames[int(kind)], peak.kind[size_t(kind)], expected, text});
    };
    row(Memory::params, weight * n, fmt::format("{} N, N = {} parameters", weight, n));
    row(Memory::grads, grad * n, fmt::format("{} N", grad));
    const int64_t moment = size_of(stats_dtype(options.dtype)), m = optimizer == "muon" ? muon_elements(config) : 0;
    row(Memory::optimizer, state * n - moment * m,
        fmt::format("{} N{}: exp_avg, exp_avg_sq{}{} in {}", state, m > 0 ? fmt::format(" - {} M", moment) : "",
                    m > 0 ? fmt::format(" (not for Muon's M = {})", m) : "",
                    master_bytes(options.dtype) ? ", master" : "", name_of(stats_dtype(options.dtype))));
    row(Memory::activations, act.total,
        fmt::format("{} blocks x {} + {} + working set {}", config.layers, act.block, act.fixed, act.working));
    row(Memory::workspace, "-", "depends on the device");
    table.row({"total", peak.total, "-", fmt::format("peak of the sum ({})", human_bytes(double(peak.total)))});
    return table;
}

Table memory_table(const std::string& caption, const std::vector<MemoryRow>& rows) {
    int kinds = kDeviceMemoryKinds;
    for (const MemoryRow& row : rows)
        while (kinds < kMemoryKinds && row.peak.kind[kinds] > 0) ++kinds;
    std::vector<Column> columns = {""};
    columns.insert(columns.end(), kMemoryNames.begin(), kMemoryNames.begin() + kinds);
    columns.push_back("total");
    Table table(caption, columns);
    for (const MemoryRow& row : rows) {
        std::vector<Cell> measured = {row.name}, formula = {""};
        for (int i = 0; i < kinds; ++i) {
            measured.push_back(row.peak.kind[i]);
            formula.push_back(row.formula[i] < 0 ? Cell() : Cell(row.formula[i]));
        }
        measured.push_back(row.peak.total);
        table.row(measured);
        if (row.formula != kNoFormula) table.row(formula);
    }
    return table;
}

}  // namespace train70b
