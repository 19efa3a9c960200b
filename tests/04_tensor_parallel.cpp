// Every layout of tensor parallelism against one rank: losses, norms, gathered gradients, evaluation.
#include "03_zero/complete/zero.h"
#include "04_tensor_parallel/complete/traffic.h"
#include "tests/tensor_parallel.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("tp 2, 4, 8, sequence parallel or not, overlapped or not, with data parallelism: one rank's run") {
    const Text text;
    REQUIRE(world().size() == 8);
    int64_t pair = 0, run_number = 0;
    for (const Parity& parity : kParity)
        for (const int64_t kv_heads : {8, 2, 1})
            for (const char* recompute : {"none", "pointwise", "selective", "full"}) {
                TrainOptions o = shape(text, kv_heads);
                o.dtype = parity.dtype;
                o.recompute = recompute;
                // On each commit a quarter of the layouts with this pair; an eighth with other pairs, or accumulation.
                const bool in_full = kv_heads == 2 && recompute == std::string("none");
                std::unique_ptr<Session> one;
                bool first = true;
                int64_t number = 0;
                for (TensorLayout layout : layouts())
                    for (const int64_t m : {1, 2}) {
                        layout.micro_batches = m;
                        if (m > 1 && !in_full) continue;
                        if (parity.skips(number++)) continue;
                        if (in_full && m == 1 ? !in_quarter(number / 2) : !in_slice(pair++)) continue;
                        if (!in_sanitized_slice(run_number++)) continue;
                        if (std::exchange(first, false)) one = run_on_one_rank(o);
                        Sharded run(o, world(), layout);
                        run.session.run();
                        const Farthest deviation = deviation_on_rank_0(run.session, one);
                        INFO(o.dtype, ", ", layout.text(), ", kv heads ", kv_heads, ", recompute ",
                             std::string(recompute), ": ", deviation);
                        EXPECT_EVERYWHERE(on_rank_0(deviation <= parity.bound));
                    }
            }
}

TEST_CASE("other families: biases of q, k, v; norms of q and k, of heads that are wider or narrower: one rank's run") {
    const Text text;
    struct Family {
        const char* name;
        bool qkv_bias, qk_norm;
        int64_t head_size;
    };
    int64_t pair = 0, drawn = 0;
    for (const Parity& parity : kParity)
        for (const Family& family : {Family{"biases", true, false, 0},
                                     {"norms of q and k", false, true, 0},
                                     {"norms, wide heads", false, true, 12},
                                     {"narrow heads", false, false, 4}})
            for (const int64_t kv_heads : {2, 1}) {
                TrainOptions o = shape(text, kv_heads);
                o.dtype = parity.dtype;
                o.model.qkv_bias = family.qkv_bias;
                o.model.qk_norm = family.qk_norm;
                o.model.head_size = family.head_size;
                o.recompute = std::array{"none", "pointwise", "selective", "full"}[size_t(pair++ % 4)];
                std::unique_ptr<Session> one;
                bool first = true;
                int64_t number = 0;
                for (const TensorLayout& layout : layouts()) {
                    if (parity.skips(number++) || !in_slice(drawn++)) continue;
                    if (std::exchange(first, false)) one = run_on_one_rank(o);
                    Sharded run(o, world(), layout);
                    run.session.run();
                    const Farthest deviation = deviation_on_rank_0(run.session, one);
                    INFO(o.dtype, ", ", std::string(family.name), ", ", layout.text(), ", kv heads ", kv_heads,
                         ", recompute ", o.recompute, ": ", deviation);
                    EXPECT_EVERYWHERE(on_rank_0(deviation <= parity.bound));
                }
            }
}

TEST_CASE("tied embeddings, a vocabulary that nothing divides: one rank's run, the formula's bytes and elements") {
    const Text text;
    int64_t drawn = 0;
    for (const Parity& parity : kParity) {
        TrainOptions o = shape(text, 2);
        o.dtype = parity.dtype;
        o.model.tied = true;
        const auto one = run_on_one_rank(o);
        int64_t number = 0;
        for (TensorLayout layout : layouts())
            for (const int64_t m : {1, 2}) {
                layout.micro_batches = m;
                if (parity.skips(number++) || !in_quarter(drawn++)) continue;
                Sharded run(o, world(), layout);
                run.session.run();
                const Farthest deviation = deviation_on_rank_0(run.session, one);
                INFO(o.dtype, ", ", layout.text(), ": ", deviation);
                EXPECT_EVERYWHERE(on_rank_0(deviation <= parity.bound));
                const Param& matrix = run.session.model.embed_tokens;
                EXPECT_EVERYWHERE(run.session.model.head.weights[0] == &matrix);
                const std::vector<double> rows = read(matrix.data);
                const auto padding = rows.begin() + matrix.real().size();
                EXPECT_EVERYWHERE(matrix.local.rows == (131 + layout.tp - 1) / layout.tp);
                EXPECT_EVERYWHERE(std::all_of(padding, rows.end(), [](double x) { return x == 0; }));
                EXPECT_EVERYWHERE(total_size(run.session.model.params()) ==
                                  tensor_parallel_elements(o.model, layout.tp));
                const int64_t width = size_of(o.llama().dtype), micro = run.session.options.micro_batch;
                CommStats sent{.operations = run.stats.sent};
                std::erase_if(sent.operations, [](const auto& entry) { return entry.first.starts_with("dp."); });
                Traffic traffic;
                traffic.add(sent);
                const DType dtype = width == 8 ? DType::f64 : DType::f32;
                EXPECT_EVERYWHERE(
                    traffic.operations ==
                    step_traffic(o.model, {micro * o.seq_len, layout.tp, dtype, dtype, layout.options}, m).operations);
            }
    }
}

TEST_CASE("bf16: one rank's run up to its rounding, and no farther from it than a rounding of other sums is") {
    const Text text;
    int64_t number = 0;
    for (const char* recompute : {"none", "full"}) {
        TrainOptions o = shape(text, 2);
        o.dtype = "bf16";
        o.recompute = recompute;
        const auto one = run_on_one_rank(o);
        for (const TensorLayout& layout : layouts()) {
            if (!in_slice(number++)) continue;
            Sharded run(o, world(), layout);
            run.session.run();
            double worst = 0;  // of a gradient at step 1, of a loss
            if (one) {
                for (size_t i = 0; i < one->gradients.size(); ++i)
                    worst = std::max(worst, distance(run.session.gradients[i], one->gradients[i]));
                for (size_t i = 0; i < one->reports.size(); ++i)
                    worst = std::max(worst, std::abs(run.session.reports[i].loss / one->reports[i].loss - 1));
            }
            INFO(layout.text(), ", recompute ", std::string(recompute), ": ", worst);
            EXPECT_EVERYWHERE(worst <= 0.03);
        }
    }
}

TEST_CASE("evaluates as one rank does; the weights put together are one rank's") {
    const Text text;
    TrainOptions o = shape(text, 2);
    o.val_fraction = 0.3;
    o.micro_batch = 3;  // the last round of the validation part has fewer sequences
    o.global_batch = 24;
    EvaluatedRun one(o);
    int64_t number = 0;
    for (TensorLayout layout : layouts()) {
        if (!in_quarter(number++)) continue;
        layout.micro_batches = layout.tp;
        Sharded run(o, world(), layout);
        run.session.run();
        INFO(layout.text());
        EXPECT_EVERYWHERE(one.evaluates_like(run.session));
        EXPECT_EVERYWHERE(one.trained_like(run.session));
    }
}

TEST_CASE("a fake world of 64: one rank of tp 8 x dp 8, finite losses, its share of the memory") {
    const Text text;
    TrainOptions o = shape(text, 2);
    o.global_batch = 64;
    o.steps = 2;
    const Comm fake = make_comm(make_fake_backend(15, 64), {});  // its tokens are in no text
    for (const bool sequence : {false, true})
        for (const bool overlap : {false, true}) {
            Sharded run(o, fake, {8, {sequence, overlap}});
            run.session.run();
            for (const double x : run.session.history()) EXPECT((std::isfinite(x) && x > 0.01));
            EXPECT(run.tensor.rank() == 7);
            const MemoryBytes memory = run.session.reports.back().memory;
            EXPECT(memory[int(Memory::params)] == 4 * tensor_parallel_elements(o.model, 8));
        }
}
