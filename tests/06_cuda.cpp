// Context parallelism on device tensors, over every backend that can work here (how to start it: tests/02_cuda.cpp).
#include "01_single_gpu/core/registry.h"
#include "02_data_parallel/complete/data_parallel.h"
#include "06_context_parallel/complete/context_parallel.h"
#include "tests/device_comms.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("ring, zigzag, Ulysses, hybrid, gather on a GPU, recomputed or not: one rank's run") {
    if (!has_gpu()) return;
    const Text text;
    const int n = world().size();
    int64_t layout_number = 0;
    for (const char* recompute : {"none", "pointwise", "selective"})
        for (const int64_t kv_heads : {4, 1}) {
            TrainOptions o = tiny_on_gpu(text);
            o.recompute = recompute;
            o.model.kv_heads = kv_heads;
            if (kv_heads == 1) o.document_token = ' ';
            o.seq_len = kSmall ? 16 : kEmulated ? 32 : 64;
            if (kSmall) o.steps = 1, o.global_batch = o.micro_batch = n;
            Session one(reference_of(o));
            one.run();
            for (const Comm& comm : device_comms())
                for (const std::string& algorithm : names_of(context_algorithms())) {
                    if (!in_gpu_slice(layout_number++)) continue;
                    const ContextLayout layout = context_layout(o.model, o.seq_len, n, {algorithm});
                    std::unique_ptr<DataParallel> data_parallel;
                    Session session(o, [&](Session& s) {
                        const Comm ranks = comm.split([](int) { return 0; }, "cp");
                        apply_context_parallel(s.model, ranks, layout);
                        data_parallel = std::make_unique<DataParallel>(s.model, ranks, DataParallelOptions{},
                                                                       AdamW::maker(o.adamw()));
                        use_store(s.trainer, *data_parallel, ranks);
                        s.trainer.groups.dp = one_rank();
                        s.trainer.batches.of_rank = layout.of_rank(ranks.rank());
                    });
                    session.run();
                    const Farthest deviation = deviation_on_rank_0(session, one);
                    INFO(comm.backend(), ", ", algorithm, ", kv heads ", kv_heads, ", recompute ",
                         std::string(recompute), ": ", deviation);
                    EXPECT_EVERYWHERE(deviation <= 5e-6);
                }
        }
}
