#pragma once
// The training loop of all eight chapters. A technique does not change it: it takes one of the roles (roles.h).
//
//   a step:  loop: forward and backward of all micro-batches -> store: sum gradients -> norm, clip -> store: update
#include "01_single_gpu/batches.h"
#include "01_single_gpu/io/reference.h"
#include "01_single_gpu/roles.h"

namespace train70b {

// Sees a run from outside (tests, tables).
class Observer {
  public:
    virtual ~Observer() = default;
    virtual void gradients_ready(int64_t /*step*/) {}  // summed over all ranks, before clipping
    virtual void step_done(const StepReport&) {}
};

class Trainer {
  public:
    // Opens the output files: construct it last, when everything else is known to be possible. Model and data outlive this.
    Trainer(const TrainOptions& options, Llama& model, const Dataset& data, const nlohmann::ordered_json& flags);
    Trainer(const TrainOptions& options, Llama& model, const Dataset& data);  // of a run that no command line asked for
    Trainer(const Trainer&) = delete;

    // ---- the roles: one rank's at first; a chapter replaces those that its technique takes, before allocate() ----
    ParamStore* store;  // not owned, like the others; never null
    MicroBatchLoop* loop;
    Groups groups;
    Runtime* runtime;
    std::vector<StepState*> step_states;
    Observer* observer = nullptr;  // null: nobody looks
    Batches batches;               // which tokens are this rank's

    void allocate() { store->allocate(options_.seed); }
    void run();  // --steps steps from allocated weights, and everything that the flags ask for

    // The parts of run(), for tables and tests.
    int64_t micro_batches() const { return batches.count(*groups.dp); }  // of a step, on this rank
    Batch micro_batch(int64_t step, int64_t index) { return batches.micro_batch(*groups.dp, step, index); }
    void start();                     // the weights are what they are to be: optimizer states
    StepReport step(int64_t number);  // from 1, one after the other
    double evaluate();                // mean loss over the validation part
    double norm(Which which) const;   // of the whole model
    Tensor full(const Param& param, Which which) const { return full_param(model_, *store, groups, param, which); }
    const MemoryPeak& peak() const { return run_peak_; }

  private:
    double sum_loss(const Tensor& mine) const;
    void check_finite(const StepReport& report);
    LlamaConfig saved_config() const;
    void finish(const StepReport& last, double train_seconds);

    const TrainOptions options_;
    Llama& model_;
    const Dataset& data_;
    LocalStore local_store_;
    Accumulate accumulate_;
    Runtime one_rank_;
    std::optional<OutputFile> timeline_file_, trace_file_;
    std::optional<HfSaver> hf_;
    std::optional<ReferenceWriter> reference_;
    Metrics metrics_;
    Progress progress_;
    MemoryPeak run_peak_;
};

}  // namespace train70b
