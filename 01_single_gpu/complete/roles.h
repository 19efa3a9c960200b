#pragma once
// The roles of a training run. The trainer is the same in all chapters and calls these objects; a technique implements
// one of them. This file has the interfaces and the implementations for one rank.
//
//   ParamStore       holds parameters, gradients and optimizer states    LocalStore (01), DataParallel (02), Zero (03)
//   MicroBatchLoop   runs the micro-batches of a step                    Accumulate (01), Pipeline (05)
//   Groups           the ranks along each axis of the layout             one rank (01), Comm (02)
//   Runtime          statistics and files of all ranks                   one rank (01), CommRuntime (02)
//   StepState        other state that changes at every step              the model's own (01), delayed scaling (07)
//   RunControl       where a run starts and stops, and what happens      metrics, evaluation, files (01),
//                    between its steps                                   alarms, checkpoints, faults (08)
#include <nlohmann/json_fwd.hpp>

#include "01_single_gpu/complete/llama.h"
#include "01_single_gpu/complete/optimizer.h"

namespace train70b {

class ParamStore {
  public:
    virtual ~ParamStore() = default;
    virtual void allocate(uint64_t seed) = 0;  // parameters with their initial values, and gradients
    // Calls `body`, which may write all parameters of the unit (--load-hf, resuming).
    virtual void write(Unit& unit, const std::function<void()>& body) = 0;
    // Must be called after the weights were changed from outside. Updates what is derived from them (master weights,
    // FP8 scales); the first call creates the optimizer and its states. Collective.
    virtual void weights_changed() = 0;

    virtual void begin_step(int64_t micro_batches) = 0;  // whatever is added from here on starts at 0
    virtual void finish_gradients() = 0;  // after the last backward pass: completes the sums over data-parallel ranks
    // The tensors in which this rank holds a parameter's reduced gradient: none if its shard has no element of it. In
    // ZeRO-1 the full gradient, of which only the shard is reduced.
    virtual std::vector<Tensor> gradient_parts(const Param& param) const = 0;
    // Sum of squares of all parameters or gradients, each counted once over the data-parallel ranks; of those with
    // Param::over_ep, over all ranks of the stage. Collective.
    virtual double squares(Which which) const = 0;
    // Of the gradients of matrices of one use (not a tied embedding), of the elements that this rank owns: over the
    // data-parallel ranks, each counts once.
    virtual double matrix_squares() const = 0;
    virtual void update(int64_t step, double lr, double grad_scale) = 0;  // step from 1

    // A parameter's unsharded local rectangle, data or gradient, on the first data-parallel rank; on the others the
    // same or empty. Collective.
    virtual Tensor full(const Param& param, Which which) const = 0;
    // The weights and optimizer states that this rank updates, in a fixed order.
    virtual void for_each_state(const StateVisitor& visit) = 0;
    // Call after a visitor has written them: updates all parameters. Collective.
    virtual void states_changed() = 0;
    // The ranks that hold the same states of this parameter.
    virtual GroupPtr state_replicas(const Param&) const { return one_rank(); }
};

// The micro-batches of one step, created on request.
struct MicroBatches {
    int64_t count = 1;
    std::function<Batch(int64_t index)> get;
};

class MicroBatchLoop {
  public:
    virtual ~MicroBatchLoop() = default;
    // Accumulates the step's gradients in Param::grad; returns this rank's share of the loss, (1).
    virtual Tensor forward_backward(const MicroBatches& batches) = 0;
    virtual Tensor forward_only(const Batch& batch) = 0;  // the loss without gradients, for evaluation
};

// Ranks are numbered tp fastest, then cp, dp, pp. dp_cp: the ranks that hold the same parameters; gradients are summed
// over it. Parameters with Param::over_ep are divided over ep, and the same ones are on the ranks of edp.
struct Groups {
    GroupPtr dp = one_rank(), cp = one_rank(), dp_cp = one_rank(), tp = one_rank(), pp = one_rank();
    GroupPtr ep = one_rank(), edp = one_rank();

    // Sums of what the ranks of tp have in common, as a loss; of what each rank has. Collective, equal on all ranks.
    std::vector<double> sum_loss(const std::vector<double>& local) const { return pp->sum(dp_cp->sum(local)); }
    std::vector<double> sum(const std::vector<double>& local) const { return tp->sum(sum_loss(local)); }
};

// Numbers of all ranks, in rank order. Axis by axis, in the groups of the step's sums: a rank that has missed one of
// those meets the others here, where --comm-check sees it. Collective.
std::vector<double> gather(const Groups& groups, const std::vector<double>& local);

struct StepReport;  // step_report.h
class GrowingFile;  // core/files.h
class EventFile;    // core/trace.h

class Runtime {
  public:
    virtual ~Runtime() = default;
    virtual int64_t ranks() const { return 1; }  // devices that compute a step, for MFU
    virtual void begin_step() {}
    virtual void end_step(StepReport&) {}             // adds communication bytes and seconds
    virtual bool has_peers() const { return false; }  // several ranks, and not simulated ones
    // Calls `body`, which writes large files on rank 0; the other ranks wait for it without a timeout.
    virtual void write_files(const std::function<void()>& body) { body(); }
    // --trace: before the first step, and after the last one. file: rank 0's, with its own events, null on the others,
    // whose events and titles are added.
    virtual void start_trace() {}
    virtual void merge_traces(GrowingFile* /*file*/, EventFile& /*events*/, const std::string& /*title*/) {}
    virtual nlohmann::ordered_json memory_per_rank(const MemoryPeak& local) const;  // for the summary
};

// Every default does nothing.
class RunControl {
  public:
    virtual ~RunControl() = default;
    // Called once, when the optimizer states exist: may restore an earlier run. Returns the number of the first step.
    virtual int64_t first_step() { return 1; }
    virtual int64_t last_step() const { return INT64_MAX; }  // of this run, if before --steps
    virtual void before_step(int64_t /*step*/) {}
    virtual void gradients_ready(int64_t /*step*/) {}            // complete on this rank, before norm and clipping
    virtual void complete(StepReport&) {}                        // after the update: may add to the report
    virtual bool after_step(const StepReport&) { return true; }  // once it is printed; false: it was the last step
    virtual void recorded(const nlohmann::ordered_json& /*event*/) {}  // of Trainer::note() or record()
    virtual void finish() {}                                           // after the last step
};

class StepState {
  public:
    virtual ~StepState() = default;
    virtual void next_step() {}                                // before every step but the first
    virtual void begin_step([[maybe_unused]] int64_t step) {}  // before the forward pass
    // After the update, if there was one: may add to the report. Collective.
    virtual void end_step(const Groups&, StepReport&, [[maybe_unused]] bool updated) {}

    // What a checkpoint keeps of it: a row of numbers for each name. The numbers of two ranks for one name are merged
    // by their maximum, where another layout resumes.
    struct Rows {
        std::string kind;  // the names in the file begin with it
        std::vector<std::string> names;
        int64_t width = 0;
        std::vector<float> values;  // (names, width)
    };
    virtual Rows rows() const { return {}; }
    virtual void restore(const Rows&) {}
};
std::unique_ptr<StepState> step_state_of(Llama& model);  // of the model itself, which outlives it; null: it has none

// ---- one rank -------------------------------------------------------------------------------------------------------

class LocalStore : public ParamStore {
  public:
    // The model must outlive this object.
    LocalStore(Llama& model, MakeOptimizer make_optimizer)
        : model_(model), make_optimizer_(std::move(make_optimizer)) {}

    void allocate(uint64_t seed) override { model_.materialize(seed); }
    void write(Unit&, const std::function<void()>& body) override { body(); }
    void weights_changed() override {
        if (optimizer_) return optimizer_->weights_changed();
        optimizer_ = make_optimizer_(full_segments(model_.params()), Memory::optimizer);
    }
    void begin_step(int64_t) override { model_.zero_grads(); }
    void finish_gradients() override {}
    std::vector<Tensor> gradient_parts(const Param& param) const override { return {param.grad}; }
    double squares(Which which) const override { return total_squares(model_.params(), which); }
    double matrix_squares() const override;
    void update(int64_t step, double lr, double grad_scale) override {
        optimizer_->prepare(grad_scale);
        optimizer_->update(step, lr, grad_scale);
    }
    Tensor full(const Param& param, Which which) const override {
        return which == Which::data ? param.data : param.grad;
    }
    void for_each_state(const StateVisitor& visit) override { optimizer_->for_each_state(visit); }
    void states_changed() override { optimizer_->states_changed(); }

  protected:
    Llama& model_;

  private:
    MakeOptimizer make_optimizer_;
    std::unique_ptr<Optimizer> optimizer_;
};

// Gradient accumulation: forward and backward of one micro-batch after another.
class Accumulate : public MicroBatchLoop {
  public:
    explicit Accumulate(Llama& model) : model_(model) {}
    Tensor forward_backward(const MicroBatches& batches) override;
    Tensor forward_only(const Batch& batch) override {
        Tape tape{.recording = false};
        return model_.forward(tape, batch).data;
    }

  private:
    Llama& model_;
};

// ---- functions over the roles ---------------------------------------------------------------------------------------

// Sums the partial gradients of replicated parameters over their replicas (Param::partial_grad_group): one message per
// group. Call after ParamStore::finish_gradients().
void sum_partial_gradients(Llama& model, const ParamStore& store);

// Gathers the full parameter's data or gradient on rank 0; empty on the other ranks. Collective: all ranks must call it
// for the same parameters in the same order, whether or not they hold any of it.
Tensor full_param(Llama& model, const ParamStore& store, const Groups& groups, const Param& wanted, Which which);

}  // namespace train70b
