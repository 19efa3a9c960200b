#pragma once
// What a run writes beside its progress, each a RunControl that exists where its flag is given: --trace,
// --memory-timeline, --save-hf, --save-reference, --metrics; then evaluation and samples, which write into the metrics.
#include "01_single_gpu/complete/hf/hf.h"
#include "01_single_gpu/complete/report/report.h"
#include "01_single_gpu/complete/run/evaluate.h"
#include "01_single_gpu/complete/run/generate.h"
#include "01_single_gpu/core/trace.h"

namespace train70b {

// The outputs that the options ask for, as the first controls of the trainer.
class RunOutputs {
  public:
    // Opens the files, so construct it last; usage error if that is impossible. flags: the command line, for the files.
    // Outlives the run.
    explicit RunOutputs(Trainer& trainer, const nlohmann::ordered_json& flags);
    ~RunOutputs();
    RunOutputs(const RunOutputs&) = delete;

  private:
    RunOutputs() = default;  // the destructor also runs where the other constructor throws

    std::vector<std::unique_ptr<RunControl>> controls_;
};

}  // namespace train70b
