// Allocation, reading and writing of what Zero holds. zero.cpp has the stages, zero_optimizer_step.cpp the update.
#include "02_data_parallel/runtime/comm_roles.h"
#include "03_zero/complete/offload.h"
#include "03_zero/complete/zero.h"

namespace train70b {

void Zero::allocate(uint64_t seed) {
    for (FlatParam& flat : flats_) allocate_params(flat, seed);
    for (FlatParam& flat : flats_) allocate_grads(flat);
    model_.zero_grads();
}

void Zero::allocate_params(FlatParam& flat, uint64_t seed) {
    CHECK(flat.size == total_size(flat.unit->params), "parameters were narrowed after Zero was constructed");
    const DType dtype = model_.options.dtype;
    const Device device = model_.options.device;
    if (keeps_params()) {
        flat.params = zeros({flat.padded}, dtype, device, Memory::params);
        bind_data(flat.unit->params, flat.params.element_slice(0, {flat.size}));
        for (Param* param : flat.unit->params) initialize(*param, seed, 0, param->data);
        flat.param_shard = flat.own_shard_of(flat.params);
        return;
    }
    // Only this rank's shard is ever created.
    const bool on_host = options_.offload == Offload::all;
    Tensor shard = zeros({flat.shard_size()}, dtype, device, on_host ? Memory::workspace : Memory::params);
    for (const FlatParam::Piece& piece : flat.pieces(flat.rank())) {
        Tensor part = piece.of(shard);
        initialize(*piece.param, seed, piece.in_param, part);
    }
    if (!on_host) {
        flat.param_shard = shard;
        return;
    }
    flat.host_params = Tensor({flat.shard_size()}, dtype, host_of(device), Memory::host);
    copy(flat.host_params, shard);
}

void Zero::allocate_grads(FlatParam& flat) {
    const Device device = model_.options.device;
    const DType dtype = model_.options.grad_dtype;
    if (keeps_grads()) {
        flat.grads = zeros({flat.padded}, dtype, device, Memory::grads);
        bind_grads(flat.unit->params, flat.grads.element_slice(0, {flat.size}));
        flat.grad_shard = flat.own_shard_of(flat.grads);
    } else if (options_.offload != Offload::all) {
        flat.grad_shard = zeros({flat.shard_size()}, dtype, device, Memory::grads);
    }
    if (offloads()) flat.host_grads = zeros({flat.shard_size()}, dtype, host_of(device), Memory::host);
}

void Zero::write(Unit& unit, const std::function<void()>& body) {
    if (keeps_params()) return body();
    for (FlatParam& flat : flats_) {
        if (flat.unit != &unit) continue;
        Tensor unsharded = zeros({flat.padded}, model_.options.dtype, model_.options.device, Memory::workspace);
        bind_data(unit.params, unsharded.element_slice(0, {flat.size}));
        body();
        bind_data(unit.params, Tensor());
        // Of an offloaded optimizer's copy: weights_changed() updates it.
        Tensor& shard = flat.param_shard ? flat.param_shard : flat.host_params;
        copy(shard, flat.own_shard_of(unsharded));
    }
}

// ---- reading -----------------------------------------------------------------------------------------------------

double Zero::matrix_squares() const {
    std::vector<Tensor> parts;
    for (const FlatParam& flat : flats_)
        for (int64_t shard = 0; shard < flat.shards(); ++shard) {
            if (!counts(flat) || (options_.stage > 0 && shard != flat.rank())) continue;
            const Tensor x = options_.stage > 0 ? flat.grads_shard() : flat.shard_of(flat.grads, shard);
            for (const Segment& segment : flat.segments(shard, {}, x))
                if (segment.counts() && model_.is_matrix_of_one_use(*segment.param)) parts.push_back(segment.grad);
        }
    return total_squares(parts);
}

std::vector<Tensor> Zero::gradient_parts(const Param& wanted) const {
    if (keeps_grads()) return {wanted.grad};
    std::vector<Tensor> parts;
    for (const FlatParam& flat : flats_)
        for (const FlatParam::Piece& piece : flat.pieces(flat.rank()))
            if (piece.param == &wanted) parts.push_back(piece.of(flat.grads_shard()));
    return parts;
}

std::vector<Tensor> Zero::reduced_gradients() const {
    std::vector<Tensor> parts;
    for (const FlatParam& flat : flats_) parts.push_back(options_.stage == 0 ? flat.grads : flat.grads_shard());
    return parts;
}

Tensor Zero::full(const Param& wanted, Which which) const {
    const bool data = which == Which::data;
    if (options_.stage == 0 || (data && keeps_params())) return data ? wanted.data : wanted.grad;
    if (replicas_.rank() > 0) return {};
    for (const FlatParam& flat : flats_) {
        if (std::find(flat.unit->params.begin(), flat.unit->params.end(), &wanted) == flat.unit->params.end()) continue;
        // Piece by piece from the shards that have one, so that no rank holds more than this parameter.
        const Tensor shard = data ? flat.data_shard() : flat.grads_shard();
        Tensor full;
        if (flat.rank() == 0) full = Tensor(wanted.local_shape(), shard.dtype(), flat.device, Memory::workspace);
        for (int rank = 0; rank < flat.shards(); ++rank)
            for (const FlatParam::Piece& piece : flat.pieces(rank)) {
                if (piece.param != &wanted) continue;
                if (flat.rank() == 0) {
                    Tensor to = full.element_slice(piece.in_param, {piece.size});
                    if (rank == 0)
                        copy(to, piece.of(shard));
                    else
                        flat.ranks.recv(to, rank).wait();
                } else if (flat.rank() == rank) {
                    const Tensor part = piece.of(shard);  // on the host if it is offloaded
                    flat.ranks.send(converted(part, part.dtype(), flat.device), 0).wait();
                }
            }
        return full;
    }
    CHECK(false, "{} is not a parameter of this model", wanted.name);
    return {};
}

void Zero::for_each_state(const StateVisitor& visit) {
    for (FlatParam& flat : flats_) flat.optimizer->for_each_state(visit);
}

void Zero::states_changed() {
    for (FlatParam& flat : flats_) {
        flat.optimizer->states_changed();
        if (offloads() && flat.param_shard) copy(flat.param_shard, flat.host_params);
    }
    publish_weights();
}

GroupPtr Zero::state_replicas(const Param& param) const {
    return param.over_ep ? replicas_over_edp_ : replicas_of_states_;
}

bool Zero::counts(const FlatParam& flat) const {
    return replicas_.rank() == 0 && (options_.stage > 0 || flat.rank() == 0);
}

int64_t Zero::owned_elements() const {
    int64_t sum = 0;
    for (const FlatParam& flat : flats_)
        sum += std::clamp<int64_t>(flat.size - flat.rank() * flat.shard_size(), 0, flat.shard_size());
    return sum;
}

int64_t Zero::padded_elements() const {
    int64_t sum = 0;
    for (const FlatParam& flat : flats_) sum += flat.padded;
    return sum;
}

int64_t Zero::passed_elements() const {
    int64_t sum = 0;
    for (const FlatParam* flat : passes_) sum += flat->padded;
    return sum;
}

}  // namespace train70b
