// The sizes of a rank.
#include <algorithm>

#include "01_single_gpu/core/registry.h"
#include "08_3d_full/plan/memory_units.h"

namespace train70b {

UnitShapes::UnitShapes(const Workload& w, const ParallelConfig& config, int64_t rank) {
    const LlamaConfig& c = w.model;
    const Mesh& mesh = config.mesh;
    const int64_t tp = mesh.tp;
    a = size_of(w.dtype);
    s = size_of(stats_dtype(w.dtype));
    tensor_parallel = tp > 1;
    sequence = tp > 1 && config.tensor.sequence_parallel;
    overlap = tp > 1 && config.tensor.overlap;
    R = w.micro_batch * (w.seq_len / mesh.cp);
    R_l = sequence ? R / tp : R;
    E = c.hidden;
    q = c.q_width(tp);
    kv = c.kv_width(tp);
    D = c.head_dim();
    F = c.ffn / tp;
    V = (c.vocab + tp - 1) / tp;
    biases = c.qkv_bias;
    norms = c.qk_norm;
    recompute = w.recompute;
    if (mesh.cp > 1) {
        const ContextAlgorithm& algorithm =
            find_entry(context_algorithms(), "--cp-algorithm", config.context.algorithm);
        U = algorithm.ulysses(mesh.cp, config.context.ulysses_size);
        ring = mesh.cp / U;
        chunks = algorithm.chunks;
        gather = algorithm.gather;
        position = config.mesh.coordinate(rank).cp / U;
        chunk_len = w.seq_len / mesh.cp * U / chunks;
    }
    if (config.fp8.recipe == "off") return;
    const std::string& recipe = config.fp8.recipe;
    int64_t divisor = 16;
    if (recipe == "rowwise") scaling = weight_scaling = Scaling::row;
    if (recipe == "blockwise") scaling = Scaling::vec128, weight_scaling = Scaling::block128, divisor = 128;
    for (const Layer layer : {Layer::qkv, Layer::o, Layer::gate_up, Layer::down})
        fp8[size_t(layer)] = in(layer) % divisor == 0 && out(layer) % divisor == 0 && R % divisor == 0;
    const bool casts = scaling == Scaling::tensor && config.zero.stage == 3 && config.zero.offload != Offload::all;
    gathered = casts;
}

int64_t UnitShapes::in(Layer layer) const { return layer == Layer::o ? q : layer == Layer::down ? F : E; }
int64_t UnitShapes::out(Layer layer) const {
    switch (layer) {
        case Layer::qkv: return q + 2 * kv;
        case Layer::gate_up: return 2 * F;
        case Layer::head: return V;
        default: return E;
    }
}

}  // namespace train70b
