#pragma once
// The roles of a training run. The trainer is the same in all chapters and talks to these objects; a technique is an
// implementation of one of them. Here: the interfaces, and what one rank does.
//
//   ParamStore       who holds parameters, gradients and optimizer states    LocalStore (01), DataParallel (02), Zero (03)
//   MicroBatchLoop   who runs the micro-batches of a step                    Accumulate (01), Pipeline (05)
//   Groups           the ranks of each axis of the layout                    one rank (01), Comm (02)
//   Runtime          what else a run needs from its ranks                    one rank (01), CommRuntime (02)
//   StepState        what else changes from step to step                     none (01), delayed scaling (07)
#include <nlohmann/json_fwd.hpp>

#include "01_single_gpu/llama.h"
#include "01_single_gpu/optimizer.h"

namespace train70b {

class ParamStore {
  public:
    virtual ~ParamStore() = default;
    virtual void allocate(uint64_t seed) = 0;  // parameters with their initial values, and gradients
    // Calls `body`, in which all parameters of the unit can be written on this rank (--load-hf, resuming).
    virtual void write(Unit& unit, const std::function<void()>& body) = 0;
    // After the last change of the weights from outside: the first call makes the optimizer and its states; master weights
    // and FP8 gather scales follow the parameters. Collective.
    virtual void weights_changed() = 0;

    virtual void begin_step(int64_t micro_batches) = 0;  // gradients are 0
    virtual void finish_gradients() = 0;  // after the last backward pass: sums over the ranks that share them
    // Where this rank has a parameter's finished gradient: a shard may hold a part of it, or none.
    virtual std::vector<Tensor> gradient_parts(const Param& param) const = 0;
    // Sum of squares of all parameters or gradients, each counted once over the ranks that share them. Collective.
    virtual double squares(Which which) const = 0;
    virtual void update(int64_t step, double lr, double grad_scale) = 0;  // step from 1

    // The full local rectangle of a parameter's data or gradient, on the first of the ranks that share it; on the others
    // the same or empty. Collective.
    virtual Tensor full(const Param& param, Which which) const = 0;
    virtual void for_each_state(const StateVisitor& visit) = 0;  // optimizer states on this rank, in a fixed order
};

// The micro-batches of one step, made when they are asked for.
struct MicroBatches {
    int64_t count = 1;
    std::function<Batch(int64_t index)> get;
};

class MicroBatchLoop {
  public:
    virtual ~MicroBatchLoop() = default;
    // Adds the step's gradients to those of the parameters; returns this rank's share of the loss, (1).
    virtual Tensor forward_backward(const MicroBatches& batches) = 0;
    virtual Tensor forward_only(const Batch& batch) = 0;  // the loss of a batch without gradients: evaluation
};

// Ranks are numbered tp fastest, then cp, dp, pp. dp_cp: the ranks that hold the same parameters, over which gradients are
// summed.
struct Groups {
    GroupPtr dp = one_rank(), cp = one_rank(), dp_cp = one_rank(), tp = one_rank(), pp = one_rank();
};

struct StepReport;  // io/report.h

class Runtime {
  public:
    virtual ~Runtime() = default;
    virtual int64_t ranks() const { return 1; }  // devices that work on a step: MFU is a mean over them
    virtual void begin_step() {}
    virtual void end_step(StepReport&) {}  // adds communication bytes and seconds
    // Calls `body`, in which rank 0 writes large files; the others wait for it for as long as it takes.
    virtual void write_files(const std::function<void()>& body) { body(); }
    virtual nlohmann::ordered_json memory_per_rank(const MemoryPeak& mine) const;  // the summary's list
};

class StepState {
  public:
    virtual ~StepState() = default;
    virtual void next_step() = 0;  // before every step but the first
};

// ---- one rank -------------------------------------------------------------------------------------------------------

class LocalStore : public ParamStore {
  public:
    // The model outlives this.
    LocalStore(Llama& model, MakeOptimizer make_optimizer);

    void allocate(uint64_t seed) override { model_.materialize(seed); }
    void write(Unit&, const std::function<void()>& body) override { body(); }
    void weights_changed() override;
    void begin_step(int64_t) override { model_.zero_grads(); }
    void finish_gradients() override {}
    std::vector<Tensor> gradient_parts(const Param& param) const override { return {param.grad}; }
    double squares(Which which) const override;
    void update(int64_t step, double lr, double grad_scale) override { optimizer_->update(step, lr, grad_scale); }
    Tensor full(const Param& param, Which which) const override;
    void for_each_state(const StateVisitor& visit) override { optimizer_->for_each_state(visit); }

  protected:
    Llama& model_;

  private:
    MakeOptimizer make_optimizer_;
    std::unique_ptr<Optimizer> optimizer_;
};

// Gradient accumulation: one micro-batch after the other, forward and backward.
class Accumulate : public MicroBatchLoop {
  public:
    explicit Accumulate(Llama& model) : model_(model) {}
    Tensor forward_backward(const MicroBatches& batches) override;
    Tensor forward_only(const Batch& batch) override;

  private:
    Llama& model_;
};

// ---- plain functions over the roles ---------------------------------------------------------------------------------

// Sums the gradients of replicated parameters over the replicas that each saw a part (Param::partial_grad_group): one
// message per group. After ParamStore::finish_gradients().
void sum_partial_gradients(Llama& model, const ParamStore& store);

// The full parameter's data or gradient on rank 0, put together over all groups; empty on the others. Collective, for the
// same parameters in the same order on all ranks; a rank need not hold any of it.
Tensor full_param(Llama& model, const ParamStore& store, const Groups& groups, const Param& wanted, Which which);

}  // namespace train70b
