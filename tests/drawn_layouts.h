#pragma once
// Layouts that nobody chose: models, meshes and techniques drawn at random.
#include "01_single_gpu/core/random.h"
#include "08_3d_full/complete/layout/config.h"
#include "tests/training.h"

namespace train70b::test {

// Draws that depend on the layout's number and the attempt alone, so that every rank draws alike.
class Dice {
  public:
    Dice(uint64_t layout, uint64_t attempt) : key_(layout * 1000 + attempt) {}
    int64_t below(int64_t n) { return int64_t(random_bits(key_, counter_++) % uint64_t(n)); }
    template <class T>
    T one_of(std::initializer_list<T> list) {
        return list.begin()[below(int64_t(list.size()))];
    }
    template <class Entry>
    std::string name_from(const std::vector<Entry>& registry) {
        return registry[size_t(below(int64_t(registry.size())))].name;
    }

  private:
    uint64_t key_, counter_ = 0;
};

struct Drawn {
    TrainOptions options;
    ParallelConfig config;

    std::string text() const {
        const LlamaConfig& m = options.model;
        return fmt::format(
            "{} x {}, {}/{} heads of {}{}{}{}{}, ffn {}, vocabulary {}, {} tokens, {} sequences by {}; {}, {}, ZeRO {} "
            "hybrid {} offload {} prefetch {}, sequence {}, overlap {}, {}, recompute {} every {}, lr {}, init std {}, "
            "document token {}, loss by {} rows, window {} in {} of the layers, sinks {}, latents {} {} {}, further "
            "token {}, {}",
            m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim(), m.qkv_bias ? ", biases" : "",
            m.qk_norm ? ", norms of q and k" : "", m.rope_scaling ? ", scaled RoPE" : "", m.tied ? ", tied" : "", m.ffn,
            m.vocab, options.seq_len, options.global_batch, options.micro_batch, config.mesh.text(),
            config.pipeline.schedule, config.zero.stage, config.zero.hybrid_shard, int(config.zero.offload),
            config.zero.prefetch, config.tensor.sequence_parallel, config.tensor.overlap, config.context.algorithm,
            options.recompute, options.recompute_every, options.lr, options.init_std,
            options.document_token.value_or(-1), options.loss_chunk, m.window, m.window_share(), m.sinks,
            m.latent.kv_rank, m.latent.q_rank, m.latent.rope_dim, m.multi_token, options.optimizer);
    }
};

// Usage errors of its run are refusals: draw again, with the next attempt.
inline Drawn draw(const Text& text, int64_t ranks, uint64_t layout, uint64_t attempt) {
    Dice dice(layout, attempt);
    Drawn drawn;
    Mesh& mesh = drawn.config.mesh;
    mesh = {.tp = 1, .cp = 1, .dp = 1, .pp = 1};
    for (int64_t left = ranks; left > 1; left /= 2) *dice.one_of({&mesh.tp, &mesh.cp, &mesh.dp, &mesh.pp}) *= 2;

    TrainOptions& o = drawn.options = tiny(text);
    o.dtype = "fp64";
    o.steps = kThorough ? 20 : 2;
    o.warmup_steps = 20;  // the default; after 2 of them a step may diverge for a moment, and amplify the last bits
    const bool deep = layout % 12 == 3;  // 12 layers of 192: where fp32 has nothing but its rounding left
    const int64_t heads = dice.one_of({4, 6, 8, 8, 12}), head_dim = dice.one_of({2, 4, 6, 10});
    o.model = {.name = "drawn",
               .layers = mesh.pp * dice.one_of({1, 1, 2, 3}),
               .hidden = heads * head_dim,
               .heads = heads,
               .kv_heads = dice.one_of({heads, heads / 2, int64_t(1), int64_t(2)}),
               .ffn = dice.one_of({24, 40, 48, 77}),
               .vocab = dice.one_of({128, 131, 256})};
    o.seq_len = dice.one_of({8, 16, 24, 32, 33});
    if (deep) {
        o.model = {.name = "deep", .layers = 12, .hidden = 192, .heads = 8, .kv_heads = 4, .ffn = 256, .vocab = 128};
        o.seq_len = 16;
    }
    o.micro_batch = dice.one_of({1, 1, 2});
    o.global_batch = o.micro_batch * mesh.dp * dice.one_of({1, 2, 4});
    o.lr = dice.one_of({1e-4, 1e-3, 3e-3});
    o.min_lr = o.lr / 10;
    o.init_std = dice.one_of({0.02, 0.05, 0.1});
    o.weight_decay = dice.one_of({0.0, 0.1});
    o.clip = dice.one_of({0.0, 0.5, 1.0});
    o.recompute = dice.one_of({"none", "pointwise", "selective", "full"});

    ZeroOptions& zero = drawn.config.zero;
    zero.stage = int(dice.below(4));
    zero.prefetch = dice.below(3);
    if (zero.stage > 0 && dice.below(3) == 0) zero.hybrid_shard = dice.one_of({2, 4});
    if (zero.stage > 0 && dice.below(4) == 0) zero.offload = Offload::optimizer;
    if (zero.stage == 3 && dice.below(4) == 0) zero.offload = Offload::all;
    drawn.config.tensor = {dice.below(2) == 0, dice.below(3) == 0};
    drawn.config.pipeline.schedule = dice.name_from(schedule_generators());
    drawn.config.context.algorithm = dice.name_from(context_algorithms());
    // Of the corpus of the tests: newline, space, a letter; drawn last, so that everything else stays as it was.
    if (dice.below(2) == 0) o.document_token = dice.one_of({int64_t('\n'), int64_t(' '), int64_t('e')});

    switch (dice.below(4)) {  // the family; Llama in one of four
        case 1: o.model.qkv_bias = true; break;
        case 2: o.model.qk_norm = true; break;
        case 3: o.model.rope_scaling = RopeScaling{.factor = 4, .linear = true}; break;
    }
    if (dice.below(2) == 0) o.model.head_size = dice.one_of({2, 4, 8, 16});
    o.model.tied = dice.below(2) == 0;
    o.loss_chunk = dice.one_of({0, 1, 5, 16});
    if (zero.offload == Offload::none && dice.below(2) == 0) o.optimizer = drawn.config.optimizer = "muon";
    if (o.recompute != "none") o.recompute_every = dice.one_of({1, 2, 3});
    if (dice.below(2) == 0) o.model.window = dice.one_of({2, 5, 12});
    if (o.model.window > 0 && dice.below(2) == 0)
        for (int64_t l = 0; l < o.model.layers; ++l) o.model.windowed.push_back(l % 2 == 0);
    o.model.sinks = dice.below(2) == 0;
    if (!o.model.qkv_bias && !o.model.qk_norm && dice.below(2) == 0) {
        o.model.latent = {dice.one_of({3, 8, 10}), dice.one_of({0, 6, 9}), dice.one_of({2, 4})};
        o.model.kv_heads = o.model.heads;
    }
    o.model.multi_token = !o.model.tied && dice.below(2) == 0;
    return drawn;
}

}  // namespace train70b::test
