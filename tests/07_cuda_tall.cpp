// The kernels of chapter 07 on tensors of more than 2^31 elements.
#include "07_fp8/complete/adamw8bit.h"
#include "07_fp8/complete/quantize.h"
#include "tests/tall.h"

using namespace train70b;
using namespace train70b::test;

namespace {

Tensor as_floats(const Tensor& codes) {  // fp32 (1, n) on the host
    Tensor host(codes.shape(), codes.dtype(), Device::cpu), x({1, codes.size()}, DType::f32, Device::cpu);
    copy(host, codes);
    for (int64_t i = 0; i < codes.size(); ++i) x.data<float>()[i] = float(static_cast<const uint8_t*>(host.raw())[i]);
    return x;
}

}  // namespace

TEST_CASE("cuda: beyond 2^31 elements: amaxes, casts to FP8, transposes") {
    if (!have_tall()) return;
    for (const DType dtype : kTypes)
        for (const Scaling scaling : {Scaling::tensor, Scaling::row}) {
            const int64_t cols = 1024, multiple = 16 * kBlocks;  // the last row of x^T begins beyond 2^31, too
            const auto op = [&](const Tall& make) {
                const Tensor x = make.random(cols, 1);
                Quantized q = make_quantized(make.rows, cols, DType::e4m3, scaling, Device::cuda);
                Quantized q_t = make_quantized(cols, make.rows, DType::e4m3, scaling, Device::cuda);
                Tensor amax = Tensor::like(q.scale_inv), amax_t = Tensor::like(q_t.scale_inv), none;
                Tensor transposed({cols, make.rows}, DType::e4m3, Device::cuda);
                for (Tensor* each : {&amax, &amax_t}) fill(*each, 0);
                for (Quantized* each : {&q, &q_t}) fill(each->scale_inv, 0.01);
                compute_amax(amax, amax_t, x, scaling);
                cast(q, q_t, none, x);
                transpose_fp8(transposed, q.data);
                Results results = {as_floats(make.last(q.data)), amax_t};
                results.push_back(scaling == Scaling::row ? make.last(amax) : amax);
                for (const int64_t column : {int64_t(0), int64_t(1), cols - 1})
                    for (const Tensor& each : {q_t.data, transposed})
                        results.push_back(
                            as_floats(each.element_slice((column + 1) * make.rows - kLastRows, {kLastRows})));
                return results;
            };
            compare_tall("cast by " + std::string(name_of(scaling)), dtype, cols, op, multiple);
        }
}

TEST_CASE("cuda: beyond 2^31 elements: AdamW with 8-bit moments") {
    if (!have_tall()) return;
    for (const DType dtype : kTypes) {
        const int64_t cols = 256, all = (kTall / cols / kBlocks + 1) * kBlocks;
        compare_tall("adamw8bit", dtype, cols, [&](const Tall& make) {
            const BlockLayout blocks =
                blocks_of({.row_begin = all - make.rows, .rows = make.rows, .cols = cols}, {all, cols});
            Tensor param = make.random(cols, 1), master;
            if (dtype == DType::bf16) copy(master = make.floats(cols), param);
            Moments moments{make.zeros(cols, DType::u8), make.zeros(cols, DType::u8),
                            Tensor({2, blocks.blocks()}, DType::f32, Device::cuda)};
            fill(moments.exp_avg, 127);  // the code of 0
            fill(moments.scale, 0);
            adamw8bit(param, master, moments, make.random(cols, 2, DType::f32), blocks, adamw_step(1), 5);
            const auto scale = [&](int64_t row) {
                return moments.scale.element_slice((row + 1) * blocks.blocks() - kLastRows, {kLastRows});
            };
            return Results{param, as_floats(make.last(moments.exp_avg)), as_floats(make.last(moments.exp_avg_sq)),
                           scale(0), scale(1)};
        });
    }
}
