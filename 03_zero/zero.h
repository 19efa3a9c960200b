#pragma once
// ZeRO (Rajbhandari et al. 2020): data parallelism in which no rank keeps what another one has.
//
// Each unit of the model (embedding, block, head) lies in one flat buffer, padded to a multiple of the N shard ranks;
// rank r owns its r-th part, the shard. P, G bytes of parameters and gradients; O of optimizer states:
//
//   stage       kept by every rank         reduction of the gradients          then
//   0           P, G, O                    all-reduce                          AdamW on everything
//   1           P, G, O/N                  reduce-scatter                      AdamW on the shard; all-gather parameters
//   2           P, G/N, O/N                reduce-scatter, unit by unit, and the unit's gradients are freed;  as 1
//   3           P/N, G/N, O/N              as 2                                AdamW on the shard
//               and each unit is gathered before it is used, forward and backward, and freed after
//
// All of it hangs on the order of the tape. Around a unit's body, outermost (>: recorded, so run in the backward pass,
// from the bottom up):
//     3    gather the unit, begin to gather the next ones
//     > 1  reduce-scatter the unit's gradients (2: and free them; 3: and the parameters)
//     the body
//     3    free the unit
//     > 2  make room for the unit's gradients;  3: gather the unit, begin to gather those below it
//
// Hybrid shard: shards inside groups of --hybrid-shard ranks, replicas across; after the reduce-scatter, an all-reduce
// of the shard among its replicas. Offload: AdamW and its states on the host; with `all`, the shards too.
#include "01_single_gpu/trainer.h"
#include "02_data_parallel/comm.h"

namespace train70b {

enum class Offload { none, optimizer, all };

struct ZeroOptions {
    int stage = 3;
    int64_t hybrid_shard = 0;  // ranks of a shard group; 0: all
    Offload offload = Offload::none;
    int64_t prefetch = 1;   // units gathered ahead of the one that computes (stage 3)
    double bucket_mb = -1;  // MiB of gradients that leave together, in whole units; < 0: 25, and 0 from stage 2 on
    bool overlap = true;    // false: each reduction is waited for where it begins; stages 0, 1: after the backward pass
    int64_t micro_batches = 1;  // of a step
};
// --zero, --hybrid-shard, --offload, --prefetch, and chapter 02's --dp, --bucket-mb, --overlap
void add_zero_flags(Flags& flags, int64_t& dp, ZeroOptions& options);
// Usage errors: what does not divide, does not belong together, or does not fit into the host's memory.
// moments: bytes per parameter of the optimizer's [AdamW's].
void check_zero(const ZeroOptions& options, const TrainOptions& training, int64_t data_ranks, int64_t ranks_on_node,
                std::optional<double> moments = {});

class Zero {
  public:
    // Before the model is materialised, and after whatever narrows its parameters. The model outlives this.
    Zero(Llama& model, const Comm& data_ranks, const ZeroOptions& options, const AdamW::Hyper& hyper);
    Zero(const Zero&) = delete;
    void attach(Trainer& trainer);  // fills its slots

    void begin();   // after the last change of the weights: optimizer states
    void finish();  // after the last backward pass of a step: the shards of all gradients are sums over the ranks
    void update(double lr, double grad_scale);
    double norm(Which which) const;           // of the whole model; the shards' squares are added in the order of ranks
    Tensor whole(const Param&, Which) const;  // on rank 0; collective
    std::vector<Tensor> gradient_parts(const Param&) const;  // what lies here of its gradient

    MakeOptimizer make_optimizer;  // AdamW; before begin()

    // Slot (chapter 07). Parameters that stage 3 gathers in another dtype than they are kept in: as FP8 codes, whose
    // bytes are a half or a quarter. Param::data is of that dtype then. Not with Offload::all.
    struct Piece {
        const Param* param;
        Tensor data;  // the elements of it that lie in this rank's shard
    };
    struct Cast {
        DType dtype;
        std::function<bool(const Param&)> takes;  // the others of the unit are gathered as they are
        // The weights have changed: the scales have, too. All pieces on this rank of what is taken; collective.
        std::function<void(const std::vector<Piece>&, const Comm& shards, Device device)> changed;
        std::function<void(Tensor codes, const Tensor& piece, const Param&)> encode;
    };
    std::optional<Cast> cast;

    int64_t shard_ranks() const { return shards_.size(); }
    int64_t owned_elements() const;   // of the model, in this rank's shards
    int64_t padded_elements() const;  // of all units, with the padding
    int64_t most_gathered() const {
        return most_gathered_;
    }  // units that were whole at the same time, so far (stage 3)

  private:
    struct Flat {  // one unit
        Unit* unit = nullptr;
        int64_t size = 0, padded = 0;    // elements
        Tensor params, grads;            // whole; stage 3 and from stage 2 on: only while they are needed
        Tensor param_shard, grad_shard;  // this rank's part; a view of the above where those are kept
        Tensor host_params, host_grads;  // offload: what AdamW works on
        std::unique_ptr<Optimizer> optimizer;
        Tensor rest;  // where there is a cast: what it does not take, shard by shard
        Work gathering, gathering_rest;
        int64_t passes = 0;      // backward passes in this step
        int64_t users = 0;       // passes that need the whole parameters now (stage 3)
        int64_t unfinished = 0;  // of them: begun, with weight halves still to run (stages 2, 3)
        bool reduced = false;    // some have been reduced
    };
    struct Reduction {
        Flat* flat;
        Work work;
        Tensor whole, part;
        bool first = true;  // of the step, for this unit
    };

    bool keeps_params() const { return options_.stage < 3; }
    bool keeps_grads() const { return options_.stage < 2; }
    bool offloads() const { return options_.offload != Offload::none; }
    Device host() const { return model_.options.device == Device::meta ? Device::meta : Device::cpu; }
    int64_t shard_size(const Flat& flat) const { return flat.padded / shards_.size(); }
    Tensor place_of_shard(const Flat& flat, const Tensor& whole) const;
    std::vector<Segment> segments(const Flat& flat, int64_t shard, const Tensor& params, const Tensor& grads) const;

    Var around(size_t i, Tape& tape, const Var& x, const Unit::Body& body);
    void allocate_params(uint64_t seed);
    void allocate_grads();
    void write_params(Unit& unit, const std::function<void()>& write);

    struct Place {  // of a part of a parameter in a shard, and among the shard's elements that a cast does not take
        Param* param;
        int64_t in_param, in_shard, in_rest, size;
    };
    std::vector<Place> places(const Flat& flat, int64_t shard) const;
    bool casts(const Flat& flat) const;
    void params_changed();

    void start_gathering(Flat& flat);
    void start_gathering_codes(Flat& flat);
    void bind_rest(Flat& flat);
    void gather(size_t i, int direction);  // and begin with the next ones in that direction
    void no_longer_needed(Flat& flat);
    void free_params(Flat& flat);
    void make_room_for_grads(Flat& flat);
    void unit_is_ready(size_t i);
    void reduce_ready_units();
    void start_reduction(Flat& flat);
    void settle(Reduction& reduction);

    Llama& model_;
    const Comm ranks_;
    Comm shards_, replicas_;
    ZeroOptions options_;
    std::vector<Flat> flats_;  // in forward order
    std::deque<Flat*> ready_;  // gradients complete, not yet on their way
    std::deque<Reduction> under_way_;
    int64_t gathered_ = 0, most_gathered_ = 0;
};

}  // namespace train70b
