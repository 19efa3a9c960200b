// Every layout of tensor parallelism against one rank: losses, norms, gathered gradients; tied embeddings.
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
