// Layers of experts in every way of dividing a batch or the layers: data parallelism, ZeRO and pipelines against one
// rank. Routing is discrete, but a token's experts depend on its own row alone, and a capacity or a balancing loss on
// its sequence: so losses and gradients are one rank's here as well.
#include "tests/staged.h"

using namespace train70b;
using namespace train70b::test;

namespace {

struct Layout {
    int64_t pp = 1;
    const char* schedule = "1f1b";
    int stage = -1;  // of ZeRO; -1: data parallelism
    int64_t micro_batches = 1;
    const char* recompute = "none";
    bool of_batch = false, sigmoid = false;
    ZeroOptions zero = {};
};

const std::vector<Layout> kLayouts = {
    {},
    {.micro_batches = 4, .recompute = "full"},
    {.stage = 0, .of_batch = true},
    {.stage = 1, .micro_batches = 2, .recompute = "selective", .sigmoid = true},
    {.stage = 2, .micro_batches = 4},
    {.stage = 3, .recompute = "full", .of_batch = true, .sigmoid = true},
    {.stage = 3, .micro_batches = 2, .recompute = "pointwise", .zero = {.prefetch = 0}},
    {.stage = 3, .micro_batches = 2, .recompute = "full", .zero = {.prefetch = 3}},
    {.stage = 3, .zero = {.hybrid_shard = 2, .offload = Offload::all}},
    {.pp = 2, .schedule = "1f1b", .micro_batches = 4},
    {.pp = 4, .schedule = "gpipe", .micro_batches = 2, .recompute = "full", .of_batch = true},
    {.pp = 2, .schedule = "interleaved", .micro_batches = 2, .sigmoid = true},
    {.pp = 2, .schedule = "zero-bubble", .stage = 2, .micro_batches = 4},
    {.pp = 2, .schedule = "zero-bubble", .stage = 3, .micro_batches = 4, .recompute = "full", .sigmoid = true},
    {.pp = 4, .schedule = "dualpipe-v", .stage = 1, .micro_batches = 8, .of_batch = true, .sigmoid = true},
    {.pp = 2, .schedule = "zb-v", .stage = 3, .micro_batches = 4, .recompute = "selective"},
};

TrainOptions sparse(const Text& text, const Layout& layout) {
    TrainOptions o = shape(text);
    o.global_batch = 32;  // a sequence for each of 8 ranks' 4 micro-batches
    o.dtype = o.grad_dtype = "fp64";
    o.model.experts = {.count = 6,
                       .top_k = 2,
                       .ffn = 24,
                       .shared = 1,
                       .dense_layers = 1,
                       .sigmoid = layout.sigmoid,
                       .capacity_factor = 1.25};
    o.model.experts.balance = {
        .aux_loss = 0.05, .of_batch = layout.of_batch, .z_loss = 0.01, .bias_rate = layout.sigmoid ? 0.01 : 0};
    o.recompute = layout.recompute;
    return o;
}

}  // namespace

TEST_CASE("experts over data-parallel ranks, ZeRO's stages and pipelines: one rank's run, loads and biases") {
    const Text text;
    const Comm eight = world();
    for (size_t i = 0; i < kLayouts.size(); ++i) {
        if (!in_quarter(int64_t(i))) continue;
        const Layout& layout = kLayouts[i];
        TrainOptions o = sparse(text, layout);
        const auto one = run_on_one_rank(o);
        const int64_t pp = layout.pp, ranks = eight.size() / pp;
        o.micro_batch = o.global_batch / ranks / layout.micro_batches;
        REQUIRE(o.micro_batch * ranks * layout.micro_batches == o.global_batch);
        const Comm stages = eight.split([&](int rank) { return rank % int(ranks); }, "pp");
        const Comm data = eight.split([&](int rank) { return rank / int(ranks); }, "dp");
        const PipelineOptions options{.schedule = layout.schedule};
        std::unique_ptr<DataParallel> data_parallel;
        std::unique_ptr<Zero> zero;
        std::unique_ptr<Pipeline> pipeline;
        const MakeOptimizer adamw = AdamW::maker(o.adamw());
        Session session(
            o,
            [&](Session& s) {
                ZeroOptions zero_options = layout.zero;
                zero_options.stage = layout.stage;
                if (layout.stage < 0)
                    data_parallel = std::make_unique<DataParallel>(s.model, data, DataParallelOptions{}, adamw);
                else
                    zero = std::make_unique<Zero>(s.model, data, zero_options, adamw);
                use_store(s.trainer, layout.stage < 0 ? static_cast<ParamStore&>(*data_parallel) : *zero, data);
                if (pp == 1) return;
                pipeline =
                    std::make_unique<Pipeline>(s.model, stages, pipeline_schedule(options, pp, layout.micro_batches));
                s.trainer.loop = pipeline.get();
                s.trainer.groups.pp = group_of(stages);
            },
            pp == 1 ? full_model(o.model) : pipeline_stage(o.model, pp, stages.rank(), options));
        session.run();
        const Farthest deviation = deviation_on_rank_0(session, one);
        INFO("layout ", i, ": ", deviation);
        EXPECT_EVERYWHERE(deviation <= 1e-10);
        if (one) expect_equal_loads(session, *one);
        for (size_t step = 0; one && step < one->reports.size(); ++step)
            EXPECT(experts_of(one->reports[step])->aux_loss > 0.01);
        if (one) EXPECT(experts_of(one->reports[0])->dropped > 0);
        for (size_t b = 0; layout.sigmoid && one && b < session.model.blocks.size(); ++b)
            if (const Experts* experts = experts_of(session.model.blocks[b]); experts && pp == 1)
                EXPECT(experts->bias() == experts_of(one->model.blocks[b])->bias());
    }
}
