// What async TP waits for, on the device: on four ranks of an emulated GPU, because a ring of two has one shift.
#include <chrono>
#include <thread>

#include "04_tensor_parallel/complete/overlap.h"
#include "04_tensor_parallel/complete/tensor_parallel.h"
#include "tests/device_comms.h"

using namespace train70b;
using namespace train70b::test;

#if TRAIN70B_CUDA
namespace {

// What is issued while operations called `held` may not run: how many called `counted` run all the same, on this rank.
// Waits until they are `expected`, for a few seconds at most, and then for one more that should not be there.
struct Held {
    const char *held, *counted;
    uint64_t expected;
};
bool runs_beside(const Held& what, const std::function<void()>& issue) {
    using namespace std::chrono_literals;
    cuda_synchronize();
    world().barrier().wait();
    const uint64_t before = emulated_performed(what.counted);
    const auto count = [&] { return emulated_performed(what.counted) - before; };
    emulated_hold(what.held);
    issue();
    for (int i = 0; i < 500 && count() < what.expected; ++i) std::this_thread::sleep_for(10ms);
    std::this_thread::sleep_for(50ms);
    const uint64_t counted = count();
    emulated_hold(nullptr);
    if (counted != what.expected)
        fmt::print("rank {}: while no {} ran, {} {} did\n", this_rank, what.held, counted, what.counted);
    return counted == what.expected;
}

}  // namespace

TEST_CASE("nccl: a shift waits for no product, a product only for its chunk, or for memory three sums behind") {
    if (!has_gpu() || !nccl_works()) return;
    const Comm ranks = nccl_comm(CommStreams::group);
    const std::vector<Comm> backends = device_comms();
    const Comm& staged = backends.front();  // its loop waits in every step
    const int64_t N = ranks.size(), r = ranks.rank(), each = 16, in = 64, out = 32;
    const auto random = [](uint64_t key, Shape shape) {
        return tensor(randoms(shape[0] * shape[1], key), shape, DType::bf16, Device::cuda);
    };
    const Tensor part = random(10 + r, {each, in}), weight = random(50, {out, in}), x = random(90 + r, {N * each, in});
    Tensor gathered;
    const auto gather = [&](const Comm& comm) { return all_gather_matmul(comm, part, weight, Transpose::b, gathered); };
    const auto scatter = [&](const Comm& comm) { return matmul_reduce_scatter(comm, x, weight); };
    const std::vector<double> product = values(gather(staged)), rows = values(gathered), sum = values(scatter(staged));
    EXPECT_EVERYWHERE(values(gather(ranks)) == product && values(gathered) == rows && values(scatter(ranks)) == sum);
    if (!kEmulated || N < 3) return;

    const uint64_t n = uint64_t(N);
    const char *shift = "2 NCCL calls", *multiply = "cublasLtMatmul", *addition = "launch";
    Tensor y;
    for (const Held& what : {Held{multiply, shift, n - 1},  // every shift before the first product
                             Held{shift, multiply, 1}}) {   // the product of this rank's own rows, no other
        const bool good = runs_beside(what, [&] { y = gather(ranks); });
        EXPECT_EVERYWHERE(good && values(y) == product && values(gathered) == rows);
    }
    for (const Held& what : {Held{shift, multiply, 3},  // the fourth needs the memory of the first sum
                             Held{addition, multiply, std::min<uint64_t>(n, 4)},  // no product waits for an addition
                             Held{addition, shift, 1},                            // what is sent next is a sum
                             Held{multiply, shift, 0}}) {
        const bool good = runs_beside(what, [&] { y = scatter(ranks); });
        EXPECT_EVERYWHERE(good && values(y) == sum);
    }
    const int64_t before = ledger().total();
    ledger().reset_peak();
    y = scatter(ranks);
    EXPECT_EVERYWHERE(ledger().peak().total - before <= 4 * each * out * size_of(DType::bf16));
}
#endif
