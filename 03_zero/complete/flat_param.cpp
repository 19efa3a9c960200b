#include "03_zero/complete/flat_param.h"

#include "03_zero/complete/offload.h"

namespace train70b {

std::vector<FlatParam> flat_params(Llama& model, const Comm& shards, const Comm& edp) {
    std::vector<FlatParam> flats;
    for (Unit* unit : model.units()) {
        FlatParam& flat = flats.emplace_back();
        flat.unit = unit;
        flat.ranks = flat.over_ep() ? edp : shards;
        const int64_t N = flat.shards();
        flat.size = total_size(unit->params);
        flat.padded = (flat.size + N - 1) / N * N;
        flat.device = model.options.device;
    }
    return flats;
}

std::vector<FlatParam::Piece> FlatParam::pieces(int64_t of_rank) const {
    std::vector<Piece> list;
    const int64_t begin = of_rank * shard_size(), end = begin + shard_size();
    int64_t param_begin = 0;
    for (Param* param : unit->params) {
        const int64_t param_end = param_begin + param->local.size();
        const int64_t from = std::max(begin, param_begin), to = std::min(end, param_end);
        if (from < to) list.push_back({param, from - param_begin, from - begin, to - from});
        param_begin = param_end;
    }
    return list;
}

std::vector<Segment> FlatParam::segments(int64_t of_rank, const Tensor& data, const Tensor& grads) const {
    std::vector<Segment> list;
    for (const Piece& piece : pieces(of_rank))
        list.push_back({piece.param, piece.in_param, piece.of(data), piece.of(grads)});
    return list;
}

void Unsharder::start(FlatParam& flat) {
    flat.params = Tensor({flat.padded}, flat.data_shard().dtype(), flat.device, Memory::workspace);
    Tensor shard = flat.param_shard;
    if (!shard) {  // on the host: copied into its slice of the unsharded parameters first
        shard = flat.own_shard_of(flat.params);
        HostCopy(shard, flat.host_params).device_waits();
    }
    flat.all_gather = flat.ranks.all_gather(flat.params, shard);
}

void Unsharder::finish(FlatParam& flat) {
    flat.all_gather.wait();
    bind_data(flat.unit->params, flat.params.element_slice(0, {flat.size}));
}

}  // namespace train70b
