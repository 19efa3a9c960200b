// Every schedule against one rank; what each rank holds; zero-bubble bit for bit.
#include "01_single_gpu/core/registry.h"
#include "02_data_parallel/data_parallel.h"
#include "03_zero/zero.h"
#include "04_tensor_parallel/tensor_parallel.h"
#include "05_pipeline/flags.h"
#include "05_pipeline/report.h"
#include "05_pipeline/schedule_file.h"
#include "tests/parallel.h"

using namespace train70b;
using namespace train70b::test;

namespace {

TrainOptions shape(const Text& text) {
    return of_model(tiny(text), {.layers = 8, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 131}, 13,
                    16);
}

// All ranks of `all`, pp stages to a copy of the model.
struct Staged {
    Comm stages, data;
    std::unique_ptr<DataParallel> data_parallel;
    std::unique_ptr<Pipeline> pipeline;
    Session session;

    Staged(const TrainOptions& o, const Comm& all, int64_t pp, const PipelineOptions& options, int64_t micro_batches)
        : stages(all.split([n = all.size() / int(pp)](int rank) { return rank % n; }, "pp")),
          data(all.split([n = all.size() / int(pp)](int rank) { return rank / n; }, "dp")),
          session(
              with_micro_batch(o, data.size(), micro_batches),
              [&](Session& s) {
                  data_parallel =
                      std::make_unique<DataParallel>(s.model, data, DataParallelOptions{}, AdamW::maker(o.adamw()));
                  pipeline = std::make_unique<Pipeline>(s.model, stages, pipeline_schedule(options, pp, micro_batches));
                  use_store(s.trainer, *data_parallel, data);
                  s.trainer.loop = pipeline.get();
                  s.trainer.groups.pp = group_of(stages);
              },
              pipeline_stage(o.model, pp, stages.rank(), options)) {}
    static TrainOptions with_micro_batch(TrainOptions o, int64_t data_ranks, int64_t micro_batches) {
        o.micro_batch = o.global_batch / data_ranks / micro_batches;
        return o;
    }
};

const std::vector<std::string> kSchedules = names_of(schedule_generators());

bool has_chunks(const std::string& schedule) { return find_schedule(schedule).default_chunks() > 1; }
bool in_v(const std::string& schedule) { return find_schedule(schedule).chunks == ScheduleGenerator::Chunks::v; }
bool works(const std::string& schedule, int64_t pp, int64_t m) {
    return find_schedule(schedule).problem(pp, m).empty();
}

}  // namespace

TEST_CASE("every schedule on 1, 2, 4 and 8 stages, 4, 8 and 16 micro-batches, recomputation: one rank's run") {
    const Text text;
    REQUIRE(world().size() == 8);
    int64_t run_number = 0;
    for (const Parity& parity : kParity)
        for (const char* recompute : {"none", "pointwise", "selective", "full"}) {
            std::map<int64_t, std::unique_ptr<Session>> one;  // by size of the global batch
            int64_t number = 0;
            for (const std::string& schedule : kSchedules)
                for (const int64_t pp : {1, 2, 4, 8})
                    for (const int64_t m : {4, 8, 16}) {
                        if (has_chunks(schedule) && (pp == 1 || pp == 8)) continue;
                        if (!works(schedule, pp, m)) continue;
                        const std::string level = recompute;
                        if ((level == "pointwise" || level == "selective" || !kThorough) && m != 4) continue;
                        if (parity.skips(number++) || !in_slice(run_number++)) continue;
                        TrainOptions o = shape(text);
                        o.dtype = parity.dtype;
                        o.recompute = recompute;
                        o.seq_len = 7;
                        o.global_batch = o.micro_batch = 8 / pp * m;
                        if (!one.contains(o.global_batch)) one[o.global_batch] = run_on_one_rank(o);
                        const PipelineOptions options{.schedule = schedule};
                        Staged run(o, world(), pp, options, m);
                        run.session.run();
                        const Farthest deviation = deviation_on_rank_0(run.session, one[o.global_batch]);
                        INFO(o.dtype, ", ", schedule, ", pp ", pp, ", m ", m, ", recompute ", std::string(recompute),
                             ": ", deviation);
                        EXPECT_EVERYWHERE(deviation <= parity.bound);
                        EXPECT_EVERYWHERE(run.pipeline->most_in_flight() ==
                                          in_flight_formula(pipeline_schedule(options, pp, m), run.stages.rank()));
                    }
        }
}

TEST_CASE("three stages, and more stages than micro-batches; rounds through a ring of odd length") {
    const Text text;
    for (const Parity& parity : kParity) {
        TrainOptions o = shape(text);
        o.dtype = parity.dtype;
        o.model.layers = 6;
        o.global_batch = o.micro_batch = 6;
        const auto one = run_on_one_rank(o);
        for (const int n : {2, 3, 6})
            on_first_ranks(n, [&](const Comm& ranks) {
                int64_t number = 0;
                for (const std::string& schedule : kSchedules)
                    for (const int64_t m : {2, 3, 6}) {
                        if ((has_chunks(schedule) && n == 6) || !works(schedule, n, m)) continue;
                        const int64_t at = number++;
                        if (parity.skips(at) || !in_quarter(at / parity.each)) continue;
                        PipelineOptions options{.schedule = schedule};
                        if (in_v(schedule) && n == 2) options.stage_layers = {2, 1, 2, 1};
                        if (has_chunks(schedule) && !in_v(schedule)) options.virtual_stages = 6 / n;
                        Staged run(o, ranks, n, options, m);
                        run.session.run();
                        const Farthest deviation = deviation_on_rank_0(run.session, one);
                        INFO(schedule, ", pp ", n, ", m ", m, ": ", deviation);
                        EXPECT(ranks.max(deviation) <= parity.bound);
                    }
            });
    }
}

TEST_CASE("evaluation between the steps changes nothing of them") {
    const Text text;
    TrainOptions o = shape(text);
    o.val_fraction = 0.3;
    for (const char* schedule : {"1f1b", "interleaved", "zero-bubble", "zb-v"}) {
        Staged without(o, world(), 4, {.schedule = schedule}, 4);
        without.session.run();
        o.eval_every = 1;
        Staged with(o, world(), 4, {.schedule = schedule}, 4);
        with.session.run();
        o.eval_every = 0;
        EXPECT_EVERYWHERE(with.session.history() == without.session.history());
        EXPECT_EVERYWHERE(with.session.weights() == without.session.weights());
    }
}

TEST_CASE("zero-bubble is 1F1B bit for bit: losses, norms, gradients, weights after four steps; and 1F1B is GPipe") {
    const Text text;
    int64_t number = 0;
    for (const char* dtype : {"fp32", "bf16"})
        for (const char* recompute : {"none", "full"})
            for (const int64_t pp : {2, 4}) {
                if (!in_quarter(number++)) continue;
                TrainOptions o = shape(text);
                o.dtype = dtype;
                o.recompute = recompute;
                Staged first(o, world(), pp, {.schedule = "1f1b"}, 4);
                first.session.run();
                for (const char* schedule : {"zero-bubble", "gpipe", "naive"}) {
                    Staged other(o, world(), pp, {.schedule = schedule}, 4);
                    other.session.run();
                    INFO(std::string(schedule), " ", std::string(dtype), ", pp ", pp, ", recompute ",
                         std::string(recompute));
                    EXPECT_EVERYWHERE(other.session.history() == first.session.history());
                    EXPECT_EVERYWHERE(other.session.gradients == first.session.gradients);
                    EXPECT_EVERYWHERE(other.session.weights() == first.session.weights());
                }
            }
}

TEST_CASE("in a V: zb-v is dualpipe-v and a file bit for bit, and 1F1B's losses and gradients of the first step") {
    const Text text;
    const std::string file = text.folder / "zb_v.txt", mixed = text.folder / "mixed.txt";
    write_text(file, schedule_text(make_schedule("zb-v", 2, 4)));
    // B and I, W on one rank; W of chunk 1 after the last step of chunk 0.
    write_text(mixed,
               "stages: 0 3 / 1 2\n"
               "F0 F1 F0.1 I0.1 B0 F2 F1.1 B1.1 I1 F3 F2.1 B2.1 B2 F3.1 I3.1 B3 W1 W0.1 W3.1\n"
               "F0 F0.1 F1 F1.1 B0.1 I0 F2 F2.1 I1.1 B1 F3 F3.1 B2.1 B2 B3.1 B3 W1.1 W0\n");
    int64_t number = 0;
    for (const char* dtype : {"fp32", "bf16"})
        for (const char* recompute : {"none", "full"}) {
            if (!in_half(number++)) continue;
            TrainOptions o = shape(text);
            o.dtype = dtype;
            o.recompute = recompute;
            // On data-parallel ranks the ring adds in an order that depends on where a parameter is in its bucket.
            on_first_ranks(2, [&](const Comm& ranks) {
                Staged plain(o, ranks, 2, {.schedule = "1f1b"}, 4), v(o, ranks, 2, {.schedule = "zb-v"}, 4);
                plain.session.run();
                v.session.run();
                EXPECT(ranks.max(v.session.reports[0].loss != plain.session.reports[0].loss) == 0);
                EXPECT(ranks.max(v.session.gradients != plain.session.gradients) == 0);
            });
            Staged first(o, world(), 2, {.schedule = "zb-v"}, 4);
            first.session.run();
            for (const std::string& schedule : {std::string("dualpipe-v"), "file:" + file, "file:" + mixed}) {
                Staged other(o, world(), 2, {.schedule = schedule}, 4);
                other.session.run();
                INFO(schedule, " ", std::string(dtype), ", recompute ", std::string(recompute));
                EXPECT_EVERYWHERE(other.session.reports[0].loss == first.session.reports[0].loss);
                const bool in_order = !schedule.ends_with("mixed.txt");  // of the weight gradients
                if (in_order) {
                    EXPECT_EVERYWHERE(other.session.history() == first.session.history());
                    EXPECT_EVERYWHERE(other.session.gradients == first.session.gradients);
                    EXPECT_EVERYWHERE(other.session.weights() == first.session.weights());
                } else {
                    const Farthest deviation = deviation_on_rank_0(other.session, first.session);
                    EXPECT_EVERYWHERE(deviation <= (o.dtype == "fp32" ? 5e-6 : 2e-2));
                }
            }
        }
}

TEST_CASE(
    "a file decides where the stages are: the embedding on the third of three ranks, the head on the second, and "
    "neighbours on one rank") {
    const Text text;
    const std::string file = text.folder / "placed.txt";
    write_text(file,
               "stages: 1 2 / 4 5 / 0 3\n"
               "F0 F0.1 F1 F1.1 B0.1 B0 B1.1 B1\n"
               "F0 F0.1 B0.1 B0 F1 F1.1 B1.1 B1\n"
               "F0 F1 F0.1 F1.1 B0.1 B0 B1.1 B1\n");
    for (const Parity& parity : kParity) {
        TrainOptions o = shape(text);
        o.dtype = parity.dtype;
        o.model.layers = 6;
        o.global_batch = o.micro_batch = 6;
        o.val_fraction = 0.3;
        for (const bool tied : {false, true}) {
            o.model.tied = tied;
            EvaluatedRun one(o);
            on_first_ranks(3, [&](const Comm& ranks) {
                Staged run(o, ranks, 3, {.schedule = "file:" + file}, 2);
                run.session.run();
                const Farthest deviation = deviation_on_rank_0(run.session, one.session);
                INFO(o.dtype, ", tied ", tied, ": ", deviation);
                EXPECT(ranks.max(deviation) <= parity.bound);
                EXPECT(std::abs(run.session.trainer.evaluate() / one.loss - 1) <= 5e-6);
            });
        }
    }
}

TEST_CASE("uneven stages, and chunks of uneven size") {
    const Text text;
    int64_t number = 0;
    for (const Parity& parity : kParity) {
        TrainOptions o = shape(text);
        o.dtype = parity.dtype;
        const auto one = run_on_one_rank(o);
        for (const auto& [options, pp] : std::vector<std::pair<PipelineOptions, int64_t>>{
                 {{.schedule = "1f1b", .stage_layers = {1, 3, 3, 1}}, 4},
                 {{.schedule = "zero-bubble", .stage_layers = {5, 3}}, 2},
                 {{.schedule = "interleaved", .stage_layers = {3, 2, 1, 2}}, 2},
                 {{.schedule = "interleaved", .virtual_stages = 4}, 2},
                 {{.schedule = "zb-v", .stage_layers = {3, 2, 1, 2}}, 2},
                 {{.schedule = "dualpipe-v", .stage_layers = {1, 1, 5, 1}}, 2},
                 {{.schedule = "interleaved", .virtual_stages = 1}, 4},
                 {{.schedule = "gpipe", .stage_layers = {1, 1, 1, 1, 1, 1, 1, 1}}, 8}}) {
            if (!in_half(number++)) continue;
            Staged run(o, world(), pp, options, 4);
            run.session.run();
            const Farthest deviation = deviation_on_rank_0(run.session, one);
            INFO(options.schedule, ", pp ", pp, ": ", deviation);
            EXPECT_EVERYWHERE(deviation <= parity.bound);
        }
    }
}

TEST_CASE(
    "the ledger: 16 micro-batches on 4 stages, GPipe keeps at least 2.5 times the activations of 1F1B on rank 0") {
    const Text text;
    TrainOptions o = shape(text);
    o.micro_batch = 1;
    on_first_ranks(4, [&](const Comm& ranks) {
        const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
        std::map<std::string, PipelineRun> runs;
        for (const std::string& name : kSchedules) {
            runs.emplace(name, run_pipeline(o, data, ranks, {.schedule = name}, 16));
            const PipelineRun& run = runs.at(name);
            INFO(name);
            for (int64_t rank = 0; rank < 4; ++rank) {
                INFO("rank ", rank);
                EXPECT(run.in_flight[size_t(rank)] == in_flight_formula(run.schedule, rank));
            }
            // Each rank's parameters are its layers', and the first and the last have the vocabulary's.
            // In a V the first has both.
            const int64_t block = o.model.block_parameters() * 4, matrix = o.model.vocab * o.model.hidden * 4,
                          norm = o.model.hidden * 4, head = in_v(name) ? 0 : 3;
            for (int64_t rank = 0; rank < 4; ++rank)
                EXPECT(run.memory[size_t(rank)].kind[int(Memory::params)] ==
                       2 * block + (rank == 0 ? matrix : 0) + (rank == head ? matrix + norm : 0));
            // Activations up and gradients down, between any two stages once per micro-batch, except on one rank: of
            // 2 v messages rank 0 has no gradient to send, the head's no activations; at the turn of a V both stay.
            const int64_t n = o.seq_len * o.model.hidden * 4, v = run.schedule.chunks;
            const bool turn = in_v(name) && ranks.rank() == 3;
            const int64_t sends = 16 * (2 * v - (ranks.rank() == 0) - (ranks.rank() == head) - 2 * turn);
            EXPECT(run.wire_bytes == n * sends);
        }
        const auto activations = [&](const char* name, size_t rank) {
            return double(runs.at(name).memory[rank].kind[int(Memory::activations)]);
        };
        const double ratio = activations("gpipe", 0) / activations("1f1b", 0);
        INFO(ratio);
        EXPECT(ratio >= 2.5);
        EXPECT(activations("1f1b", 0) > activations("1f1b", 2));
        EXPECT(activations("naive", 0) < activations("1f1b", 0));
        // In a V all ranks hold about equally much, and no more than 1F1B's first.
        for (const size_t rank : {0, 1, 2, 3}) EXPECT(activations("zb-v", rank) <= 1.15 * activations("1f1b", 0));
    });
}

TEST_CASE("evaluation goes through all stages; the weights come together on rank 0") {
    const Text text;
    TrainOptions o = shape(text);
    o.val_fraction = 0.3;
    EvaluatedRun one(o);
    for (const char* schedule : {"1f1b", "interleaved", "zb-v"}) {
        Staged run(o, world(), 4, {.schedule = schedule}, 4);
        run.session.run();
        EXPECT_EVERYWHERE(one.evaluates_like(run.session));
        EXPECT_EVERYWHERE(one.trained_like(run.session));
    }
}

TEST_CASE("with tensor parallelism inside the stages, overlapped or not: one rank's run") {
    const Text text;
    int64_t drawn = 0;
    for (const Parity& parity : kParity) {
        TrainOptions o = shape(text);
        o.dtype = parity.dtype;
        int64_t number = 0;
        const auto one = run_on_one_rank(o);
        for (const char* schedule : {"1f1b", "interleaved", "zero-bubble", "dualpipe-v"})
            for (const bool overlap : {false, true})
                for (const char* recompute : {"none", "full"}) {
                    if (parity.skips(number++) || !in_quarter(drawn++)) continue;
                    TrainOptions part = o;
                    part.recompute = recompute;
                    part.micro_batch = 2;  // of 16, on 2 x 2 x 2 ranks: 4 micro-batches
                    const Comm tensor = world().split([](int rank) { return rank / 2; }, "tp");
                    const Comm data = world().split([](int rank) { return rank / 4 * 2 + rank % 2; }, "dp");
                    const Comm stages = world().split([](int rank) { return rank % 4; }, "pp");
                    const PipelineOptions options{.schedule = schedule};
                    std::unique_ptr<TensorParallel> tensor_parallel;
                    std::unique_ptr<DataParallel> data_parallel;
                    std::unique_ptr<Pipeline> pipeline;
                    Session session(
                        part,
                        [&](Session& s) {
                            tensor_parallel = std::make_unique<TensorParallel>(
                                s.model, tensor, TensorParallelOptions{.overlap = overlap});
                            data_parallel = std::make_unique<DataParallel>(s.model, data, DataParallelOptions{},
                                                                           AdamW::maker(s.options.adamw()));
                            pipeline = std::make_unique<Pipeline>(s.model, stages, pipeline_schedule(options, 2, 4));
                            use_store(s.trainer, *data_parallel, data);
                            s.trainer.groups.tp = group_of(tensor);
                            s.trainer.loop = pipeline.get();
                            s.trainer.groups.pp = group_of(stages);
                        },
                        pipeline_stage(o.model, 2, stages.rank(), options));
                    session.run();
                    const Farthest deviation = deviation_on_rank_0(session, one);
                    INFO(std::string(schedule), ", overlap ", overlap, ", recompute ", std::string(recompute), ": ",
                         deviation);
                    EXPECT_EVERYWHERE(deviation <= parity.bound);
                }
    }
}

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
                        if (!in_quarter(drawn++)) continue;
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
    o.micro_batch = 1;
    o.model.tied = true;
    on_first_ranks(4, [&](const Comm& ranks) {
        const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
        const PipelineRun run = run_pipeline(o, data, ranks, {}, 4);
        const int64_t block = o.model.block_parameters(), matrix = o.model.vocab * o.model.hidden;
        for (int64_t rank = 0; rank < 4; ++rank) {
            const int64_t elements =
                2 * block + (rank == 0 || rank == 3 ? matrix : 0) + (rank == 3 ? o.model.hidden : 0);
            const auto& kinds = run.memory[size_t(rank)].kind;
            INFO("rank ", rank);
            EXPECT(kinds[int(Memory::params)] == 4 * elements);
            EXPECT(kinds[int(Memory::grads)] == 4 * elements);
            EXPECT(kinds[int(Memory::optimizer)] == 8 * elements);
        }
    });
}

TEST_CASE("layers that are not divisible over the stages are refused with a line that says what works") {
    LlamaConfig c = preset("tiny");
    const auto stage = [&](int64_t pp, const PipelineOptions& options) { return pipeline_stage(c, pp, 0, options); };
    EXPECT_USAGE_ERROR(stage(8, {}), "--pp 8: more stages than --layers 4");
    EXPECT_USAGE_ERROR(stage(3, {}),
                       "--layers 4 is not divisible by --pp 3 (try --layers 3 or 6, or --stage-layers 2,1,1)");
    EXPECT_USAGE_ERROR(stage(2, {.stage_layers = {2, 1}}), "--stage-layers 2,1: 3 layers; the model has 4");
    EXPECT_USAGE_ERROR(stage(2, {.stage_layers = {2, 1, 1}}), "--stage-layers 2,1,1: lists 3 stages; --pp 2 makes 2");
    EXPECT_USAGE_ERROR(stage(2, {.stage_layers = {4, 0}}), "each stage needs at least one layer");
    EXPECT_USAGE_ERROR(stage(2, {.schedule = "gpipe", .virtual_stages = 2}),
                       "--virtual-stages 2: --pipeline gpipe has one model chunk per rank");
    EXPECT_USAGE_ERROR(stage(4, {.schedule = "interleaved"}),
                       "--pp 4 x --virtual-stages 2 = 8: more stages than --layers 4");
    EXPECT_USAGE_ERROR(stage(1, {.schedule = "interleaved"}), "(try --pp 2)");
    EXPECT_USAGE_ERROR(stage(2, {.schedule = "zb-v", .virtual_stages = 3}),
                       "--virtual-stages 3: --pipeline zb-v has two model chunks per rank");
    EXPECT_USAGE_ERROR(stage(4, {.schedule = "zb-v"}),
                       "--pp 4 x 2 chunks of --pipeline zb-v = 8: more stages than --layers 4");
    EXPECT_USAGE_ERROR(stage(1, {.schedule = "dualpipe-v"}), "(try --pp 2)");
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

TEST_CASE("a fake world of 64: the third of eight stages") {
    const Text text;
    TrainOptions o = shape(text);
    o.global_batch = 64;
    o.steps = 2;
    const Comm fake = make_comm(make_fake_backend(21, 64), {});
    o.model.layers = 16;
    for (const char* schedule : {"naive", "gpipe", "1f1b", "zero-bubble", "zb-v"}) {
        Staged run(o, fake, 8, {.schedule = schedule}, 8);
        run.session.run();
        for (const StepReport& report : run.session.reports)
            EXPECT((std::isfinite(report.grad_norm) && report.grad_norm > 0));
        EXPECT(run.pipeline->most_in_flight() == in_flight_formula(pipeline_schedule({.schedule = schedule}, 8, 8), 2));
    }
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
