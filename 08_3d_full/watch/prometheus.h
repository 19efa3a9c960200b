#pragma once
// --prometheus FILE.prom: the state of a run in the text format of Prometheus, for node exporter's textfile collector.
// https://prometheus.io/docs/instrumenting/exposition_formats/, https://github.com/prometheus/node_exporter
#include <limits>
#include <optional>

#include "01_single_gpu/report/report.h"
#include "01_single_gpu/roles.h"

namespace train70b {

// Writes on rank 0, at most once per second and at the end, always a complete file that replaces the last one. A file
// that cannot be written is a usage error at the start; later it is one line, and the run goes on without it.
class Prometheus : public RunControl {
  public:
    static constexpr const char* kFlag = "--prometheus";

    // path empty: does nothing. Usage error if it cannot be written.
    explicit Prometheus(const std::string& path, double every_seconds = 1);

    bool after_step(const StepReport& report) override;
    // Counts alarms, by kind; knows the events of chapter 08's checkpoints and of its check of replicas.
    void recorded(const nlohmann::ordered_json& event) override;
    void finish() override;
    std::string text() const;

  private:
    void write();

    std::string path_;  // empty: nothing is written
    const double every_seconds_;
    double written_ = -std::numeric_limits<double>::infinity();  // now_seconds() of the last write
    bool finished_ = false;
    std::optional<StepReport> last_;
    std::map<std::string, int64_t> bytes_;   // by operation, since the start of the program
    std::map<std::string, double> seconds_;  // the same
    std::map<std::string, int64_t> alarms_ = {
        {"checkpoint_failed", 0}, {"loss_spike", 0}, {"non_finite", 0}, {"replicas_differ", 0}};
    struct Checkpoint {
        int64_t step;
        double when;  // now_seconds()
    };
    std::optional<Checkpoint> checkpoint_;
    // How often the run was continued from a checkpoint: one more than the file that is replaced says.
    int64_t restarts_ = 0;
};

}  // namespace train70b
