#pragma once
// ZeRO (Rajbhandari et al. 2020): data parallelism without replicated optimizer states, gradients and parameters.
//
// Each unit of the model (embedding, block, head) is a FlatParam, sharded over N ranks.
//
//   stage   sharded over the ranks     reduction of the gradients         optimizer step
//   0       nothing                    all-reduce                         on everything
//   1       optimizer states           reduce-scatter                     on the shard; all-gather of the parameters
//   2       and gradients              reduce-scatter of a unit, which    as 1
//                                      then frees its full gradients
//   3       and parameters             as 2                               on the shard
//           each unit is unsharded before its forward and its backward pass, and resharded after it
//
// What the outermost wrapper of a unit does, in the order in which it runs; backward steps are recorded on the tape:
//     when              stages   what
//     before forward    3        unshard the unit, prefetch the next ones
//     after forward     3        reshard the unit
//     before backward   3        unshard it again, prefetch the ones before it
//                       2, 3     allocate its unsharded gradients
//     after backward    0-3      reduce its gradients (2, 3: and free them; 3: and reshard the parameters)
//
// zero.cpp has the stages; zero_optimizer_step.cpp the optimizer step; zero_model_states.cpp what the store holds:
// allocation, reading and writing.
//
// Hybrid shard: sharded inside groups of --hybrid-shard ranks, replicated across the groups; the reduce-scatter is
// followed by an all-reduce of the shard over its replicas. Offload: the optimizer and its states live on the host;
// with `all`, the shards too; with `nvme`, the states in files.
#include <deque>

#include "01_single_gpu/complete/roles.h"
#include "03_zero/complete/flat_param.h"

namespace train70b {

enum class Offload { none, optimizer, nvme, all };
inline const std::vector<std::string> kOffloadNames = {"none", "optimizer", "nvme", "all"};

struct ZeroOptions {
    int stage = 3;
    int64_t hybrid_shard = 0;  // ranks of a shard group; 0: all
    Offload offload = Offload::none;
    std::string offload_dir = "/tmp";  // of nvme's files
    int64_t prefetch = 1;              // units unsharded ahead of the one in use (stage 3)
    bool prefetch_given = false;       // by --prefetch
    double bucket_mb = -1;             // MiB of gradients per bucket, in whole units; < 0: 25, and 0 from stage 2 on
    bool overlap = true;  // false: wait for each reduction where it starts; stages 0, 1: after the backward pass

    // How many of `ranks` with the same parameters have one set of optimizer states between them.
    int64_t shards(int64_t ranks) const {
        return stage == 0 ? 1 : hybrid_shard > 0 ? std::min(hybrid_shard, ranks) : ranks;
    }
};

class Zero : public ParamStore {
  public:
    // Wraps the model's units: construct it after whatever narrows the parameters, and before allocate(). The model
    // outlives this. unsharder: how stage 3 gathers; null: in the parameters' own dtype. edp: the ranks that
    // hold the same parameters of units over ep (Param::over_ep), if they are not the same as hold the rest.
    Zero(Llama& model, const Comm& ranks, const ZeroOptions& options, MakeOptimizer make_optimizer,
         std::unique_ptr<Unsharder> unsharder = nullptr, const std::optional<Comm>& edp = {});
    Zero(const Zero&) = delete;

    void allocate(uint64_t seed) override;
    void write(Unit& unit, const std::function<void()>& body) override;
    void weights_changed() override;
    void begin_step(int64_t micro_batches) override;
    void finish_gradients() override;
    std::vector<Tensor> gradient_parts(const Param& param) const override;
    double matrix_squares() const override;
    double squares(Which which) const override;  // the shards' squares are added in the order of ranks
    void update(int64_t step, double lr, double grad_scale) override;
    Tensor full(const Param& param, Which which) const override;
    void for_each_state(const StateVisitor& visit) override;
    void states_changed() override;
    std::vector<Tensor> reduced_gradients() const;  // of a step, flat: what the optimizer steps of this rank take
    GroupPtr state_replicas(const Param& param) const override;  // all in stage 0, those of a hybrid shard otherwise

    int64_t shard_ranks() const { return shards_.size(); }
    int64_t owned_elements() const;                             // in this rank's shards, without padding
    int64_t padded_elements() const;                            // of all units, with padding
    int64_t passed_elements() const;                            // the same of the units that a micro-batch runs
    int64_t most_unsharded() const { return most_unsharded_; }  // units at the same time, so far (stage 3)

  private:
    struct Reduction {
        FlatParam* flat;
        Work work;
        Tensor unsharded, shard;
        bool first = true;  // of the step, for this unit
    };

    bool keeps_params() const { return options_.stage < 3; }
    bool keeps_grads() const { return options_.stage < 2; }
    bool offloads() const { return options_.offload != Offload::none; }

    bool has_own_ranks(const FlatParam& flat) const { return edp_ && flat.over_ep(); }
    // Whether this rank's part of a unit counts in a sum over the ranks that hold it: a replica does not.
    bool counts(const FlatParam& flat) const;
    double squares(Which which, int64_t shard, bool own_ranks) const;
    double all_squares(Which which, int64_t shards, bool own_ranks) const;
    double squares_of_rest(Which which) const;

    void allocate_params(FlatParam& flat, uint64_t seed);
    void allocate_grads(FlatParam& flat);
    Var wrap(size_t pass, Tape& tape, const Var& x, const Unit::Body& body);

    void start_unshard(FlatParam& flat);
    void unshard(size_t pass, int direction);  // and prefetch the next ones in that direction
    void reshard(FlatParam& flat);             // when its last user has finished
    void free_params(FlatParam& flat);
    void allocate_unsharded_grads(FlatParam& flat);
    void make_unsharded_grads(FlatParam& flat);  // unless there are some
    void unit_ready(size_t pass);
    void reduce_ready_units();
    void start_reduction(FlatParam& flat);
    void finish_reduction(Reduction& reduction);
    void reduce_over_replicas();
    std::unique_ptr<Optimizer> optimizer_of(const FlatParam& flat) const;
    void publish_weights();  // the shards have new weights: parameters, FP8 scales
    void update_scales();    // what the unsharder derives from the weights

    Llama& model_;
    const Comm ranks_;
    Comm shards_, replicas_;
    const std::optional<Comm> edp_;
    GroupPtr replicas_of_states_, replicas_over_edp_;
    ZeroOptions options_;
    MakeOptimizer make_optimizer_;
    std::unique_ptr<Unsharder> unsharder_;
    std::vector<FlatParam> flats_;    // in forward order
    std::vector<FlatParam*> passes_;  // of a micro-batch, in forward order: tied embeddings are used twice
    std::vector<size_t> backward_;    // the passes in backward order: a unit comes before one inside of it
    std::deque<FlatParam*> ready_;    // gradients complete, reduction not started
    std::deque<Reduction> in_flight_;
    int64_t micro_batches_ = 1;  // of this step
    int64_t unsharded_ = 0, most_unsharded_ = 0;
};

}  // namespace train70b
