// ZeRO on device tensors, over every backend that can work here (how to start it: tests/02_cuda.cpp).
#include "03_zero/complete/zero.h"
#include "tests/device_comms.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("every stage on a GPU, prefetch, overlap, accumulation, offload to pinned memory: one rank's run") {
    if (!has_gpu()) return;
    const Text text;
    const TrainOptions o = tiny_on_gpu(text);
    Session one(reference_of(o));
    one.run();
    struct Case {
        ZeroOptions zero;
        int64_t micro_batches = 1;
    };
    std::vector<Case> list;
    int64_t layout = 0;
    for (int stage = 0; stage <= 3; ++stage)
        for (const int64_t m : {1, 2})
            for (const bool overlap : {true, false})
                for (const Offload offload : {Offload::none, Offload::optimizer, Offload::nvme, Offload::all}) {
                    if (offload != Offload::none && (stage == 0 || (offload == Offload::all && stage < 3))) continue;
                    for (const int64_t prefetch : {0, 2}) {
                        if (stage < 3 && prefetch > 0) continue;
                        if (!in_gpu_slice(layout++)) continue;
                        list.push_back(
                            {{.stage = stage, .offload = offload, .prefetch = prefetch, .overlap = overlap}, m});
                    }
                }
    for (const Comm& comm : device_comms())
        for (const auto& [options, micro_batches] : list) {
            TrainOptions part = o;
            part.micro_batch = 2 / micro_batches;
            const ZeroOptions& zero_options = options;  // structured bindings are not for lambdas
            std::unique_ptr<Zero> zero;
            Session session(part, [&](Session& s) {
                zero = std::make_unique<Zero>(s.model, comm, zero_options, AdamW::maker(s.options.adamw()));
                use_store(s.trainer, *zero, comm);
            });
            session.run();
            const Farthest deviation = deviation_on_rank_0(session, one);
            INFO(comm.backend(), ", stage ", options.stage, ", offload ", int(options.offload), ", prefetch ",
                 options.prefetch, ", overlap ", options.overlap, ", m ", micro_batches);
            EXPECT_EVERYWHERE(deviation <= 5e-6);
        }
}
