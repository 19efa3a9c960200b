// The kernels of chapter 07 against the CPU's, and training in 8 bits on a GPU, over every backend that can work here
// (how to start it: tests/02_cuda.cpp).
#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/core/registry.h"
#include "07_fp8/complete/adamw8bit.h"
#include "07_fp8/complete/adamw_bf16.h"
#include "07_fp8/complete/flags.h"
#include "07_fp8/complete/training_report.h"
#include "tests/device_comms.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// The first is for casts alone: its rows, and those of its transpose, begin at any byte.
const std::pair<int64_t, int64_t> kShapes[] = {{19, 133}, {16, 16}, {128, 256}, {144, 400}, {1024, 512}, {48, 2064}};
const Scaling kScalings[] = {Scaling::tensor, Scaling::row, Scaling::vec128, Scaling::block128};

// Numbers of many magnitudes. broken: six of the diagonal are infinite or NaN, each kind at an even and an odd place.
Tensor random(Shape shape, DType dtype, Device device, uint64_t key, bool broken = false) {
    const int64_t n = shape[0] * shape[1];
    std::vector<double> x = randoms(n, key), exponent = randoms(n, key + 1);
    for (int64_t i = 0; i < n; ++i) x[size_t(i)] *= std::pow(10, 2 * exponent[size_t(i)]);
    for (int64_t i = 0; broken && i < 6; ++i)
        x[size_t(i * (shape[1] + 1))] = std::array<double, 3>{INFINITY, -INFINITY, NAN}[size_t(i % 3)];
    return tensor(x, std::move(shape), dtype, device);
}

std::vector<uint8_t> bytes(const Tensor& x) {
    Tensor host(x.shape(), x.dtype(), Device::cpu);
    copy(host, x);
    return {host.data<uint8_t>(), host.data<uint8_t>() + host.size()};
}

bool same(const std::vector<double>& a, const std::vector<double>& b) {  // NaN is NaN
    bool equal = a.size() == b.size();
    for (size_t i = 0; equal && i < a.size(); ++i) equal = a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]));
    return equal;
}

}  // namespace

TEST_CASE("amaxes, scales, FP8 data and their transposes on a GPU are the CPU's, bit for bit") {
    if (!has_gpu()) return;
    int64_t number = 0;
    for (const auto& [rows, cols] : kShapes)
        for (const DType dtype : {DType::f32, DType::bf16})
            for (const DType format : {DType::e4m3, DType::e5m2})
                for (const Scaling scaling : kScalings)
                    for (const bool broken : {false, true}) {
                        const int64_t turn = number / 8 + number % 8;         // of each eight another one
                        if (number++ >= 32 && !in_gpu_slice(turn)) continue;  // the first shape is in all slices
                        struct Result {
                            std::vector<double> amax, amax_t, whole, scale_inv;
                            std::vector<uint8_t> data, data_t, transposed;
                        };
                        const auto run = [&, r = rows, c = cols](Device device) {
                            const Tensor x = random({r, c}, dtype, device, 5, broken);
                            Quantized q = make_quantized(r, c, format, scaling, device);
                            Quantized q_t = make_quantized(c, r, format, scaling, device);
                            Tensor amax = Tensor::like(q.scale_inv), amax_t = Tensor::like(q_t.scale_inv);
                            Tensor whole({1}, DType::f32, device), transposed({c, r}, format, device);
                            for (Tensor* each : {&amax, &amax_t, &whole}) fill(*each, 0);
                            compute_amax(amax, amax_t, x, scaling);
                            compute_scale_inv(q.scale_inv, amax, format);
                            compute_scale_inv(q_t.scale_inv, amax_t, format);
                            cast(q, q_t, whole, x);
                            transpose_fp8(transposed, q.data);
                            return Result{read(amax),    read(amax_t),    read(whole),      read(q.scale_inv),
                                          bytes(q.data), bytes(q_t.data), bytes(transposed)};
                        };
                        const Result gpu = run(Device::cuda), cpu = run(Device::cpu);
                        INFO(rows, " x ", cols, " ", std::string(name_of(dtype)), " to ", std::string(name_of(format)),
                             " by ", std::string(name_of(scaling)), ", broken ", broken);
                        EXPECT(same(gpu.amax, cpu.amax));
                        EXPECT(same(gpu.amax_t, cpu.amax_t));
                        EXPECT(same(gpu.whole, cpu.whole));
                        EXPECT(same(gpu.scale_inv, cpu.scale_inv));
                        EXPECT(gpu.data == cpu.data);
                        EXPECT(gpu.data_t == cpu.data_t);
                        EXPECT(gpu.transposed == cpu.transposed);
                    }
}

TEST_CASE("AdamW on bf16 without fp32 copies on a GPU is the CPU's: but for the last bit of the arithmetic, its bits") {
    if (!has_gpu()) return;
    for (const DType grad_dtype : {DType::f32, DType::bf16}) {
        const auto run = [&](Device device) {
            const GlobalIndex at{.row_begin = 3, .col_begin = 8, .cols = 31, .global_cols = 64, .offset = 5};
            Tensor p = random({7, 133}, DType::bf16, device, 1), m = random({7, 133}, DType::bf16, device, 2),
                   v = Tensor::like(m);
            const Tensor g = random({7, 133}, grad_dtype, device, 3);
            fill(v, 1e-3f);
            adamw_bf16(p, m, v, g, at, {1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, 3}, 77);
            return std::array{values(p), values(m), values(v)};
        };
        const auto gpu = run(Device::cuda), cpu = run(Device::cpu);
        for (size_t i = 0; i < 3; ++i) {
            int64_t other = 0;
            for (size_t e = 0; e < gpu[i].size(); ++e) other += gpu[i][e] != cpu[i][e];
            EXPECT(other <= 2);
            EXPECT(distance(gpu[i], cpu[i]) <= 1e-3);
        }
    }
}

TEST_CASE("the tensor cores' product of FP8 data is the CPU's, to 1e-3 of its size; added to what is there") {
    if (!has_gpu()) return;
    int64_t number = 0;
    for (const char* name : {"current", "rowwise", "blockwise"})
        for (const auto& [R, in, out] : {std::tuple<int64_t, int64_t, int64_t>{128, 256, 384}, {512, 1024, 256}})
            for (const DType dtype : {DType::bf16, DType::f32}) {
                const int64_t turn = number++ % 4;  // one of the four for each recipe
                if (!in_gpu_slice(turn) && !in_gpu_slice(turn + 4)) continue;
                const auto run = [&, R = R, in = in, out = out](Device device) {
                    const auto recipe = make_recipe({.recipe = name}, 3, device, Comm());
                    const Tensor x = random({R, in}, DType::bf16, device, 1),
                                 w = random({out, in}, DType::bf16, device, 3);
                    const Tensor dy = random({R, out}, DType::bf16, device, 5);
                    const QuantizedPair of_x = recipe->quantize({Operand::input, 0}, x, Usage::both, true);
                    const QuantizedPair of_w = recipe->quantize({Operand::weight, 1}, w, Usage::both, true);
                    const QuantizedPair of_dy = recipe->quantize({Operand::gradient, 2}, dy, Usage::both, true);
                    Tensor y({R, out}, dtype, device), dx({R, in}, dtype, device), dw({out, in}, DType::f32, device);
                    fill(dw, 1);
                    scaled_matmul_into(y, of_x.rowwise, of_w.rowwise);
                    scaled_matmul_into(dx, of_dy.rowwise, of_w.columnwise);
                    scaled_matmul_into(dw, of_dy.columnwise, of_x.columnwise, 1);
                    return std::array{values(y), values(dx), values(dw)};
                };
                if (versions_text(Device::cuda).find(name) == std::string::npos) {
                    EXPECT_USAGE_ERROR(run(Device::cuda), "try another --fp8 recipe");
                    continue;
                }
                const auto gpu = run(Device::cuda), cpu = run(Device::cpu);
                for (size_t i = 0; i < 3; ++i) {
                    INFO(std::string(name), " ", R, " ", in, " ", out, " ", std::string(name_of(dtype)), ", product ",
                         i, ": ", distance(gpu[i], cpu[i]));
                    // bf16 rounds; Hopper's tensor cores add products of 8 bits with about 14 bits
                    EXPECT(distance(gpu[i], cpu[i]) <= (dtype == DType::bf16 && i < 2 ? 4e-3 : 1e-3));
                }
            }
}

TEST_CASE("a product that cuBLASLt does not have is a usage error that says what would work") {
    if (!has_gpu()) return;
    const auto zeros = [](int64_t rows, int64_t cols) {
        Quantized q = make_quantized(rows, cols, DType::e4m3, Scaling::tensor, Device::cuda);
        Tensor x({rows, cols}, DType::f32, Device::cuda), none;
        Quantized no_transpose;
        fill(x, 0);
        fill(q.scale_inv, 1);
        cast(q, no_transpose, none, x);
        return q;
    };
    Tensor c({24, 24}, DType::bf16, Device::cuda);  // rows of 24 bytes: tensor cores require multiples of 16
    EXPECT_USAGE_ERROR(
        scaled_matmul_into(c, zeros(24, 24), zeros(24, 24)),
        "no algorithm for the product bf16 (24, 24) = e4m3 (24, 24) x e4m3 (24, 24)^T on this GPU: scales "
        "by tensor and by tensor, replacing what c holds; try another --fp8 recipe, or sizes that are "
        "divisible by 16");
}

TEST_CASE("the ops of this chapter take tensors without rows, on both devices") {
    for (const Device device : {Device::cpu, Device::cuda}) {
        if (device == Device::cuda && !has_gpu()) continue;
        for (const Scaling scaling : kScalings)
            for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 32}, {0, 0}}) {
                const Tensor x({rows, cols}, DType::bf16, device);
                Quantized q = make_quantized(rows, cols, DType::e4m3, scaling, device);
                Quantized q_t = make_quantized(cols, rows, DType::e4m3, scaling, device);
                Tensor amax = Tensor::like(q.scale_inv), amax_t = Tensor::like(q_t.scale_inv);
                Tensor whole({1}, DType::f32, device), transposed({cols, rows}, DType::e4m3, device);
                for (Tensor* each : {&amax, &amax_t, &whole}) fill(*each, 0);
                compute_amax(amax, amax_t, x, scaling);
                compute_scale_inv(q.scale_inv, amax, DType::e4m3);
                compute_scale_inv(q_t.scale_inv, amax_t, DType::e4m3);
                cast(q, q_t, whole, x);
                transpose_fp8(transposed, q.data);
                INFO(name_of(device), ", by ", name_of(scaling));
                EXPECT(read(whole) == std::vector<double>{0});
                EXPECT(read(amax_t) == std::vector<double>(size_t(amax_t.size()), 0));
                EXPECT(read(q_t.scale_inv) == std::vector<double>(size_t(amax_t.size()), 1));
                if (scaling == Scaling::block128) continue;  // no product of two
                Tensor c({cols, cols}, DType::f32, device), nothing({rows, rows}, DType::f32, device);
                fill(c, 3);
                scaled_matmul_into(c, q_t, q_t, 1);  // a gradient of no rows
                EXPECT(read(c) == std::vector<double>(size_t(c.size()), 3));
                scaled_matmul_into(nothing, q, q);
            }
        Param weight = make_param("weight", {4, 32}, 1);
        Tensor param({0}, DType::f32, device), grad({0}, DType::f32, device);
        AdamW8bit optimizer({{&weight, 0, param, grad}}, {});
        optimizer.update(1, 1e-2f, 0.5f);
    }
}

TEST_CASE("8-bit AdamW on a GPU: the CPU's, but for roundings that a last bit decides") {
    if (!has_gpu()) return;
    for (const auto& [dtype, of_grad] :
         {std::pair(DType::f32, DType::f32), {DType::bf16, DType::f32}, {DType::bf16, DType::bf16}})
        for (const GlobalIndex& place : {GlobalIndex{.cols = 96, .global_cols = 96, .offset = 37},
                                         {.col_begin = 48, .cols = 48, .global_cols = 96}}) {
            const int64_t n = 5000;
            const auto run = [&, dtype = dtype, of_grad = of_grad](Device device) {
                Tensor param = tensor(randoms(n, 1), {n}, dtype, device), grad({n}, of_grad, device);
                Param whole = make_param("weight", {1 << 20, place.global_cols}, 1);
                whole.local = {place.row_begin, 1 << 20, place.col_begin, place.cols};
                AdamW8bit optimizer({{&whole, place.offset, param, grad}}, {});
                for (int step = 0; step < 5; ++step) {
                    std::vector<double> fresh = randoms(n, 100 + uint64_t(step));
                    for (size_t i = 0; i < fresh.size(); i += 3) fresh[i] *= 1e-4;  // second moments below all levels
                    copy(grad, tensor(fresh, {n}, DType::f32, device));
                    optimizer.update(step + 1, 1e-2f, 0.5f);
                }
                return values(param);
            };
            const double apart = distance(run(Device::cuda), run(Device::cpu));
            INFO(std::string(name_of(dtype)), ", gradients ", std::string(name_of(of_grad)), ": ", apart);
            EXPECT(apart <= 1e-4);
        }
}

TEST_CASE("training in 8 bits on a GPU: near the CPU's run; ZeRO-3's FP8 all-gathers give stage 0's run, bit for bit") {
    if (!has_gpu()) return;
    const Text text;
    TrainOptions o = tiny(text);
    o.model = {.name = "test", .layers = 2, .hidden = 256, .heads = 4, .kv_heads = 2, .ffn = 512, .vocab = 256};
    if (kEmulated) {
        o.model.layers = 1;
        o.model.hidden = 128;
        o.model.heads = 2;
        o.model.kv_heads = 1;
        o.model.ffn = 256;
        if (kSmall) o.model.vocab = 128;
        o.steps = 2;
    }
    const auto last = size_t(2 * (o.steps - 1));  // the last step's loss in a history
    o.dtype = "bf16";
    o.seq_len = kSmall ? 32 : 64;
    o.global_batch = o.micro_batch = (kSmall ? 1 : 2) * world().size();
    o.lr = o.min_lr = 1e-3;
    o.init_std = 0.02;
    int64_t layout = 0;
    for (const std::string& recipe : names_of(fp8_recipes()))
        for (const std::string optimizer : {"adamw", "adamw8bit", "muon", kStochasticRounding}) {
            if (!find_entry(fp8_recipes(), "--fp8", recipe).on_gpu) continue;
            if ((optimizer == "muon" || optimizer == kStochasticRounding) && recipe != "current") continue;
            if (!in_gpu_slice(layout++)) continue;
            Precision precision;
            precision.fp8.recipe = recipe;
            precision.optimizer = optimizer;
            const auto run = [&](const Comm& ranks, const ZeroOptions& zero, const char* device) {
                TrainOptions each = o;
                each.device = device;
                each.micro_batch = o.global_batch / ranks.size();
                std::unique_ptr<Fp8Trainer> composed;
                Session session(each, [&](Session& s) {
                    composed = std::make_unique<Fp8Trainer>(s.model, s.trainer, s.options, ranks,
                                                            TensorComms{Comm(), ranks}, zero, precision);
                });
                session.run();
                return session.history();
            };
            const std::vector<double> cpu = run(Comm(), {.stage = 0}, "cpu");
            // One rank of its own: the same on all of them.
            const std::vector<double> gpu = kSmall && this_rank > 0 ? cpu : run(Comm(), {.stage = 0}, "cuda");
            INFO(recipe, ", ", optimizer, ": ", gpu[last], " and ", cpu[last]);
            EXPECT_EVERYWHERE(std::abs(gpu[0] / cpu[0] - 1) <= 2e-3);
            EXPECT_EVERYWHERE(std::abs(gpu[last] / cpu[last] - 1) <= 0.02);
            for (const Comm& comm : device_comms()) {
                const std::vector<double> whole = run(comm, {.stage = 0}, "cuda"),
                                          sharded = run(comm, {.stage = 3}, "cuda");
                EXPECT_EVERYWHERE(std::abs(whole[last] / cpu[last] - 1) <= 0.02);
                // As in tests/07_fp8.cpp, where the reasons for the exceptions are.
                if (recipe != "delayed" && optimizer != "adamw8bit")
                    EXPECT_EVERYWHERE(whole == sharded);
                else
                    EXPECT_EVERYWHERE(std::abs(sharded[last] / whole[last] - 1) <= 0.02);
            }
        }
}
