#pragma once
// Replicas of a model that leave and come back, while the others train on (the idea of torchft). A replica is one run
// of this program under its own mpirun, in any layout; lighthouse.py knows which of them live.
//
//   step   forward and backward of this replica's part of the global batch, reduced inside of it
//          rank r sums its gradients and its loss over the ranks r of all replicas, by TCP (backend_tcp.h)
//   vote   to the lighthouse: were the sums complete?   and back: whether to update, and who takes part from now on
//
// All update or none: if a replica is lost, the step is done again by those that live, who divide the same samples. One
// that comes back receives weights and optimizer states from one that lives, between two steps. So losses and updates
// are those of a run in which nobody was ever lost, but for the order of the sums.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "02_data_parallel/runtime/backend_tcp.h"
#include "02_data_parallel/runtime/program.h"
#include "08_3d_full/checkpoint/folder.h"

namespace train70b {

struct ElasticOptions {
    bool on = false;
    std::string lighthouse;  // HOST:PORT
    int64_t replica = -1;
    double timeout = 20;  // seconds
};
void add_elastic_flags(Flags& flags, ElasticOptions& options);
// Usage error for flags that need others, and what cannot be elastic.
void check_elastic(const ElasticOptions& options, const Program& program, const ParallelConfig& config);

// Construct it when the trainer has its roles, before allocate(); everything must outlive it. As a control it stands
// behind what changes gradients and before what reads them.
class Elastic : public RunControl, public MicroBatchLoop {
  public:
    Elastic(const ElasticOptions& options, Trainer& trainer, Zero& store, const Comm& world,
            const ParallelConfig& config, const std::optional<Manifest>& start);

    int64_t first_step() override;  // joins, and waits for the others
    void before_step(int64_t step) override;
    void gradients_ready(int64_t step) override;
    void complete(StepReport& report) override;
    void finish() override;
    Tensor forward_backward(const MicroBatches& batches) override { return loss_ = loop_->forward_backward(batches); }
    Tensor forward_only(const Batch& batch) override { return loop_->forward_only(batch); }

  private:
    bool vote();  // whether to update
    void meet();  // the replicas of the next step; heals those that are behind
    void connect();
    // Among those that take part.
    int place_of(int64_t replica) const { return int(std::ranges::find(replicas_, replica) - replicas_.begin()); }
    bool heal();  // gives or receives weights and states
    void check_divisions(int64_t replicas) const;
    void sum_over_replicas();
    void repeat(int64_t step);
    void tell(const nlohmann::json& line) const;           // rank 0, to the lighthouse
    nlohmann::json ask(const nlohmann::json& line) const;  // and its answer, for all ranks of this replica

    const ElasticOptions& options_;
    Trainer& trainer_;
    Zero& store_;
    const Comm world_;
    const ParallelConfig& config_;
    MicroBatchLoop* const loop_;
    const GroupPtr own_dp_, own_dp_cp_;  // inside this replica
    const int64_t steps_done_;
    Socket lighthouse_;  // on rank 0
    std::optional<TcpBackend> peers_;
    std::vector<int64_t> replicas_;  // that take part, in the order of their numbers
    int64_t generation_ = -1;
    nlohmann::json next_;   // what the lighthouse said last
    bool changed_ = false;  // the replicas, since the last step
    Tensor loss_;
};

}  // namespace train70b
