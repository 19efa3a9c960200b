#include "03_zero/complete/zero.h"

#include <utility>

#include "02_data_parallel/runtime/comm_roles.h"
#include "03_zero/complete/offload.h"

namespace train70b {

Zero::Zero(Llama& model, const Comm& ranks, const ZeroOptions& options, MakeOptimizer make_optimizer,
           std::unique_ptr<Unsharder> unsharder, const std::optional<Comm>& edp)
    : model_(model),
      ranks_(ranks),
      shards_(ranks),
      edp_(edp),
      options_(options),
      make_optimizer_(std::move(make_optimizer)),
      unsharder_(unsharder ? std::move(unsharder) : std::make_unique<Unsharder>()) {
    if (options_.bucket_mb < 0) options_.bucket_mb = keeps_grads() ? 25 : 0;
    if (const int64_t group = options_.hybrid_shard; group > 0 && group < ranks.size()) {
        shards_ = ranks.split([group](int rank) { return int(rank / group); }, "dp_shard");
        replicas_ = ranks.split([group](int rank) { return int(rank % group); }, "dp_replica");
    }
    replicas_of_states_ = group_of(options_.stage == 0 ? ranks_ : replicas_);
    replicas_over_edp_ = options_.stage == 0 && edp_ ? group_of(*edp_) : replicas_of_states_;
    flats_ = flat_params(model, shards_, edp_.value_or(shards_));
    for (Unit* unit : model.units_run()) {
        const auto flat = std::find_if(flats_.begin(), flats_.end(), [&](const FlatParam& candidate) {
            return candidate.unit == (unit->owner ? unit->owner : unit);
        });
        ++flat->runs;
        unit->wrappers.insert(unit->wrappers.begin(),
                              [this, pass = passes_.size()](Tape& tape, const Var& x, const Unit::Body& body) {
                                  return wrap(pass, tape, x, body);
                              });
        if (!keeps_grads()) unit->open_grads = [this, &open = *flat] { make_unsharded_grads(open); };
        passes_.push_back(&*flat);
    }
    for (size_t end = passes_.size(); end > 0;) {
        size_t first = end - 1;
        while (passes_[first]->unit->inside) --first;
        for (size_t pass = first; pass < end; ++pass) backward_.push_back(pass);
        end = first;
    }
}

// ---- the wrapper of a unit's forward and backward pass --------------------------------------------------------------

// tag::wrap[]
Var Zero::wrap(size_t pass, Tape& tape, const Var& x, const Unit::Body& body) {
    // tag::lab-zero3-unit[]
    FlatParam& flat = *passes_[pass];
    // A unit inside a block that is recomputed stays unsharded for its backward pass, which follows.
    const bool stays = tape.replays;
    // In the order in which they run.
    const auto before_forward = [&] {
        if (!keeps_params()) unshard(pass, stays ? -1 : +1);
    };
    const auto after_forward = [&] {
        if (!keeps_params() && !stays) reshard(flat);
    };
    const auto before_backward = [this, pass, &flat, stays] {
        if (!keeps_params() && !stays) unshard(pass, -1);
        if (!keeps_grads()) allocate_unsharded_grads(flat);
    };
    const auto after_backward = [this, pass] { unit_ready(pass); };

    before_forward();
    tape.record_wgrad(after_backward);  // the tape runs backwards
    Var y = body(tape, x);
    after_forward();
    tape.record(before_backward);
    return y;
    // end::lab-zero3-unit[]
}
// end::wrap[]

void Zero::start_unshard(FlatParam& flat) {
    if (flat.params) return;
    unsharder_->start(flat);
    most_unsharded_ = std::max(most_unsharded_, ++unsharded_);
}

void Zero::unshard(size_t pass, int direction) {
    FlatParam& flat = *passes_[pass];
    start_unshard(flat);
    const bool forward = direction > 0;
    size_t next = forward ? pass : size_t(std::find(backward_.begin(), backward_.end(), pass) - backward_.begin());
    for (int64_t ahead = 0; ahead < options_.prefetch && ++next < passes_.size(); ++ahead)
        start_unshard(*passes_[forward ? next : backward_[next]]);
    if (flat.users++ == 0) unsharder_->finish(flat);
}

// A pipeline may run another forward pass between a backward pass and its weight gradients, which may need norm weights
// (to recompute their input): the last pass that uses the parameters frees them.
void Zero::reshard(FlatParam& flat) {
    if (--flat.users == 0) free_params(flat);
}

void Zero::free_params(FlatParam& flat) {
    bind_data(flat.unit->params, Tensor());
    flat.params = Tensor();
    --unsharded_;
}

// A pipeline may start another micro-batch's backward pass before this one's weight gradients are computed, or before
// its gradients are reduced: then both are accumulated in one buffer.
void Zero::allocate_unsharded_grads(FlatParam& flat) {
    ++flat.open_passes;
    std::erase(ready_, &flat);
    make_unsharded_grads(flat);
}

void Zero::make_unsharded_grads(FlatParam& flat) {
    if (flat.grads) return;
    flat.grads = zeros({flat.padded}, model_.options.grad_dtype, model_.options.device, Memory::workspace);
    bind_grads(flat.unit->params, flat.grads.element_slice(0, {flat.size}));
}

// ---- reductions -----------------------------------------------------------------------------------------------------

void Zero::begin_step(int64_t micro_batches) {
    micro_batches_ = micro_batches;
    model_.zero_grads();
}

void Zero::unit_ready(size_t pass) {
    FlatParam& flat = *passes_[pass];
    const bool last_pass = ++flat.passes == micro_batches_ * flat.runs;
    if (!keeps_params()) reshard(flat);
    if (keeps_grads() && !last_pass) return;  // gradients accumulate in place
    if (!keeps_grads() && --flat.open_passes > 0) return;
    ready_.push_back(&flat);
    if (keeps_grads() && !options_.overlap) return;  // until finish_gradients()
    int64_t bytes = 0;
    for (const FlatParam* waiting : ready_) bytes += waiting->grads.bytes();
    if (double(bytes) >= options_.bucket_mb * (1 << 20) || pass == 0) reduce_ready_units();
}

void Zero::reduce_ready_units() {
    for (; !ready_.empty(); ready_.pop_front()) start_reduction(*ready_.front());
}

void Zero::start_reduction(FlatParam& flat) {
    Reduction reduction{.flat = &flat, .unsharded = flat.grads, .first = !std::exchange(flat.has_reduced, true)};
    if (options_.stage == 0) {
        reduction.work = flat.ranks.all_reduce(flat.grads);
    } else {
        // The first pass of a step is reduced into the shard itself; later ones into this rank's slice of the unsharded
        // buffer, and then added to the shard.
        const bool direct = keeps_grads() || (reduction.first && flat.grad_shard);
        reduction.shard = direct ? flat.grad_shard : flat.own_shard_of(flat.grads);
        reduction.work = flat.ranks.reduce_scatter(reduction.shard, flat.grads);
    }
    if (!keeps_grads()) {
        bind_grads(flat.unit->params, Tensor());
        flat.grads = Tensor();         // kept alive by the reduction
        while (!in_flight_.empty()) {  // besides this one: each holds a unit's unsharded gradients
            finish_reduction(in_flight_.front());
            in_flight_.pop_front();
        }
    }
    if (options_.overlap) {
        in_flight_.push_back(std::move(reduction));
    } else {
        finish_reduction(reduction);
    }
}

void Zero::finish_reduction(Reduction& reduction) {
    FlatParam& flat = *reduction.flat;
    reduction.work.wait();
    if (keeps_grads() || (flat.grad_shard && reduction.shard.same_memory(flat.grad_shard))) return;
    if (flat.grad_shard) return add(flat.grad_shard, flat.grad_shard, reduction.shard);
    if (reduction.first) return HostCopy(flat.host_grads, reduction.shard).host_waits();
    Tensor sum = Tensor::like(reduction.shard, Memory::workspace);
    HostCopy(sum, flat.host_grads).device_waits();
    add(sum, sum, reduction.shard);
    HostCopy(flat.host_grads, sum).host_waits();
}

void Zero::finish_gradients() {
    for (const FlatParam& flat : flats_)
        CHECK(flat.passes == micro_batches_ * flat.runs, "{}: {} of {} backward passes", flat.unit->name, flat.passes,
              micro_batches_ * flat.runs);
    reduce_ready_units();
    for (; !in_flight_.empty(); in_flight_.pop_front()) finish_reduction(in_flight_.front());
    for (FlatParam& flat : flats_) {
        flat.passes = 0;
        flat.has_reduced = false;
        if (!keeps_params() && flat.params) {  // prefetched and then not used; the update makes it stale
            unsharder_->wait(flat);
            free_params(flat);
        }
    }
    if (replicas_.size() > 1) reduce_over_replicas();
}

void Zero::reduce_over_replicas() {
    std::vector<Work> works;
    for (FlatParam& flat : flats_) {
        if (!flat.grad_shard) {  // on the host: reduced through a copy on the device
            Tensor shard({flat.shard_size()}, model_.options.grad_dtype, model_.options.device, Memory::workspace);
            HostCopy(shard, flat.host_grads).device_waits();
            replicas_.all_reduce(shard).wait();
            HostCopy(flat.host_grads, shard).host_waits();
        } else {
            works.push_back(replicas_.all_reduce(flat.grad_shard));
        }
    }
    for (Work& work : works) work.wait();
}

}  // namespace train70b
