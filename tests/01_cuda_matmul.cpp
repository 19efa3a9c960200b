// Products by hand (--matmul) against the CPU's, and a training step with each. The numbers are small integers, so that
// every sum is exact in any order, and no element may differ.
#include "tests/cuda_ops.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

using By = Chosen<matmul_by>;

constexpr MatmulBy kByHand[] = {MatmulBy::naive, MatmulBy::tiled, MatmulBy::registers, MatmulBy::mma};

// Integers from -4 to 4, `skipped` elements behind an aligned address.
Tensor integers(Shape shape, uint64_t key, DType dtype, Device device, int64_t skipped = 0) {
    const int64_t count = shape[0] * shape[1];
    std::vector<double> numbers = randoms(skipped + count, key);
    for (double& x : numbers) x = std::floor(x * 4.5 + 0.5);
    return tensor(numbers, {skipped + count}, dtype, device).element_slice(skipped, shape);
}

}  // namespace

TEST_CASE("cuda: products by hand, in every orientation and of any shape, accumulating or not, to the last bit") {
    if (!have_gpu()) return;
    struct Case {
        int64_t m, n, k, skipped_a, skipped_b;
    };
    int64_t number = 0;
    for (MatmulBy by : kByHand)
        for (Transpose t : {Transpose::none, Transpose::a, Transpose::b})
            for (const auto& [dtype, out] :
                 {std::pair(DType::f32, DType::f32), {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}})
                for (const auto& [m, n, k, skipped_a, skipped_b] :
                     {Case{5, 7, 3}, {136, 40, 72, 0, 1}, {33, 144, 64, 1, 0}, {130, 139, 37}, {1, 264, 16}})
                    for (float beta : {0.0f, 1.0f}) {
                        if (!why_not_matmul(by, Device::cuda, dtype).empty()) continue;
                        if (!in_gpu_slice(number++ * 5)) continue;  // 5: neighbours in the list are in different slices
                        INFO("by hand " << int(by) << ", transpose " << int(t) << ", beta " << beta << ", "
                                        << ops(std::string(name_of(dtype)), {m, n, k}));
                        const auto product = [&](Device device, MatmulBy kernels) {
                            const By scope(kernels);
                            const Tensor a =
                                integers(t == Transpose::a ? Shape{k, m} : Shape{m, k}, 1, dtype, device, skipped_a);
                            const Tensor b =
                                integers(t == Transpose::b ? Shape{n, k} : Shape{k, n}, 2, dtype, device, skipped_b);
                            Tensor c = integers({m, n}, 3, out, device);
                            if (beta == 0) fill(c, NAN);
                            matmul_into(c, a, b, t, beta);
                            return c;
                        };
                        EXPECT(same_bits(product(Device::cuda, by), product(Device::cpu, MatmulBy::cublaslt)));
                    }
}

// Counted in 01_single_gpu/REFERENCE.md: EMULATE_STATS=1.
TEST_CASE("cuda: products by hand, Y (128, 128) = X (128, 64) W^T: three of them sum in the same order") {
    if (!have_gpu()) return;
    const auto product = [&](DType dtype, MatmulBy kernels) {
        const By scope(kernels);
        const Maker make{Device::cuda, dtype};
        return matmul(make.random({128, 64}, 1), make.random({128, 64}, 2), Transpose::b);
    };
    const Tensor naive = product(DType::f32, MatmulBy::naive);
    EXPECT(same_bits(product(DType::f32, MatmulBy::tiled), naive));
    EXPECT(same_bits(product(DType::f32, MatmulBy::registers), naive));
    EXPECT(distance(product(DType::bf16, MatmulBy::mma), values(product(DType::bf16, MatmulBy::naive))) <= 4e-3);
}

// Elements lie along o here, not along k. What it reads is counted in test_emulator.py.
TEST_CASE("cuda: products by hand, X^T Y") {
    if (!have_gpu()) return;
    for (MatmulBy by : {MatmulBy::tiled, MatmulBy::registers, MatmulBy::mma}) {
        const By scope(by);
        const auto product = [](Device device) {
            const Tensor x = integers({32, 64}, 1, DType::bf16, device), y = integers({32, 64}, 2, DType::bf16, device);
            return matmul(x, y, Transpose::a);
        };
        EXPECT(same_bits(product(Device::cuda), product(Device::cpu)));
    }
}

TEST_CASE("cuda: training with products by hand: the loss and every gradient of cuBLASLt's") {
    if (!have_gpu()) return;
    const Text text;
    const auto run = [&](MatmulBy by, const std::string& dtype) {
        TrainOptions o = odd(text, 2);
        o.device = "cuda";
        o.dtype = dtype;
        o.steps = 1;
        if (kSmall) o.model.layers = 1;
        const By scope(by);
        auto session = std::make_unique<Session>(o);
        session->run();
        return session;
    };
    int64_t number = 0;
    for (const std::string dtype : {"bf16", "fp32"})
        for (MatmulBy by : kByHand) {
            if (!in_gpu_slice(number++) || (dtype == "fp32" && by == MatmulBy::mma)) continue;
            INFO("by hand " << int(by) << ", " << dtype);
            EXPECT(worst_deviation(*run(by, dtype), *run(MatmulBy::cublaslt, dtype)) <=
                   (dtype == "fp32" ? 5e-6 : 2e-2));
        }
}

TEST_CASE("cuda: products by hand are refused where there are none: in one line that says what would work") {
    EXPECT(why_not_matmul(MatmulBy::cublaslt, Device::cpu, DType::f64) == "");
    EXPECT(why_not_matmul(MatmulBy::naive, Device::cpu, DType::f32) ==
           "naive: kernels for --device cuda, not cpu (try --matmul auto)");
    if (!have_gpu()) return;
    const By scope(MatmulBy::mma);
    const Tensor x = integers({8, 8}, 1, DType::f32, Device::cuda);
    EXPECT_USAGE_ERROR(matmul(x, x), "--matmul mma: products of bf16, not fp32 (try --matmul registers)");
}
