// Products by hand (--matmul) against the CPU's, and a training step with each. The numbers are small integers, so that
// every sum is exact in any order, and no element may differ. Then cuBLASLt's, by the fastest of its algorithms.
#include <thread>

#include "01_single_gpu/ops/matmul_autotune.h"
#include "tests/cuda_ops.h"
#include "tests/files.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

using Kernel = Chosen<matmul_by>;
using Autotune = Chosen<matmul_autotune>;

constexpr MatmulBy kByHand[] = {MatmulBy::naive, MatmulBy::tiled, MatmulBy::registers, MatmulBy::mma};

// Integers from -4 to 4, `skipped` elements behind an aligned address.
Tensor integers(Shape shape, uint64_t key, DType dtype, Device device, int64_t skipped = 0) {
    const int64_t count = shape[0] * shape[1];
    std::vector<double> numbers = randoms(skipped + count, key);
    for (double& x : numbers) x = std::floor(x * 4.5 + 0.5);
    return tensor(numbers, {skipped + count}, dtype, device).element_slice(skipped, shape);
}

// Products as in a run with this file, while cuBLASLt's n-th algorithm is the fastest: each twice, and one whose rows
// vary, which is not timed.
Results tuned(const std::string& file, int n) {
    const Autotune scope(file);
    if (kEmulated) emulated_fast_algorithm(n);
    Results results;
    for (DType dtype : kTypes)
        for (float beta : {0.0f, 1.0f})
            for (int turn = 0; turn < 2; ++turn) {
                const Maker make{Device::cuda, dtype};
                results.push_back(tensor(randoms(40 * 24, 3), {40, 24}, DType::f32, Device::cuda));
                matmul_into(results.back(), make.random({40, 72}, 1), make.random({24, 72}, 2), Transpose::b, beta);
            }
    const Maker make{Device::cuda, DType::f32};
    Tensor c = make.empty({41, 24});
    matmul_into(c, make.random({41, 72}, 1), make.random({24, 72}, 2), Transpose::b, 0, Rows::vary);
    if (kEmulated) emulated_fast_algorithm(0);
    return results;
}
bool same_results(const Results& a, const Results& b) {
    return std::equal(a.begin(), a.end(), b.begin(), [](auto& x, auto& y) { return same_bits(x, y); });
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
                            const Kernel scope(kernels);
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
        const Kernel scope(kernels);
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
        const Kernel scope(by);
        const auto product = [](Device device) {
            const Tensor x = integers({32, 64}, 1, DType::bf16, device), y = integers({32, 64}, 2, DType::bf16, device);
            return matmul(x, y, Transpose::a);
        };
        EXPECT(same_bits(product(Device::cuda), product(Device::cpu)));
    }
}

TEST_CASE(
    "cuda: training with products by hand, or with those that --matmul-autotune times: the loss and every gradient") {
    if (!have_gpu()) return;
    const Text text;
    const auto run = [&](MatmulBy by, const std::string& dtype) {
        TrainOptions o = odd(text, 2);
        o.device = "cuda";
        o.dtype = dtype;
        o.steps = 1;
        if (kSmall) o.model.layers = 1;
        const Kernel scope(by);
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
    const Folder folder;
    const auto untuned = run(MatmulBy::cublaslt, "fp32");
    const Autotune scope(folder / "file");
    EXPECT(worst_deviation(*run(MatmulBy::cublaslt, "fp32"), *untuned) <= 5e-6);
    EXPECT(read_text(folder / "file").find("+= ") != std::string::npos);
}

TEST_CASE("cuda: products by hand are refused where there are none: in one line that says what would work") {
    EXPECT(why_not_matmul(MatmulBy::cublaslt, Device::cpu, DType::f64) == "");
    EXPECT(why_not_matmul(MatmulBy::naive, Device::cpu, DType::f32) ==
           "naive: kernels for --device cuda, not cpu (try --matmul auto)");
    if (!have_gpu()) return;
    const Kernel scope(MatmulBy::mma);
    const Tensor x = integers({8, 8}, 1, DType::f32, Device::cuda);
    EXPECT_USAGE_ERROR(matmul(x, x), "--matmul mma: products of bf16, not fp32 (try --matmul registers)");
}

TEST_CASE("cuda: --matmul-autotune: the fastest algorithm of each product, timed once: a file gives the same bits") {
    if (!have_gpu()) return;
    const Folder folder;
    const Results by_3 = tuned(folder / "3", 3), by_2 = tuned(folder / "2", 2), untuned = tuned("", 2);
    const std::string text_3 = read_text(folder / "3"), text_2 = read_text(folder / "2");
    EXPECT(std::count(text_3.begin(), text_3.end(), '\n') == 4);
    for (size_t i = 0; i < by_3.size(); i += 2) EXPECT(same_bits(by_3[i], by_3[i + 1]));
    expect_near("timed", DType::f32, by_3, untuned, 5e-6);
    write_text(folder / "3 again", text_3);
    EXPECT(same_results(tuned(folder / "3 again", 2), by_3));
    EXPECT(read_text(folder / "3 again") == text_3);
    if (!kEmulated) return;
    EXPECT(!same_bits(by_3[0], by_2[0]));
    EXPECT(!same_bits(by_3[0], untuned[0]));
    EXPECT(same_results(tuned(folder / "1", 1), untuned));

    // While this rank times a product, another one writes what it has found.
    emulated_hold("cublasLtMatmul");
    std::thread other([&] {
        while (!std::filesystem::exists(folder / "both")) std::this_thread::yield();
        write_text(folder / "both", text_2);
        emulated_hold(nullptr);
    });
    EXPECT(same_results(tuned(folder / "both", 3), by_2));
    other.join();
    const std::string both = read_text(folder / "both");
    EXPECT(std::count(both.begin(), both.end(), '\n') == 5);
}

TEST_CASE("cuda: --matmul-autotune: a file that is malformed, of another GPU or cuBLASLt, or cannot be written") {
    if (!have_gpu()) return;
    const Folder folder;
    const Results untuned = tuned("", 0);
    tuned(folder / "right", 0);
    const std::string right = read_text(folder / "right"), gpu = cuda_info().name;
    const auto with = [&, name = folder / "wrong"](const std::string& text) {
        write_text(name, text);
        return tuned(name, 0);
    };
    EXPECT_USAGE_ERROR(with("x\n"), "wrong: line 1 is no product's (try a file that does not exist)");
    EXPECT_USAGE_ERROR(with(right.substr(0, right.size() - 1)), "wrong: line 4 is no product's");
    EXPECT_USAGE_ERROR(with(right + gpu + right.substr(gpu.size() + 1)), "wrong: line 5 is of");
    EXPECT_USAGE_ERROR(with("Tesla T4" + right.substr(gpu.size())), "wrong: line 1 is of Tesla T4, cuBLASLt");
    EXPECT_USAGE_ERROR(with(right.substr(0, 2) + "\n"), "(try a file that does not exist)");
    EXPECT_USAGE_ERROR(tuned(folder / "none/file", 0), "none/file: cannot be written (No such file");
    EXPECT_USAGE_ERROR(tuned(folder.text(), 0), "cannot be written (Is a directory");
    std::string unknown = right;  // algorithms that cuBLASLt does not take: then its own choice
    for (size_t end = unknown.find('\n'); end != unknown.npos; end = unknown.find('\n', end + 1))
        unknown.replace(end - 128, 128, std::string(128, 'f'));
    EXPECT(same_results(with(unknown), untuned));
}
