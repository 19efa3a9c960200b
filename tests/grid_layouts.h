#pragma once
// The layouts of the parity grid (08_grid): each technique with each other one, and all together, on 16 ranks.
#include "08_3d_full/complete/layout/config.h"
#include "tests/training.h"

namespace train70b::test {

// Four layers, so that four parts of a pipeline have one each; a vocabulary that nothing divides.
inline TrainOptions grid_shape(const Text& text) {
    TrainOptions o =
        of_model(tiny(text), {.layers = 4, .hidden = 32, .heads = 8, .kv_heads = 4, .ffn = 48, .vocab = 131}, 32, 16);
    o.micro_batch = 1;
    return o;
}

struct GridLayout {
    Mesh mesh;
    const char* pipeline = "1f1b";
    int zero = 0;
    bool sequence = false, overlap = false;
    const char* context = "zigzag";
    const char* recompute = "none";
    int64_t hybrid_shard = 0;
    Offload offload = Offload::none;
    int64_t kv_heads = 4;
    bool tied = false;

    // The family goes round the grid: 0 Llama, 1 biases of q, k, v, 2 norms of q and k with wide heads.
    void use_family(LlamaConfig& model, int64_t family) const {
        model.kv_heads = kv_heads;
        model.qkv_bias = family == 1;
        model.qk_norm = family == 2;
        if (family == 2) model.head_size = 6;
    }
    std::string text() const {
        return fmt::format("{}, {}, ZeRO {}{}{}, sequence {}, overlap {}, {}, recompute {}, kv heads {}{}", mesh.text(),
                           pipeline, zero, hybrid_shard ? fmt::format(" hybrid {}", hybrid_shard) : "",
                           offload == Offload::none ? "" : " offload " + kOffloadNames[size_t(offload)], sequence,
                           overlap, context, recompute, kv_heads, tied ? ", tied" : "");
    }
    ParallelConfig config() const {
        ParallelConfig config;
        config.mesh = mesh;
        config.zero.stage = zero;
        config.zero.hybrid_shard = hybrid_shard;
        config.zero.offload = offload;
        config.zero.offload_dir = ".";
        config.tensor = {sequence, overlap};
        config.pipeline.schedule = pipeline;
        config.context.algorithm = context;
        return config;
    }
};

inline std::vector<GridLayout> grid_layouts() {
    std::vector<GridLayout> list = {
        // each technique with each other one
        {.mesh = {.dp = 16}},
        {.mesh = {.dp = 16}, .zero = 3},
        {.mesh = {.tp = 8, .dp = 2}, .sequence = true},
        {.mesh = {.tp = 4, .dp = 4}, .zero = 1},
        {.mesh = {.tp = 4, .dp = 4}, .zero = 2, .sequence = true, .recompute = "full"},
        {.mesh = {.tp = 4, .dp = 4}, .zero = 3, .sequence = true, .overlap = true, .recompute = "selective"},
        {.mesh = {.tp = 4, .dp = 4}, .zero = 3, .sequence = true, .kv_heads = 1},
        {.mesh = {.tp = 4, .cp = 4}},
        {.mesh = {.tp = 2, .cp = 4, .dp = 2}, .sequence = true, .context = "ring", .recompute = "selective"},
        {.mesh = {.tp = 2, .cp = 2, .dp = 4}, .zero = 3, .sequence = true, .context = "ulysses"},
        {.mesh = {.cp = 8, .dp = 2}, .zero = 2, .context = "hybrid", .recompute = "full"},
        {.mesh = {.cp = 4, .dp = 4}, .zero = 3, .context = "ring", .hybrid_shard = 4},
        {.mesh = {.cp = 16}, .zero = 1},
        {.mesh = {.cp = 16}, .zero = 3, .context = "gather", .recompute = "pointwise"},
        {.mesh = {.tp = 4, .cp = 2, .dp = 2}, .sequence = true, .context = "gather", .kv_heads = 1},
        {.mesh = {.dp = 4, .pp = 4}, .pipeline = "gpipe", .zero = 1},
        {.mesh = {.dp = 4, .pp = 4}, .pipeline = "1f1b", .zero = 2},
        {.mesh = {.dp = 4, .pp = 4}, .pipeline = "1f1b", .zero = 3, .recompute = "full"},
        {.mesh = {.dp = 4, .pp = 4}, .pipeline = "zero-bubble", .zero = 3},
        {.mesh = {.dp = 4, .pp = 4}, .pipeline = "zero-bubble", .zero = 2, .recompute = "full"},
        {.mesh = {.dp = 8, .pp = 2}, .pipeline = "interleaved", .zero = 3},
        {.mesh = {.dp = 8, .pp = 2}, .pipeline = "interleaved", .zero = 2, .offload = Offload::optimizer},
        {.mesh = {.tp = 4, .pp = 4}, .pipeline = "zero-bubble", .sequence = true},
        {.mesh = {.tp = 4, .dp = 2, .pp = 2}, .pipeline = "interleaved", .sequence = true, .overlap = true},
        {.mesh = {.tp = 4, .dp = 2, .pp = 2}, .pipeline = "naive", .recompute = "selective"},
        {.mesh = {.cp = 4, .pp = 4}, .pipeline = "zero-bubble"},
        {.mesh = {.cp = 2, .dp = 4, .pp = 2}, .pipeline = "interleaved", .zero = 1, .context = "ulysses"},
        // all together
        {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2}, .sequence = true},
        {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2}, .zero = 1, .sequence = true, .recompute = "full"},
        {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2},
         .pipeline = "zero-bubble",
         .zero = 2,
         .sequence = true,
         .overlap = true},
        {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2}, .pipeline = "interleaved", .zero = 3, .sequence = true},
        {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2},
         .pipeline = "zero-bubble",
         .zero = 3,
         .context = "ring",
         .recompute = "selective"},
        {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2},
         .pipeline = "gpipe",
         .zero = 3,
         .sequence = true,
         .context = "ulysses",
         .offload = Offload::all},
        {.mesh = {.tp = 2, .cp = 4, .dp = 1, .pp = 2},
         .pipeline = "zero-bubble",
         .zero = 3,
         .sequence = true,
         .context = "hybrid",
         .recompute = "full",
         .kv_heads = 1},
        {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2},
         .pipeline = "zero-bubble",
         .zero = 3,
         .sequence = true,
         .overlap = true,
         .context = "gather",
         .recompute = "pointwise"},
        {.mesh = {.tp = 2, .cp = 4, .dp = 1, .pp = 2},
         .pipeline = "interleaved",
         .zero = 2,
         .context = "gather",
         .recompute = "selective",
         .kv_heads = 2},
        // embedding and head on the first pipeline rank
        {.mesh = {.dp = 8, .pp = 2}, .pipeline = "zb-v", .zero = 3, .recompute = "full"},
        {.mesh = {.tp = 4, .dp = 2, .pp = 2},
         .pipeline = "dualpipe-v",
         .zero = 2,
         .sequence = true,
         .overlap = true,
         .kv_heads = 1},
        {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2}, .pipeline = "zb-v", .zero = 1, .sequence = true},
        {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2},
         .pipeline = "dualpipe-v",
         .zero = 3,
         .context = "ulysses",
         .recompute = "selective"},
    };
    return list;
}

}  // namespace train70b::test
