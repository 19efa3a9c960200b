// What a rank of tensor parallelism keeps, to the byte; what it sends; what several ranks hold stays the same on all.
#include "04_tensor_parallel/complete/traffic.h"
#include "tests/tensor_parallel.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Every dtype with every recomputation and with key/value heads that are divided or copied; of fp64, half of them.
std::vector<TrainOptions> variants(const Text& text) {
    std::vector<TrainOptions> list;
    for (const char* dtype : {"fp32", "bf16", "fp64"})
        for (const char* recompute : {"none", "pointwise", "selective", "full"})
            for (const int64_t kv_heads : {8, 2}) {
                const bool in_part = (kv_heads == 8) == (recompute == std::string("none"));
                if (!in_part && dtype == std::string("fp64")) continue;
                TrainOptions& o = list.emplace_back(shape(text, kv_heads));
                o.dtype = dtype;
                o.recompute = recompute;
            }
    const auto add = [&](const char* dtype, const char* recompute, int64_t kv_heads) -> LlamaConfig& {
        TrainOptions& o = list.emplace_back(shape(text, kv_heads));
        o.dtype = dtype;
        o.recompute = recompute;
        return o.model;
    };
    add("fp32", "none", 2).qkv_bias = true;
    add("bf16", "selective", 8).qk_norm = true;
    LlamaConfig& wide = add("fp32", "none", 2);  // norms of q and k; heads of 12 instead of 8
    wide.qk_norm = true, wide.head_size = 12;
    add("fp32", "pointwise", 8).head_size = 4;
    return list;
}

// The third step of one micro-batch: what a rank keeps at the peak, what it sends in the first block and in all.
struct ThirdStep {
    MemoryBytes peak;
    Traffic block, step;
    Traffic block_formula, step_formula;
    ActivationFormula activations;

    ThirdStep(TrainOptions o, const TensorLayout& layout) {
        o.steps = 3;
        o.global_batch = o.micro_batch * world().size() / layout.tp;
        const MemoryBytes before = ledger().now();
        Sharded run(o, world(), layout);
        const auto count = [&](Traffic* traffic, CommStats stats) {
            std::erase_if(stats.operations, [](const auto& entry) { return entry.first.starts_with("dp."); });
            step.add(stats);
            if (traffic) traffic->add(stats);
        };
        const auto count_until_here = [&](Traffic* traffic) {
            if (run.session.reports.size() == 2) count(traffic, world().take_stats());
        };
        auto& wrappers = run.session.model.blocks.front().unit.wrappers;
        wrappers.insert(wrappers.begin(), [&](Tape& tape, const Var& x, const Unit::Body& body) {
            count_until_here(nullptr);
            tape.record([&] { count_until_here(&block); });
            Var y = body(tape, x);
            count_until_here(&block);
            tape.record([&] { count_until_here(nullptr); });
            return y;
        });
        run.session.run();
        count(nullptr, {.operations = run.stats.sent});
        peak = run.session.reports.back().peak.above(before).kind;
        const Llama::Options& types = run.session.model.options;
        const TrafficShape shape{o.micro_batch * o.seq_len, layout.tp,      types.dtype,
                                 types.grad_dtype,          layout.options, types.recompute,
                                 types.recompute_every};
        activations = activation_formula(o.model, o.micro_batch, o.seq_len, types.dtype, types.recompute,
                                         {layout.tp, layout.options.sequence_parallel, 0, types.recompute_every});
        block_formula = layer_traffic(o.model, shape);
        step_formula = step_traffic(o.model, shape, 1);
    }
};

}  // namespace

TEST_CASE("what several ranks hold stays the same on all of them, bit for bit: norm weights, copied key/value heads") {
    const Text text;
    int64_t number = 0;
    for (const char* dtype : {"fp32", "bf16"})
        for (const std::string algorithm : {"ring", "halving", "library"})
            for (const TensorLayout& layout : layouts()) {
                if (algorithm != "ring" && layout.options.overlap) continue;
                if (!in_quarter(number++)) continue;
                TrainOptions o = shape(text, 2);
                o.dtype = dtype;
                o.lr = o.min_lr = 1e-2;
                const std::string before = world().use(algorithm);
                Sharded run(o, world(), layout);
                std::vector<std::vector<double>> start;
                for (const Param* param : run.session.model.params()) start.push_back(read(param->data));
                run.session.run();
                world().use(before);
                const std::vector<Param*> params = run.session.model.params();
                Failures failures;
                int copied = 0;
                for (size_t i = 0; i < params.size(); ++i) {
                    const std::vector<double> values = read(params[i]->data);
                    if (dtype == std::string("fp32"))
                        failures.expect(values != start[i], params[i]->name + " has not changed");
                    // All data-parallel copies, and the ranks with the same rectangle, in one comparison: by its place.
                    std::vector<double> mine(values.begin(), values.end());
                    mine.push_back(double(params[i]->local.row_begin * 1000 + params[i]->local.col_begin));
                    const std::vector<double> all = world().gather(mine);
                    for (int r = 0; r < world().size(); ++r) {
                        const auto other = all.begin() + r * int64_t(mine.size());
                        if (*(other + int64_t(mine.size()) - 1) != mine.back()) continue;
                        ++copied;
                        failures.expect(std::equal(mine.begin(), mine.end(), other),
                                        fmt::format("{} differs from rank {}'s", params[i]->name, r));
                    }
                }
                INFO(layout.text(), ", ", std::string(dtype), ", all-reduce ", algorithm);
                EXPECT_NONE(failures);
                EXPECT_EVERYWHERE(copied > int(params.size()));
            }
}

TEST_CASE("the ledger and the wire: shards, activations, collectives of a block and of a step, by the formulas") {
    const Text text;
    int64_t run_number = 0;
    std::vector<TrainOptions> all_variants = variants(text);
    all_variants.push_back(shape(text, 8));
    all_variants.back().recompute = "full";
    all_variants.back().recompute_every = 2;
    for (TrainOptions o : all_variants) {
        o.seq_len = 64;
        o.model.vocab = 136;
        const int64_t wide = o.dtype == "bf16" ? 2 : o.dtype == "fp64" ? 8 : 4;
        const int64_t grads = o.dtype == "fp64" ? 8 : 4;
        const int64_t states = o.dtype == "bf16" ? 12 : o.dtype == "fp64" ? 16 : 8;
        int64_t all = 0;
        for (const TensorLayout& layout : layouts()) {
            if (!in_slice(run_number++)) continue;
            const bool by_tp = layout.options.sequence_parallel && o.model.kv_heads == 8;
            if (by_tp && all == 0) all = ThirdStep(o, {.tp = 1}).peak[int(Memory::activations)];
            const ThirdStep run(o, layout);
            const MemoryBytes& kinds = run.peak;
            // Every rank holds full norm weights and at least one key/value head; the rest is sharded.
            const int64_t kv = 2 * 2 * (o.model.qkv_bias ? 65 : 64) * o.model.kv_width(),
                          norms = 5 * 64 + (o.model.qk_norm ? 2 * 2 * o.model.head_dim() : 0);
            const int64_t elements =
                (o.model.parameters() - norms - kv) / layout.tp + norms + kv / std::min(layout.tp, o.model.kv_heads);
            INFO(layout.text(), " ", o.dtype, " recompute ", o.recompute, " kv heads ", o.model.kv_heads, ": ",
                 kinds[int(Memory::activations)], " against ", run.activations.total, ", whole ", all, "; ",
                 run.block.text(), " in a block, ", run.step.bytes(), " against ", run.step_formula.bytes());
            EXPECT_EVERYWHERE(tensor_parallel_elements(o.model, layout.tp) == elements);
            EXPECT_EVERYWHERE(kinds[int(Memory::params)] == wide * elements);
            EXPECT_EVERYWHERE(kinds[int(Memory::grads)] == grads * elements);
            EXPECT_EVERYWHERE(kinds[int(Memory::optimizer)] == states * elements);
            const double activations = double(kinds[int(Memory::activations)]);
            // 4%: in a model of two layers the head counts, whose input goes before its gradient comes
            EXPECT_EVERYWHERE(std::abs(activations / double(run.activations.total) - 1) <= 0.04);
            if (by_tp) EXPECT_EVERYWHERE(std::abs(activations * double(layout.tp) / double(all) - 1) <= 0.05);
            EXPECT_EVERYWHERE(run.block.operations == run.block_formula.operations);
            EXPECT_EVERYWHERE(run.step.operations == run.step_formula.operations);
            if (o.recompute != "none" || o.dtype != "fp32") continue;
            // The formulas, once more by hand: n bytes of one tensor of activations.
            const int64_t n = o.micro_batch * o.seq_len * 64 * 4, share = n * (layout.tp - 1) / layout.tp;
            EXPECT(run.block.bytes() == (layout.options.sequence_parallel ? 10 : 8) * share);
            const std::string calls =
                layout.options.sequence_parallel ? "6 all_gather, 4 reduce_scatter" : "4 all_reduce";
            if (!layout.options.overlap) EXPECT(run.block.text() == calls);
        }
    }
    // and with accumulation and data parallelism, by the trainer's own books
    for (TensorLayout layout : layouts()) {
        if (!in_quarter(run_number++)) continue;
        layout.micro_batches = 2;
        TrainOptions o = shape(text, 2);
        o.steps = 2;
        Sharded run(o, world(), layout);
        run.session.run();
        const LlamaConfig& c = o.model;
        const TrafficShape each{run.session.options.micro_batch * o.seq_len, layout.tp, DType::f32, DType::f32,
                                layout.options};
        Traffic tensor_only;
        CommStats sent{.operations = run.stats.sent};
        std::erase_if(sent.operations, [](const auto& entry) { return entry.first.starts_with("dp."); });
        tensor_only.add(sent);
        INFO(layout.text());
        EXPECT_EVERYWHERE(tensor_only.operations == step_traffic(c, each, 2).operations);
        const int64_t copies = 8 / layout.tp, gradients = 4 * tensor_parallel_elements(c, layout.tp);
        if (copies > 1)
            EXPECT_EVERYWHERE(run.stats.sent["dp.all_reduce"].bytes == 2 * gradients * (copies - 1) / copies);
    }
}
