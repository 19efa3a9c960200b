#include "01_single_gpu/complete/step_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "01_single_gpu/core/say.h"

namespace train70b {

using nlohmann::ordered_json;

static double middle(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

Straggler find_straggler(const std::vector<double>& step_s, const std::vector<double>& waited_s) {
    std::vector<double> busy, others;
    for (size_t i = 0; i < step_s.size(); ++i) busy.push_back(step_s[i] - waited_s[i]);
    const auto slowest = size_t(std::max_element(busy.begin(), busy.end()) - busy.begin());
    for (size_t i = 0; i < waited_s.size(); ++i)
        if (i != slowest) others.push_back(waited_s[i]);
    return {.rank = int64_t(slowest),
            .busy_s = busy[slowest],
            .median_busy_s = middle(busy),
            .waited_s = std::max(0.0, middle(others) - waited_s[slowest])};
}

double significant_digits(double value, DType dtype) {
    return dtype == DType::f64 ? value : std::stod(fmt::format("{:.9g}", value));
}

ordered_json number_or_null(double value) {
    return std::isfinite(value) ? ordered_json(significant_digits(value)) : ordered_json(nullptr);
}

static ordered_json kinds_to_json(const MemoryBytes& bytes) {
    ordered_json json;
    for (int i = 0; i < kMemoryKinds; ++i)
        if (i < kDeviceMemoryKinds || bytes[i] > 0) json[kMemoryNames[i]] = bytes[i];
    return json;
}

ordered_json to_json(const MemoryPeak& peak) {
    ordered_json json = kinds_to_json(peak.kind);
    json["total"] = peak.total;
    return json;
}

ordered_json to_json(const StepReport& r, DType dtype) {
    ordered_json memory = kinds_to_json(r.memory);
    memory["peak"] = to_json(r.peak);
    ordered_json comm = ordered_json::object();
    for (const auto& [name, bytes] : r.comm_bytes) comm[name] = bytes;
    ordered_json json = {{"event", "step"}, {"step", r.step}, {"loss", significant_digits(r.loss, dtype)}};
    if (r.z_loss) json["z_loss"] = significant_digits(*r.z_loss, dtype);
    if (r.multi_token_loss) json["mtp_loss"] = significant_digits(*r.multi_token_loss, dtype);
    json.update({{"grad_norm", significant_digits(r.grad_norm, dtype)},
                 {"lr", r.lr},
                 {"param_norm", significant_digits(r.param_norm, dtype)},
                 {"tokens_per_s", significant_digits(r.tokens_per_s)},
                 {"mfu", r.mfu ? ordered_json(*r.mfu) : ordered_json(nullptr)},
                 {"step_s", significant_digits(r.step_s)},
                 {"comm_s", significant_digits(r.comm_s)},
                 {"data_s", significant_digits(r.data_s)}});
    if (r.size) json["global_batch"] = r.size->sequences, json["seq_len"] = r.size->seq_len;
    if (r.attention_pairs) json["attention_pairs"] = *r.attention_pairs;
    if (r.noise_scale) json["noise_scale"] = number_or_null(*r.noise_scale);
    if (r.part) r.part->add_to(json, dtype);
    if (r.skipped) json["skipped"] = *r.skipped;
    if (r.loss_scale) json["loss_scale"] = *r.loss_scale;
    if (r.targets) json["targets"] = *r.targets;
    if (const auto& s = r.straggler)
        json["straggler"] = {{"rank", s->rank},
                             {"busy_s", significant_digits(s->busy_s)},
                             {"median_busy_s", significant_digits(s->median_busy_s)},
                             {"waited_s", significant_digits(s->waited_s)}};
    json["memory"] = memory;
    if (r.device_memory) json["device_memory"] = {{"used", r.device_memory->used}, {"other", r.device_memory->other}};
    json["comm_bytes"] = comm;
    return json;
}

void Progress::step(const StepReport& r) {
    if (this_rank != 0 || Quiet::on()) return;
    seconds_ += r.step_s;
    ++since_print_;
    const bool skipped = r.skipped.value_or(false);
    const bool milestone =
        skipped || r.step == 1 || r.step == steps_ || since_print_ >= std::max<int64_t>(1, steps_ / 20);
    if (!milestone && !is_on_terminal()) return;
    if (milestone) since_print_ = 0;
    const auto left = static_cast<int64_t>(seconds_ / double(r.step) * double(steps_ - r.step) + 0.5);
    std::fputs(live_ ? "\r\x1b[K" : "", stdout);
    const std::string line = fmt::format(
        "step {:>5}/{}  loss {:.4f}  |g| {:<6.3g}  lr {:.2e}  {:>6} tok/s  {}{}  eta {}:{:02}{}", r.step, steps_,
        r.loss, r.grad_norm, r.lr, human_count(r.tokens_per_s), human_bytes(double(r.peak.total)),
        r.mfu ? fmt::format("  mfu {:.1f}%", 100 * *r.mfu) : "", left / 60, left % 60, skipped ? "  skipped" : "");
    std::fputs(line.c_str(), stdout);
    live_ = !milestone;
    if (milestone) std::fputc('\n', stdout);
    std::fflush(stdout);
}

Progress::~Progress() {
    if (!live_) return;
    std::fputc('\n', stdout);
    std::fflush(stdout);
}

void Progress::line(const std::string& text) {
    if (this_rank != 0 || Quiet::on()) return;
    std::fputs(fmt::format("{}{}\n", live_ ? "\r\x1b[K" : "", text).c_str(), stdout);
    live_ = false;
    std::fflush(stdout);
}

}  // namespace train70b
