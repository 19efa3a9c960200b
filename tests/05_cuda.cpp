// Pipelines on device tensors, over every backend that can work here (how to start it: tests/02_cuda.cpp).
#include "01_single_gpu/core/registry.h"
#include "05_pipeline/complete/pipeline.h"
#include "tests/device_comms.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("every schedule on a GPU, recomputed or not: one rank's run; zero-bubble is 1F1B bit for bit") {
    if (!has_gpu()) return;
    const Text text;
    const int pp = world().size();
    int64_t layout = 0;
    for (const char* recompute : {"none", "full"}) {
        TrainOptions o = tiny_on_gpu(text);
        o.recompute = recompute;
        o.model.layers = 2 * pp;
        const int micro_batches = (kSmall ? 2 : 4) * pp;
        o.global_batch = micro_batches;
        if (kSmall) o.steps = 1;
        Session one(reference_of(o));
        one.run();
        o.micro_batch = 1;
        for (const Comm& comm : device_comms()) {
            std::vector<double> weights;
            const bool compares = in_gpu_slice(layout++);  // zero-bubble with 1F1B
            for (const std::string& schedule : names_of(schedule_generators())) {
                if (schedule == "1f1b" || schedule == "zero-bubble" ? !compares : !in_gpu_slice(layout++)) continue;
                const PipelineOptions options{.schedule = schedule};
                std::unique_ptr<Pipeline> pipeline;
                const Comm stages = comm.split([](int) { return 0; }, "pp");
                Session session(
                    o,
                    [&](Session& s) {
                        pipeline =
                            std::make_unique<Pipeline>(s.model, stages, pipeline_schedule(options, pp, micro_batches));
                        s.trainer.loop = pipeline.get();
                        s.trainer.groups.pp = group_of(stages);
                    },
                    pipeline_stage(o.model, pp, stages.rank(), options));
                session.run();
                const Farthest deviation = deviation_on_rank_0(session, one);
                INFO(comm.backend(), ", ", schedule, ", recompute ", std::string(recompute), ": ", deviation);
                EXPECT_EVERYWHERE(deviation <= 5e-6);
                if (schedule == "1f1b") weights = session.weights();
                if (schedule == "zero-bubble") EXPECT_EVERYWHERE(session.weights() == weights);
            }
        }
    }
}
