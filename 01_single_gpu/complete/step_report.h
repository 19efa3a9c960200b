#pragma once
// What a step reports: numbers for the metrics file, and the line that shows the progress.
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "01_single_gpu/core/dtype.h"
#include "01_single_gpu/core/memory.h"
#include "01_single_gpu/core/profile.h"

namespace train70b {

// The rank with the most work of its own in a step: seconds of the step in which it did not wait for communication.
struct Straggler {
    int64_t rank = 0;
    double busy_s = 0, median_busy_s = 0;  // of this rank; the median of all ranks
    double waited_s = 0;  // how much longer than this rank the others (their median) waited for communication
};
// Of several ranks' steps, in rank order: the seconds of the step, and those in which its own work waited.
Straggler find_straggler(const std::vector<double>& step_s, const std::vector<double>& waited_s);

// What a StepState (roles.h) adds.
struct ReportPart {
    virtual ~ReportPart() = default;
    virtual void add_to(nlohmann::ordered_json& step, DType dtype) const = 0;
};

struct StepReport {
    int64_t step = 0;               // from 1
    double loss = 0;                // mean over the global batch, before the update; the cross-entropy alone
    double grad_norm = 0;           // before clipping
    double lr = 0, param_norm = 0;  // param_norm: after the update
    double tokens_per_s = 0, step_s = 0, comm_s = 0, data_s = 0;
    std::optional<bool> skipped;       // with --skip-step, or overflowed: no update was made
    std::optional<double> loss_scale;  // with --dtype fp16, of this step
    bool overflowed = false;           // with a dynamic one: a gradient was not finite, and no update was made
    std::optional<int64_t> targets;    // of the global batch, where some are ignored
    struct Size {
        int64_t sequences, seq_len;
    };
    std::optional<Size> size;                        // of the global batch, where it varies from step to step
    std::optional<double> z_loss, multi_token_loss;  // what they add to the loss, where there are such
    std::shared_ptr<const ReportPart> part;          // null: none
    std::optional<double> noise_scale;               // tokens; NaN: not known yet
    double flops = 0;                                // model FLOPs of all ranks
    std::optional<double> mfu;                       // model FLOPs / peak FLOPs, if the peak is known
    std::optional<double> attention_pairs;           // (query, key) of the global batch, with --document-token
    MemoryBytes memory{};                            // after the update
    MemoryPeak peak;                                 // since the step began
    std::optional<DeviceMemory> device_memory;       // after the step, on a GPU
    double waited_s = 0;                             // seconds in which this rank's own work waited for communication
    std::map<std::string, int64_t> comm_bytes;
    std::optional<Straggler> straggler;  // where there are several ranks
};

nlohmann::ordered_json to_json(const StepReport& report, DType dtype);  // dtype of the run
nlohmann::ordered_json to_json(const MemoryPeak& peak);
// Rounds a loss or norm for output: 17 significant digits in an fp64 run, else 9.
double significant_digits(double value, DType dtype = DType::f32);
nlohmann::ordered_json number_or_null(double value);  // 9 significant digits; null: not finite

// "step   20/200  loss 3.1415  |g| 0.92  lr 3.0e-03  28.1k tok/s  36.2 MiB  eta 0:07"
class Progress {
  public:
    explicit Progress(int64_t steps) : steps_(steps) {}
    ~Progress();  // ends an open line
    Progress(const Progress&) = delete;
    void step(const StepReport& report);
    void line(const std::string& text);  // prints a line between progress lines

  private:
    int64_t steps_, since_print_ = 0;
    double seconds_ = 0;
    bool live_ = false;  // on a terminal: the next line overwrites the last one
};

}  // namespace train70b
