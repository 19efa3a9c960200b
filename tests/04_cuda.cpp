// Tensor parallelism on device tensors, over every backend that can work here (how to start it: tests/02_cuda.cpp).
#include "04_tensor_parallel/complete/overlap.h"
#include "04_tensor_parallel/complete/tensor_parallel.h"
#include "tests/device_comms.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("tensor parallelism on a GPU, sequence parallel or not, overlapped or not: one rank's run") {
    if (!has_gpu()) return;
    const Text text;
    int64_t layout = 0;
    for (const char* recompute : {"none", "pointwise", "selective"})
        for (const int64_t kv_heads : {4, 1}) {
            TrainOptions o = tiny_on_gpu(text);
            o.recompute = recompute;
            o.model.kv_heads = kv_heads;
            if (kSmall) o.steps = 1;
            o.model.vocab = kSmall ? 125 : 253;
            Session one(reference_of(o));
            one.run();
            for (const Comm& comm : device_comms())
                for (const bool sequence : {false, true})
                    for (const bool overlap : {false, true}) {
                        if (!in_gpu_slice(layout++)) continue;
                        const Comm ranks = comm.split([](int) { return 0; }, "tp");
                        std::unique_ptr<TensorParallel> tensor_parallel;
                        Session session(o, [&](Session& s) {
                            tensor_parallel = std::make_unique<TensorParallel>(
                                s.model, ranks, TensorParallelOptions{sequence, overlap});
                            s.trainer.groups.tp = group_of(ranks);
                        });
                        session.run();
                        const Farthest deviation = deviation_on_rank_0(session, one);
                        INFO(comm.backend(), ", sequence ", sequence, ", overlap ", overlap, ", kv heads ", kv_heads,
                             ", recompute ", std::string(recompute), ": ", deviation);
                        EXPECT_EVERYWHERE(deviation <= 5e-6);
                    }
        }
}

TEST_CASE("products in chunks on a GPU, in bf16: what products behind collectives give") {
    if (!has_gpu()) return;
    for (const Comm& ranks : device_comms()) {
        const int64_t N = ranks.size(), r = ranks.rank(), each = 64, in = 128, out = 96;
        const auto random = [](uint64_t key, Shape shape) {
            return tensor(randoms(shape[0] * shape[1], key), shape, DType::bf16, Device::cuda);
        };
        const Tensor part = random(10 + r, {each, in}), weight = random(50 + r, {out, in});
        const Tensor x = random(90 + r, {N * each, in});
        Tensor gathered, sum({each, out}, DType::bf16, Device::cuda);
        const Tensor y = all_gather_matmul(ranks, part, weight, Transpose::b, gathered);
        const double product = distance(y, values(matmul(gather_rows(ranks, part), weight, Transpose::b)));
        const Tensor scattered = matmul_reduce_scatter(ranks, x, weight);
        ranks.reduce_scatter(sum, matmul(x, weight, Transpose::b)).wait();
        const double share = distance(scattered, values(sum));
        INFO(ranks.backend(), ": ", product, ", ", share);
        EXPECT_EVERYWHERE(product <= 1e-6);
        EXPECT_EVERYWHERE(share <= 1e-2);  // sums of bf16 in another order
    }
}
