#include "08_3d_full/watch/prometheus.h"

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "01_single_gpu/core/version.h"

namespace train70b {

namespace {

constexpr const char* kRestarts = "train70b_restarts_total";

std::string escaped(const std::string& text) {
    std::string result;
    for (const char c : text) {
        if (c == '\\' || c == '"') result += '\\';
        result += c == '\n' ? std::string("\\n") : std::string(1, c);
    }
    return result;
}

std::string number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
    return fmt::format("{:.12g}", value);
}

using Labels = std::vector<std::pair<const char*, std::string>>;

// The lines of one metric: its HELP and TYPE once, then its samples.
class MetricFamily {
  public:
    MetricFamily(std::string& out, std::string name, const char* type, const char* help)
        : out_(out), name_(std::move(name)) {
        out_ += fmt::format("# HELP {0} {2}\n# TYPE {0} {1}\n", name_, type, help);
    }
    MetricFamily& sample(double value, const Labels& labels = {}) {
        std::string text;
        for (const auto& [label, of] : labels)
            text += fmt::format("{}{}=\"{}\"", text.empty() ? "" : ",", label, escaped(of));
        out_ += fmt::format("{}{} {}\n", name_, text.empty() ? "" : "{" + text + "}", number(value));
        return *this;
    }

  private:
    std::string& out_;
    const std::string name_;
};

int64_t restarts_in(const std::string& path) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);)
        if (line.starts_with(std::string(kRestarts) + " "))
            return std::atoll(line.c_str() + std::string(kRestarts).size());
    return 0;
}

}  // namespace

Prometheus::Prometheus(const std::string& path, double every_seconds)
    : path_(this_rank == 0 ? path : ""), every_seconds_(every_seconds) {
    if (path_.empty()) return;
    restarts_ = restarts_in(path_) + 1;
    OutputFile(kFlag, path_);  // whether it can be written; the file of an earlier run stays for now
}

bool Prometheus::after_step(const StepReport& report) {
    if (!last_ && report.step == 1) restarts_ = 0;
    last_ = report;
    for (const auto& [operation, bytes] : report.comm_bytes) bytes_[operation] += bytes;
    for (const auto& [operation, seconds] : report.comm_seconds) seconds_[operation] += seconds;
    if (now_seconds() - written_ >= every_seconds_) write();
    return true;
}

void Prometheus::recorded(const nlohmann::ordered_json& event) {
    const std::string name = event.value("event", ""), kind = name == "alarm" ? event.value("kind", "") : name;
    if (name == "checkpoint" && event.value("folder", "").starts_with("step-"))
        checkpoint_ = {event.value("step", int64_t(0)), now_seconds()};
    if (name == "alarm" || alarms_.count(kind)) ++alarms_[kind];
    if (finished_ || kind == "non_finite" || kind == "replicas_differ") write();  // the run ends here
}

void Prometheus::finish() {
    finished_ = true;
    write();
}

void Prometheus::write() {
    if (path_.empty()) return;
    try {
        OutputFile file(kFlag, path_);
        file.write(text());
        file.commit();
        written_ = now_seconds();
    } catch (const std::runtime_error& error) {
        fmt::print(stderr, "{}: nothing is written to it from now on\n", error.what());
        path_.clear();
    }
}

std::string Prometheus::text() const {
    std::string out;
    const auto gauge = [&](const char* name, const char* help, double value) {
        MetricFamily(out, name, "gauge", help).sample(value);
    };
    MetricFamily(out, "train70b_build_info", "gauge", "Always 1; the commit of the program.")
        .sample(1, {{"commit", build_commit()}});
    if (last_) {
        const StepReport& r = *last_;
        gauge("train70b_step", "Last completed optimizer step.", double(r.step));
        gauge("train70b_loss", "Mean loss over the step's batch.", r.loss);
        gauge("train70b_grad_norm", "Norm of the gradients before clipping.", r.grad_norm);
        gauge("train70b_lr", "Learning rate of the step.", r.lr);
        gauge("train70b_tokens_per_second", "Tokens per second of the step, all ranks.", r.tokens_per_s);
        gauge("train70b_step_seconds", "Seconds of the step.", r.step_s);
        gauge("train70b_data_seconds", "Seconds of the step in which data was read.", r.data_s);
        MetricFamily bytes(out, "train70b_comm_bytes_total", "counter",
                           "Bytes that rank 0 sent, by group and operation.");
        for (const auto& [operation, sum] : bytes_) bytes.sample(double(sum), {{"operation", operation}});
        MetricFamily seconds(out, "train70b_comm_seconds_total", "counter",
                             "Seconds of communication of rank 0, by group and operation.");
        for (const auto& [operation, sum] : seconds_) seconds.sample(sum, {{"operation", operation}});
        const auto memory = [&](const char* name, const char* help, const MemoryBytes& kinds) {
            MetricFamily family(out, name, "gauge", help);
            for (int kind = 0; kind < kMemoryKinds; ++kind)
                family.sample(double(kinds[size_t(kind)]), {{"kind", kMemoryNames[kind]}, {"rank", "0"}});
        };
        memory("train70b_memory_bytes", "Memory after the step's update, by kind.", r.memory);
        memory("train70b_memory_peak_bytes", "Peak of the memory during the step, by kind.", r.peak.kind);
        if (r.straggler) {
            gauge("train70b_straggler_rank", "Rank with the most work of its own in the step.",
                  double(r.straggler->rank));
            gauge("train70b_straggler_busy_seconds", "Seconds of that rank's own work.", r.straggler->busy_s);
            gauge("train70b_straggler_waited_seconds", "Seconds that the other ranks waited for it.",
                  r.straggler->waited_s);
        }
    }
    MetricFamily alarms(out, "train70b_alarms_total", "counter", "Alarms since the start of the program, by kind.");
    for (const auto& [kind, count] : alarms_) alarms.sample(double(count), {{"kind", kind}});
    if (checkpoint_) {
        gauge("train70b_checkpoint_step", "Step of the last complete checkpoint.", double(checkpoint_->step));
        gauge("train70b_checkpoint_age_seconds", "Seconds since the last checkpoint was complete.",
              now_seconds() - checkpoint_->when);
    }
    MetricFamily(out, kRestarts, "counter", "How often the run was continued from a checkpoint.")
        .sample(double(restarts_));
    return out;
}

}  // namespace train70b
