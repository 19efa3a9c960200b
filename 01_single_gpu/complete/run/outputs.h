#pragma once
// What a run writes beside its progress, each a RunControl that exists where its flag is given: --trace,
// --memory-timeline, --save-hf, --save-reference, --metrics; then evaluation and samples, which write into the metrics.
#include "01_single_gpu/complete/report/reference.h"
#include "01_single_gpu/complete/run/evaluate.h"
#include "01_single_gpu/complete/run/generate.h"
#include "01_single_gpu/core/trace.h"

namespace train70b {

// Of a run that fails, the file has rank 0's events until then; the other ranks' are added at the end.
class TraceFile : public RunControl {
  public:
    explicit TraceFile(Trainer& trainer);
    ~TraceFile() override { put(); }
    int64_t first_step() override;
    bool after_step(const StepReport& report) override;
    void finish() override;

  private:
    std::string title() const;
    void put();
    Trainer& trainer_;
    std::optional<GrowingFile> file_;  // on rank 0, like those below
    EventFile events_;                 // on the others
    double last_ = 0;
};

class TimelineFile : public RunControl {
  public:
    explicit TimelineFile(const std::string& path);
    ~TimelineFile() override { put(); }
    int64_t first_step() override;
    bool after_step(const StepReport&) override { return put(), true; }
    void finish() override;

  private:
    void put();
    std::optional<GrowingFile> file_;
};

class HfExport : public RunControl {
  public:
    explicit HfExport(Trainer& trainer);
    void finish() override;

  private:
    Trainer& trainer_;
    HfSaver saver_;
};

class ReferenceRun : public RunControl {
  public:
    ReferenceRun(Trainer& trainer, const nlohmann::ordered_json& flags);
    int64_t first_step() override;
    void gradients_ready(int64_t step) override;
    bool after_step(const StepReport& report) override;
    void finish() override;

  private:
    Trainer& trainer_;
    ReferenceWriter writer_;
    const GetFullParam full_;
};

// A line for the configuration, for every step and event, and for the whole run.
class MetricsFile : public RunControl {
  public:
    MetricsFile(Trainer& trainer, const nlohmann::ordered_json& flags);
    void before_step(int64_t step) override;
    void complete(StepReport& report) override;  // adds the norm of the weights
    bool after_step(const StepReport& report) override;
    void recorded(const nlohmann::ordered_json& event) override { file_.write(event); }
    void finish() override;

  private:
    Trainer& trainer_;
    Metrics file_;
    std::optional<int64_t> first_step_;
    double begin_ = 0;
    int64_t skipped_ = 0;  // steps
    StepReport last_;
};

// The outputs that the options ask for, as the first controls of the trainer.
class RunOutputs {
  public:
    // Opens the files, so construct it last; usage error if that is impossible. flags: the command line, for the files.
    // Outlives the run.
    explicit RunOutputs(Trainer& trainer, const nlohmann::ordered_json& flags);
    RunOutputs(const RunOutputs&) = delete;

  private:
    std::optional<TraceFile> trace_;
    std::optional<TimelineFile> timeline_;
    std::optional<HfExport> hf_;
    std::optional<ReferenceRun> reference_;
    std::optional<MetricsFile> metrics_;
    std::optional<Evaluation> evaluation_;
    std::optional<Samples> samples_;
};

}  // namespace train70b
