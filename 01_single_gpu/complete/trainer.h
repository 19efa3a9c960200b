#pragma once
// The training loop of all eight chapters. A technique does not change it but implements one of the roles (roles.h).
//
//   step:  loop: forward and backward of all micro-batches -> store: reduce gradients -> norm, clip -> store: update
//
// What else a run does (files, evaluation, samples, checkpoints, alarms) are RunControls: run/outputs.h, chapter 08.
#include "01_single_gpu/complete/data/batches.h"
#include "01_single_gpu/complete/fp16.h"
#include "01_single_gpu/complete/roles.h"
#include "01_single_gpu/complete/skip_step.h"
#include "01_single_gpu/complete/step_report.h"

namespace train70b {

class Trainer {
  public:
    // The model and the data must outlive this object.
    Trainer(const TrainOptions& options, Llama& model, const Dataset& data);
    Trainer(const Trainer&) = delete;

    const TrainOptions options;
    Llama& model;
    const Dataset& data;

    // ---- the roles: initially those of one rank; a chapter replaces the ones it implements, before allocate() ----
    ParamStore* store;  // not owned, like the others; never null
    MicroBatchLoop* loop;
    Groups groups;
    Runtime* runtime;
    std::vector<StepState*> step_states;
    std::vector<RunControl*> controls;  // called in this order; finish() in the opposite one
    Batches batches;                    // the tokens of this rank

    void allocate() { store->allocate(options.seed); }
    void run();  // trains up to step --steps from the allocated weights

    // The parts of run(), for tables and tests.
    void start() { store->weights_changed(); }  // after the weights are final: creates the optimizer states
    StepReport step(int64_t number);            // consecutive numbers
    int64_t micro_batches(int64_t step) const { return batches.count(*groups.dp, step); }  // on this rank
    Batch micro_batch(int64_t step, int64_t index) {
        Batch batch = batches.micro_batch(*groups.dp, step, index);
        batch.loss_scale *= loss_scale_.scale();
        return batch;
    }

    int64_t last_step() const {  // of this run, as far as its controls know
        int64_t last = options.steps;
        for (const RunControl* control : controls) last = std::min(last, control->last_step());
        return last;
    }
    int64_t steps_done() const { return step_; }  // the last that has ended, perhaps in an earlier run
    double norm(Which which) const;               // of the full model
    Tensor full(const Param& param, Which which) const { return full_param(model, *store, groups, param, which); }
    const MemoryPeak& peak() const { return peak_; }
    // Prints a line between progress lines and records an event; null: no event.
    void note(const std::string& line, const nlohmann::ordered_json& event);
    void record(const nlohmann::ordered_json& event) {
        for (RunControl* control : controls) control->recorded(event);
    }

  private:
    LocalStore local_store_;
    Accumulate accumulate_;
    Runtime one_rank_;
    const std::unique_ptr<StepState> model_state_;
    SkipStep skip_step_;
    LossScale loss_scale_;  // with --dtype fp16
    Progress progress_;
    MemoryPeak peak_;
    int64_t step_ = 0;
};

}  // namespace train70b
