// Pipeline stages beside what else a layout has: tied embeddings, ZeRO, deferred weights.
#include "tests/staged.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE(
    "tied embeddings: every schedule is one rank's run; first and last stage hold the matrix, and sum its gradients in "
    "one message a step") {
    const Text text;
    int64_t drawn = 0;
    for (const Parity& parity : kParity)
        for (const char* recompute : {"none", "full"}) {
            TrainOptions o = shape(text);
            o.dtype = parity.dtype;
            o.recompute = recompute;
            o.model.tied = true;
            o.seq_len = 7;
            const auto one = run_on_one_rank(o);
            const double squares_of_one = world().sum(one ? one->trainer.store->squares(Which::data) : 0);
            int64_t number = 0;
            for (const std::string& schedule : kSchedules)
                for (const int64_t pp : {1, 2, 4, 8})
                    for (const int64_t virtual_stages : {0, 1, 4}) {
                        const bool chosen = virtual_stages > 0;
                        if (chosen && (!has_chunks(schedule) || in_v(schedule))) continue;
                        if (virtual_stages == 4 && pp != 2) continue;
                        if (has_chunks(schedule) && (pp == 1 || (pp == 8 && virtual_stages != 1))) continue;
                        if (!works(schedule, pp, pp == 8 ? 8 : 4)) continue;
                        if (parity.skips(number++) || (recompute != std::string("none") && pp != 4)) continue;
                        if (!in_slice(drawn++)) continue;
                        const PipelineOptions options{.schedule = schedule, .virtual_stages = virtual_stages};
                        const int64_t m = pp == 8 ? 8 : pp == 1 ? 2 : 4;  // on 8 / pp data-parallel ranks, of 16
                        const Comm all = world();
                        all.take_stats();
                        std::map<std::string, CommStats::Entry> sent;
                        Staged run(o, all, pp, options, m);
                        run.session.on_step = [&](const StepReport&) { sent = all.take_stats().operations; };
                        run.session.run();
                        const Farthest deviation = deviation_on_rank_0(run.session, one);
                        INFO(o.dtype, ", ", schedule, ", pp ", pp, ", v ", virtual_stages, ", recompute ",
                             std::string(recompute), ": ", deviation);
                        EXPECT_EVERYWHERE(deviation <= parity.bound);
                        // In a V one rank has both ends, one matrix, and nothing to send.
                        const bool end =
                            pp > 1 && !in_v(schedule) && (run.stages.rank() == 0 || run.stages.rank() == pp - 1);
                        const Param& matrix = run.session.model.embed_tokens;
                        const int64_t bytes = size_of(o.llama().grad_dtype) * o.model.vocab * o.model.hidden;
                        // 2 n (N-1)/N of n bytes, N = 2
                        EXPECT_EVERYWHERE(sent["tied.all_reduce"].bytes == (end ? bytes : 0));
                        EXPECT_EVERYWHERE(sent["tied.all_reduce"].calls == (end ? 1 : 0));
                        // Both copies are the same after four updates; one is in the sum that the norm of the weights
                        // is made of.
                        const std::vector<double> mine = end ? read(matrix.data) : std::vector<double>();
                        double squares = 0;
                        for (const double x : mine) squares += x * x;
                        const std::vector<double> copies = run.stages.gather({squares});
                        EXPECT_EVERYWHERE(pp == 1 || in_v(schedule) ||
                                          (copies.front() == copies.back() && copies.front() > 0));
                        EXPECT_EVERYWHERE(!in_v(schedule) || matrix.partial_grad_group == nullptr);
                        const double weights = run.stages.sum(run.data_parallel->squares(Which::data));
                        EXPECT_EVERYWHERE(std::abs(weights / squares_of_one - 1) <= parity.bound);
                    }
        }
}

TEST_CASE("tied embeddings: the ledger of the stages is the formula's, the last stage's copy with it") {
    const Text text;
    TrainOptions o = shape(text);
    o.model.tied = true;
    on_first_ranks(4, [&](const Comm& ranks) {
        const Watched run(o, ranks, {}, 4);
        const int64_t block = o.model.block_parameters(), matrix = o.model.vocab * o.model.hidden;
        for (int64_t rank = 0; rank < 4; ++rank) {
            const int64_t elements =
                2 * block + (rank == 0 || rank == 3 ? matrix : 0) + (rank == 3 ? o.model.hidden : 0);
            const MemoryBytes& kinds = run.memory(rank);
            INFO("rank ", rank);
            EXPECT(kinds[int(Memory::params)] == 4 * elements);
            EXPECT(kinds[int(Memory::grads)] == 4 * elements);
            EXPECT(kinds[int(Memory::optimizer)] == 8 * elements);
        }
    });
}

TEST_CASE("which layers a stage has, embedding and head with them, in a loop and in a V") {
    const LlamaConfig c = preset("tiny");
    const Stage turn = pipeline_stage(c, 2, 1, {.schedule = "zb-v"});
    EXPECT((turn.chunks.size() == 2 && turn.chunks[0].first_layer == 1 && turn.chunks[1].first_layer == 2));
    EXPECT((!turn.head && !turn.embedding));
    const Stage both = pipeline_stage(c, 2, 0, {.schedule = "zb-v"});
    EXPECT((both.chunks.size() == 2 && both.chunks[0].first_layer == 0 && both.chunks[1].first_layer == 3));
    EXPECT((both.head && both.embedding));
    const Stage last = pipeline_stage(c, 2, 1, {.schedule = "interleaved"});
    EXPECT((last.chunks.size() == 2 && last.chunks[0].first_layer == 1 && last.chunks[1].first_layer == 3));
    EXPECT((last.head && !last.embedding));
}

TEST_CASE("deferred weight gradients: buckets and ZeRO's reductions start after them, not after the input gradients") {
    const Text text;
    TrainOptions o = shape(text);
    o.micro_batch = 2;  // of 16, on 8 ranks: one micro-batch
    const auto gradients = [&](bool defers, int zero_stage) {
        std::unique_ptr<ParamStore> store;
        Session session(o, [&](Session& s) {
            const MakeOptimizer adamw = AdamW::maker(s.options.adamw());
            if (zero_stage >= 0)
                store = std::make_unique<Zero>(s.model, world(), ZeroOptions{.stage = zero_stage}, adamw);
            else
                store = std::make_unique<DataParallel>(s.model, world(), DataParallelOptions{.bucket_mb = 0}, adamw);
            use_store(s.trainer, *store, world());
        });
        store->begin_step(1);
        Tape::Steps later;
        Tape tape{.deferred_wgrads = defers ? &later : nullptr};
        session.model.forward(tape, session.trainer.micro_batch(1, 0));
        tape.backward();
        world().barrier().wait();  // what has been sent by now is executed here
        for (auto& wgrad : later) wgrad();
        store->finish_gradients();
        return gathered(session, Which::grad);
    };
    const std::vector<double> expected = gradients(false, -1);
    for (const int stage : {-1, 0, 1, 2}) {
        const std::vector<double> got = gradients(true, stage);
        INFO("ZeRO stage ", stage);
        EXPECT_EVERYWHERE(got.empty() || distance(got, expected) <= 1e-6);
        EXPECT_EVERYWHERE(world().rank() > 0 || !got.empty());
    }
}
