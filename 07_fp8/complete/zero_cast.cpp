#include "07_fp8/complete/zero_cast.h"

#include <algorithm>
#include <map>

namespace train70b {

namespace {

class Fp8Unsharder : public Unsharder {
  public:
    explicit Fp8Unsharder(const Fp8& fp8) : fp8_(fp8) {
        if (fp8.recipe->scaling(Operand::weight) != Scaling::tensor) return;
        for (size_t i = 0; i < fp8_.layers.size(); ++i)
            for (const Param* weight : fp8_.layers[i]->linear->weights) layer_of_[weight] = i;
    }

    void params_changed() override {
        std::vector<WeightOperand> weights;
        for (const auto& layer : fp8_.layers) weights.push_back({&layer->weight, layer->linear->weight()});
        fp8_.recipe->weights_changed(weights);
    }

    // The scales of all layers take one all-reduce.
    void shards_changed(const std::vector<FlatParam>& flats, const Comm& shards) override {
        if (std::none_of(flats.begin(), flats.end(), [this](const FlatParam& flat) { return casts(flat); })) return;
        Tensor amax = zeros({int64_t(fp8_.layers.size())}, DType::f32, flats[0].device, Memory::workspace), none;
        for (const FlatParam& flat : flats) {
            if (!casts(flat)) continue;
            for (const FlatParam::Piece& piece : flat.pieces(flat.rank())) {
                if (!casts(*piece.param)) continue;
                const int64_t layer = int64_t(layer_of_.at(piece.param));
                Tensor of_layer = amax.row_slice(layer, layer + 1);
                compute_amax(of_layer, none, piece.of(flat.param_shard), Scaling::tensor);
            }
        }
        shards.all_reduce(amax, Reduce::max).wait();
        if (fp8_.tensor_ranks.size() > 1) fp8_.tensor_ranks.all_reduce(amax, Reduce::max).wait();
        for (size_t i = 0; i < fp8_.layers.size(); ++i) {
            Tensor& scale = fp8_.layers[i]->gathered_scale_inv;
            if (!scale) scale = Tensor({1}, DType::f32, amax.device(), Memory::workspace);
            compute_scale_inv(scale, amax.row_slice(int64_t(i), int64_t(i) + 1), DType::e4m3);
        }
    }

    // The FP8 buffer has an element for every parameter element, cast or not: offsets are those of the parameters.
    void start(FlatParam& flat) override {
        if (!casts(flat)) return Unsharder::start(flat);
        flat.params = Tensor({flat.padded}, DType::e4m3, flat.device, Memory::workspace);
        const Tensor own_fp8 = flat.own_shard_of(flat.params);
        int64_t longest = 0;
        for (int64_t shard = 0; shard < flat.shards(); ++shard) longest = std::max(longest, for_rest(flat, shard));
        Rest& rest = rests_[&flat];
        rest.data = Tensor({flat.shards(), longest}, flat.param_shard.dtype(), flat.device, Memory::workspace);
        const Tensor own_rest = rest.data.row_slice(flat.rank(), flat.rank() + 1);
        for (const FlatParam::Piece& piece : flat.pieces(flat.rank())) {
            if (!casts(*piece.param)) continue;
            Quantized to{piece.of(own_fp8).view({1, piece.size}),
                         fp8_.layers[layer_of_.at(piece.param)]->gathered_scale_inv, Scaling::tensor},
                no_transpose;
            Tensor no_amax;
            cast(to, no_transpose, no_amax, piece.of(flat.param_shard).view({1, piece.size}));
        }
        for_rest(flat, flat.rank(), [&](const FlatParam::Piece& piece, int64_t begin) {
            Tensor to = own_rest.element_slice(begin, {piece.size});
            copy(to, piece.of(flat.param_shard));
        });
        flat.all_gather = flat.ranks.all_gather(flat.params, own_fp8);
        if (longest > 0) rest.all_gather = flat.ranks.all_gather(rest.data, own_rest);
    }

    // Assembles the parameters that were not cast from the shards, contiguous: a layer may use several weights as one.
    void finish(FlatParam& flat) override {
        Unsharder::finish(flat);
        if (!casts(flat)) return;
        Rest rest = std::move(rests_.at(&flat));
        rests_.erase(&flat);
        rest.all_gather.wait();
        std::vector<Param*> params;
        for (Param* param : flat.unit->params)
            if (!casts(*param)) params.push_back(param);
        bind_data(params, Tensor({total_size(params)}, rest.data.dtype(), rest.data.device(), Memory::workspace));
        for (int64_t shard = 0; shard < flat.shards(); ++shard)
            for_rest(flat, shard, [&](const FlatParam::Piece& piece, int64_t begin) {
                Tensor to = piece.param->data.element_slice(piece.in_param, {piece.size});
                copy(to, rest.data.row_slice(shard, shard + 1).element_slice(begin, {piece.size}));
            });
    }

    void wait(FlatParam& flat) override {
        Unsharder::wait(flat);
        const auto rest = rests_.find(&flat);
        if (rest == rests_.end()) return;
        rest->second.all_gather.wait();
        rests_.erase(rest);
    }

  private:
    // The elements of a unit that are not cast: for each shard its own, contiguous.
    struct Rest {
        Tensor data;  // (shards, the largest number in any shard)
        Work all_gather;
    };
    bool casts(const Param& param) const { return layer_of_.contains(&param); }
    bool casts(const FlatParam& flat) const {
        const auto& params = flat.unit->params;
        return flat.param_shard && std::any_of(params.begin(), params.end(), [this](Param* p) { return casts(*p); });
    }
    // Calls body(piece, begin) for each piece of a shard that is not cast; begin: its offset in the shard's row of
    // Rest::data. Returns their number of elements.
    int64_t for_rest(const FlatParam& flat, int64_t shard,
                     const std::function<void(const FlatParam::Piece&, int64_t begin)>& body = {}) const {
        int64_t begin = 0;
        for (const FlatParam::Piece& piece : flat.pieces(shard)) {
            if (casts(*piece.param)) continue;
            if (body) body(piece, begin);
            begin += piece.size;
        }
        return begin;
    }

    const Fp8 fp8_;
    std::map<const Param*, size_t> layer_of_;  // of the weights that are cast
    std::map<const FlatParam*, Rest> rests_;
};

}  // namespace

std::unique_ptr<Unsharder> make_fp8_unsharder(const Fp8& fp8) {
    if (fp8.layers.empty()) return nullptr;
    return std::make_unique<Fp8Unsharder>(fp8);
}

}  // namespace train70b
