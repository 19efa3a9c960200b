#pragma once
// FlatParam: one unit's parameters in one flat buffer, padded to a multiple of the N shard ranks. Rank r owns the r-th
// slice of it, its shard, regardless of where parameters begin; pieces() maps it to parameters.
#include "01_single_gpu/complete/llama.h"
#include "01_single_gpu/complete/optimizer.h"
#include "02_data_parallel/comm.h"

namespace train70b {

struct FlatParam {
    Unit* unit = nullptr;
    int64_t size = 0, padded = 0;    // elements
    Comm ranks;                      // over which it is sharded
    Device device = Device::cpu;     // of the unsharded tensors
    Tensor params, grads;            // unsharded; params in stage 3, grads from stage 2 on: only while they are in use
    Tensor param_shard, grad_shard;  // this rank's; views of the above where those persist
    Tensor host_params, host_grads;  // offload: the shard that the optimizer updates
    std::unique_ptr<Optimizer> optimizer;

    int64_t runs = 0;  // per micro-batch: 2 for the embedding if the head is tied to it

    // The state of a step, and what changes it:
    //   parameters (stage 3)    sharded --unshard: ++users--> unsharded --reshard: --users, and at 0--> sharded
    //                           ... in the forward and in the backward pass of each micro-batch
    //   gradients (2, 3)        none --before a backward pass: ++open_passes--> being added to
    //                           --after it: --open_passes, and at 0--> ready --reduction: has_reduced--> none
    //   step (0 to 3)           ++passes after each backward pass; complete at micro-batches * runs
    Work all_gather;
    int64_t users = 0;         // passes that use the unsharded parameters now
    int64_t passes = 0;        // completed backward passes
    int64_t open_passes = 0;   // started, with weight gradients not yet computed
    bool has_reduced = false;  // some gradients of this step have been reduced

    bool over_ep() const { return unit->params.front()->over_ep; }
    int64_t shards() const { return ranks.size(); }
    int64_t rank() const { return ranks.rank(); }
    int64_t shard_size() const { return padded / shards(); }
    Tensor shard_of(const Tensor& unsharded, int64_t of_rank) const {
        return unsharded.element_slice(of_rank * shard_size(), {shard_size()});
    }
    Tensor own_shard_of(const Tensor& unsharded) const { return shard_of(unsharded, rank()); }
    const Tensor& data_shard() const { return param_shard ? param_shard : host_params; }  // on the device or the host
    const Tensor& grads_shard() const { return grad_shard ? grad_shard : host_grads; }

    // The pieces of parameters in a shard, in order.
    struct Piece {
        Param* param;
        int64_t in_param, in_shard, size;  // elements
        Tensor of(const Tensor& shard) const { return shard ? shard.element_slice(in_shard, {size}) : Tensor(); }
    };
    std::vector<Piece> pieces(int64_t of_rank) const;
    // The same for an optimizer. data, grads: the shard's elements; either may be empty.
    std::vector<Segment> segments(int64_t of_rank, const Tensor& data, const Tensor& grads) const;
};
// One per unit, in forward order. edp: the ranks of units over ep.
std::vector<FlatParam> flat_params(Llama& model, const Comm& shards, const Comm& edp);

// How stage 3 unshards a unit: one all-gather in the parameters' own dtype. Chapter 07 gathers FP8 data instead
// (07_fp8/complete/zero_cast.h).
class Unsharder {
  public:
    virtual ~Unsharder() = default;
    // The weights of all units have changed. Stages 0 to 2: the unsharded ones, which a rank always holds.
    virtual void params_changed() {}
    // Stage 3: the shards. Collective over the shard ranks.
    virtual void shards_changed(const std::vector<FlatParam>&, const Comm&) {}
    virtual void start(FlatParam& flat);                            // allocates flat.params and starts the all-gather
    virtual void finish(FlatParam& flat);                           // waits; the parameters become views of flat.params
    virtual void wait(FlatParam& flat) { flat.all_gather.wait(); }  // without binding the parameters
};

}  // namespace train70b
