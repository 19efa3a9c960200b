#pragma once
#include <cmath>

#include "01_single_gpu/core/random.h"
#include "06_context_parallel/complete/context_parallel.h"

namespace train70b::test {

// Relative error of attention's output and of the gradients of q, k, v (the worst of the four), against one device in
// fp32 on the same inputs, which are rounded to dtype. Scores have a standard deviation of scale^2. Collective.
inline double attention_error(const Comm& ranks, const ContextParallelOptions& options, DType dtype, uint64_t seed,
                              float scale = 1) {
    LlamaConfig c;
    c.heads = 8, c.kv_heads = 2, c.hidden = 8 * 16;
    const int64_t T = 128, B = 2, D = c.head_dim();
    const ContextLayout layout = context_layout(c, T, ranks.size(), options);
    // Of the whole batch, in the order of sequences: q, k, v and the gradient of the output.
    const auto whole = [&](int64_t heads, uint64_t key, DType type) {
        Tensor x({B * T, heads * D}, DType::f32, Device::cpu, Memory::workspace);
        const float std = key < 2 ? scale : 1.0f;  // of q and k
        fill_normal(x, random_bits(seed, key), {.cols = x.size(), .global_cols = x.size()}, std);
        Tensor rounded({B * T, heads * D}, dtype, Device::cpu, Memory::workspace);
        copy(rounded, x);
        Tensor result({B * T, heads * D}, type, Device::cpu, Memory::workspace);
        copy(result, rounded);
        return result;
    };
    const int64_t heads[] = {c.heads, c.kv_heads, c.kv_heads, c.heads};
    const auto run = [&](const std::vector<Tensor>& x, const std::function<Var(Tape&, const QKV&)>& attend) {
        Tape tape;
        const QKV qkv{Var{.data = x[0]}, Var{.data = x[1]}, Var{.data = x[2]}};
        Var out = attend(tape, qkv);
        const Tensor result = out.data;
        *out.grad = x[3];
        tape.backward();
        return std::vector<Tensor>{result, *qkv.q.grad, *qkv.k.grad, *qkv.v.grad};
    };
    std::vector<Tensor> inputs, mine;
    for (int i = 0; i < 4; ++i) {
        inputs.push_back(whole(heads[i], uint64_t(i), stats_dtype(dtype)));
        const Tensor all = whole(heads[i], uint64_t(i), dtype);
        Tensor rows({B * T / ranks.size(), heads[i] * D}, dtype, Device::cpu, Memory::workspace);
        int64_t at = 0;
        for (const auto [begin, count] : layout.tokens_of(ranks.rank(), T))
            for (int64_t b = 0; b < B; ++b, at += count) {
                Tensor range = rows.row_slice(at, at + count);
                copy(range, all.row_slice(b * T + begin, b * T + begin + count));
            }
        mine.push_back(rows);
    }
    const std::vector<Tensor> expected = run(inputs, [&](Tape& tape, const QKV& qkv) {
        return one_device_attention(tape, qkv, {.sequences = B, .seq_len = T}, {}, D);
    });
    Llama model({.layers = 1, .hidden = c.hidden, .heads = c.heads, .kv_heads = c.kv_heads}, {});
    apply_context_parallel(model, ranks, layout);
    const Batch batch{.sequences = B, .seq_len = T / ranks.size()};
    const std::vector<Tensor> got = run(mine, [&](Tape& tape, const QKV& qkv) {
        const auto& attention = model.blocks[0].attention;
        return attention ? attention(tape, qkv, batch, {}) : one_device_attention(tape, qkv, batch, {}, D);
    });
    double worst = 0;
    for (int i = 0; i < 4; ++i) {
        const std::vector<double> all = read(expected[size_t(i)]), part = read(got[size_t(i)]);
        const int64_t width = heads[i == 0 ? 0 : i - 1] * D;
        double difference = 0, size = 0;
        int64_t at = 0;
        for (const auto [begin, count] : layout.tokens_of(ranks.rank(), T))
            for (int64_t b = 0; b < B; ++b)
                for (int64_t e = (b * T + begin) * width; e < (b * T + begin + count) * width; ++e, ++at) {
                    difference += std::pow(part[size_t(at)] - all[size_t(e)], 2);
                    size += std::pow(all[size_t(e)], 2);
                }
        const double error = std::sqrt(ranks.sum(difference) / ranks.sum(size));
        if (!std::isnan(worst) && !(error <= worst)) worst = error;  // the first NaN stays
    }
    return worst;
}

}  // namespace train70b::test
