// The optimizer step of the stages: the norm, who updates what, and how the new weights reach the other ranks.
#include "03_zero/complete/offload.h"
#include "03_zero/complete/zero.h"

namespace train70b {

// ---- the norm -------------------------------------------------------------------------------------------------------

// Of a shard of all units with the same ranks: edp, or those of the rest.
double Zero::squares(Which which, int64_t shard, bool own_ranks) const {
    const bool data = which == Which::data;
    std::vector<Tensor> parts;
    for (const FlatParam& flat : flats_) {
        if (has_own_ranks(flat) != own_ranks) continue;
        const Tensor x = options_.stage == 0 ? flat.shard_of(data ? flat.params : flat.grads, shard)
                                             : (data ? flat.data_shard() : flat.grads_shard());
        for (const Segment& segment : flat.segments(shard, x, {}))
            if (segment.counts()) parts.push_back(segment.data);
    }
    return total_squares(parts);
}

double Zero::all_squares(Which which, int64_t shards, bool own_ranks) const {
    double sum = 0;
    for (int64_t shard = 0; shard < shards; ++shard) sum += squares(which, shard, own_ranks);
    return sum;
}

double Zero::squares(Which which) const {
    if (!edp_) return squares_of_rest(which);
    // Of this rank's units over ep, over all ranks that hold the rest: those of other tensor-parallel ranks are others,
    // or do not count.
    const int rank = edp_->rank();
    const double over_ep = ranks_.sum(options_.stage > 0 ? squares(which, rank, true)
                                      : rank == 0        ? all_squares(which, edp_->size(), true)
                                                         : 0.0);
    return over_ep + squares_of_rest(which);
}

double Zero::squares_of_rest(Which which) const {
    if (options_.stage == 0) return all_squares(which, shards_.size(), false);
    // tag::lab-zero-update-norm[]
    return shards_.sum(squares(which, shards_.rank(), false));
    // end::lab-zero-update-norm[]
}

// ---- the optimizers -------------------------------------------------------------------------------------------------

void Zero::weights_changed() {
    for (FlatParam& flat : flats_) {
        if (offloads() && flat.param_shard) {  // the optimizer's copy
            if (!flat.host_params)
                flat.host_params =
                    Tensor({flat.shard_size()}, model_.options.dtype, host_of(model_.options.device), Memory::host);
            copy(flat.host_params, flat.param_shard);
        }
        if (flat.optimizer)
            flat.optimizer->weights_changed();
        else
            flat.optimizer = optimizer_of(flat);
    }
    update_scales();
}

std::unique_ptr<Optimizer> Zero::optimizer_of(const FlatParam& flat) const {
    if (options_.stage == 0) return make_optimizer_(full_segments(flat.unit->params), Memory::optimizer);
    if (offloads()) {
        allocate_on_disk = [folder = options_.offload_dir](int64_t bytes) { return map_file(folder, bytes); };
        return make_optimizer_(flat.segments(flat.rank(), flat.host_params, flat.host_grads),
                               options_.offload == Offload::nvme ? Memory::disk : Memory::host);
    }
    // tag::lab-zero-update-optimizer[]
    return make_optimizer_(flat.segments(flat.rank(), flat.param_shard, flat.grad_shard), Memory::optimizer);
    // end::lab-zero-update-optimizer[]
}

// ---- the step -------------------------------------------------------------------------------------------------------

void Zero::update(int64_t step, double lr, double grad_scale) {
    for (FlatParam& flat : flats_) flat.optimizer->prepare(grad_scale);
    if (offloads()) {
        update_on_host(flats_, step, lr, grad_scale, model_.options.device);
        return publish_weights();
    }
    // tag::lab-zero-update-step[]
    for (FlatParam& flat : flats_) flat.optimizer->update(step, lr, grad_scale);
    publish_weights();
    // end::lab-zero-update-step[]
}

void Zero::publish_weights() {
    if (options_.stage == 0 || !keeps_params()) return update_scales();
    // tag::lab-zero-update-publish[]
    std::vector<Work> works;
    for (FlatParam& flat : flats_) works.push_back(flat.ranks.all_gather(flat.params, flat.param_shard));
    for (Work& work : works) work.wait();
    // end::lab-zero-update-publish[]
    update_scales();
}

void Zero::update_scales() {
    if (keeps_params()) return unsharder_->params_changed();
    unsharder_->shards_changed(flats_, shards_);
}

}  // namespace train70b
