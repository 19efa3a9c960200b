// Every op on tensors of more than 2^31 elements: an index of 32 bits is a wrong address or a wrong row.
#include <numeric>

#include "01_single_gpu/ops/routing.h"
#include "tests/tall.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("cuda: beyond 2^31 elements: element by element") {
    if (!have_tall()) return;
    for (DType dtype : kTypes) {
        const auto elements = [&](const Tall& make) {
            const Tensor a = make.random(256, 1), b = make.random(256, 2);
            Tensor sum = make.empty(256), wide = make.floats(256), squares({1}, DType::f64, Device::cuda);
            Tensor swapped = make.empty(256), constant = make.empty(256);
            add(sum, a, b);
            copy(wide, sum);
            scale(wide, 0.75);
            sum_squares(squares, b);
            fill(constant, 2.5);
            swap_blocks(swapped, a, 1, make.rows);
            Tensor back = make.empty(256);
            swap_blocks(back, swapped, make.rows, 1);
            return Results{sum, wide, squares, constant, swapped, back};
        };
        compare_tall("add, copy, scale, fill, swap_blocks, sum_squares", dtype, 256, elements, kSquares);
        compare_tall("adamw", dtype, 256, [&](const Tall& make) {
            Tensor param = make.random(256, 1), master, m = make.floats(256), v = make.floats(256);
            if (dtype == DType::bf16) copy(master = make.floats(256), param);
            adamw(param, master, m, v, make.random(256, 2, DType::f32), adamw_step(1));
            return Results{param, m, v};
        });
        compare_tall("fill_normal", dtype, 256, [&](const Tall& make) {
            Tensor x = make.empty(256);
            const int64_t begin = (kTall / 256 / kBlocks + 1) * kBlocks - make.rows;  // the same rows of a whole tensor
            fill_normal(x, 42, {.row_begin = begin, .cols = 256, .global_cols = 256}, 0.02f);
            return Results{x};
        });
    }
}

TEST_CASE("cuda: beyond 2^31 elements: the router's scores") {
    if (!have_tall()) return;
    const RouterShape shape{512, 4, false, true, 2.5, 1, 1};
    compare_tall("choose_experts, router_weights, router_backward", DType::f32, 512, [&](const Tall& make) {
        const Tensor logits = make.random(512, 1);
        Tensor chosen({make.rows, 4}, DType::i32, Device::cuda), weights = make.floats(4), dlogits = make.floats(512);
        fill(chosen, 0);
        choose_experts(chosen, logits, {}, shape);
        router_weights(weights, logits, chosen, shape);
        router_backward(dlogits, make.random(4, 2), logits, chosen, {}, 0.01, shape);
        return Results{chosen, weights, dlogits};
    });
}

TEST_CASE("cuda: beyond 2^31 elements: row by row") {
    if (!have_tall()) return;
    for (DType dtype : kTypes) {
        const int64_t E = 16384;
        compare_tall("rmsnorm, add_rmsnorm", dtype, E, [&](const Tall& make) {
            const Tensor a = make.random(E, 1), b = make.random(E, 2);
            const Tensor weight = tensor(randoms(E, 4), {E}, dtype, Device::cuda);
            Tensor sum = make.empty(E), y = make.empty(E), recomputed = make.empty(E), inv = make.column();
            add_rmsnorm(sum, y, inv, a, b, weight, 1e-5);
            rmsnorm_recompute(recomputed, sum, inv, weight);
            Tensor plain = make.empty(E), inv_plain = make.column();
            rmsnorm(plain, inv_plain, a, weight, 1e-5);
            return Results{sum, y, inv, recomputed, plain, inv_plain};
        });
        const int64_t few = 512;  // columns: blocks that sum rows come in columns first
        compare_tall("add_bias and its gradient", dtype, few, [&](const Tall& make) {
            Tensor y = make.random(few, 1), dbias({few}, DType::f32, Device::cuda);
            fill(dbias, 0);
            add_bias_backward(dbias, y);
            add_bias(y, tensor(randoms(few, 2), {few}, dtype, Device::cuda));
            return Results{y, dbias};
        });
        compare_tall("swiglu and its gradient", dtype, E, [&](const Tall& make) {
            const Tensor gate_up = make.random(E, 1);
            Tensor h = make.empty(E / 2), dgate_up = make.empty(E);
            swiglu(h, gate_up);
            swiglu_backward(dgate_up, make.random(E / 2, 2), gate_up);
            return Results{h, dgate_up};
        });
        compare_tall("gather_slots, sum_slots, slot_products", dtype, E, [&](const Tall& make) {
            const Tensor x = make.random(E, 1), z = make.random(E, 2), weights = make.random(1, 3, DType::f32);
            const int32_t end = int32_t(make.rows);
            const Tensor order = make.ids({end - 1, end - 3, end - 2}, 0), place = order.view({make.rows, 1});
            Tensor gathered = make.empty(E), sums = make.empty(E), dots = make.floats(1);
            gather_slots(gathered, x, order, 1, weights);
            sum_slots(sums, z, place, weights);
            slot_products(dots, x, z, place);
            return Results{gathered, sums, dots};
        });
        const int64_t V = 128256;
        compare_tall("cross_entropy and its gradient", dtype, V, [&](const Tall& make) {
            Tensor logits = make.random(V, 1);
            const Tensor targets = make.ids({7, 128255, 1000}, kIgnored);
            Tensor max = make.column(), sum = make.column(), at = make.column(), lse = make.column();
            Tensor loss({1}, DType::f32, Device::cuda);
            softmax_stats(max, sum, at, logits, targets);
            cross_entropy(loss, lse, max, sum, at, 0.25);
            cross_entropy_backward(logits, targets, lse, 0.25);
            return Results{max, sum, at, lse, logits};  // not the loss, of blocks that did not run
        });
        compare_tall("embedding of many tokens, and its gradient", dtype, E, [&](const Tall& make) {
            const Tensor tokens = make.ids({1, 2, 1}, -1),
                         table = tensor(randoms(3 * E, 1), {3, E}, dtype, Device::cuda);
            Tensor y = make.empty(E), dtable({3, E}, DType::f32, Device::cuda);
            fill(dtable, 0);
            embedding(y, tokens, table);
            std::vector<int32_t> sorted(make.rows);  // by token: those of 1 before that of 2
            std::iota(sorted.begin(), sorted.end(), 0);
            std::swap(sorted[make.rows - 2], sorted[make.rows - 1]);
            embedding_backward(dtable, tokens, make.random(E, 3), 0, upload(sorted, {make.rows}, Device::cuda));
            return Results{y, dtable};
        });
        compare_tall("embedding of a large table, and its gradient", dtype, E, [&](const Tall& make) {
            const auto end = int32_t(make.rows);
            const Tensor tokens = upload({end - 2, end - 1, end - 3, end - 1}, {4}, Device::cuda);
            Tensor y({4, E}, dtype, Device::cuda), dtable = make.floats(E);
            embedding(y, tokens, make.random(E, 1));
            embedding_backward(dtable, tokens, tensor(randoms(4 * E, 2), {4, E}, dtype, Device::cuda));
            return Results{y, dtable};
        });
    }
}

TEST_CASE("cuda: beyond 2^31 elements: gradients of norms, whose blocks take many rows each") {
    if (!have_tall()) return;
    int64_t turn = 0;
    for (DType dtype : kTypes) {
        const int64_t E = 49152, D = 128, K = 128, width = 3 * K * D;  // wide, so that the rows are few
        if (in_gpu_slice(turn++))
            compare_tall("rmsnorm_backward", dtype, E, [&](const Tall& make) {
                const Tensor weight = tensor(randoms(E, 4), {E}, dtype, Device::cuda);
                Tensor inv = make.column(), dx = make.empty(E), dweight({E}, DType::f32, Device::cuda);
                fill(inv, 0.5);
                fill(dweight, 0);
                rmsnorm_backward(dx, dweight, make.random(E, 3), make.random(E, 1), inv, weight);
                return Results{dx, dweight};
            });
        if (in_gpu_slice(turn++))
            compare_tall("head_norm_backward", dtype, width, [&](const Tall& make) {
                const Tensor wq = tensor(randoms(D, 2), {D}, dtype, Device::cuda),
                             wk = tensor(randoms(D, 3), {D}, dtype, Device::cuda);
                Tensor dqkv = make.random(width, 4), dwq({D}, DType::f32, Device::cuda),
                       dwk({D}, DType::f32, Device::cuda);
                fill(dwq, 0);
                fill(dwk, 0);
                head_norm_backward(dqkv, dwq, dwk, make.random(width, 1), wq, wk, K * D, 1e-5);
                return Results{dqkv, dwq, dwk};
            });
    }
}

TEST_CASE("cuda: beyond 2^31 elements: heads") {
    if (!have_tall()) return;
    for (DType dtype : kTypes) {
        const int64_t D = 128, H = 128, K = 64, E = H * D, KE = K * D, width = E + 2 * KE;
        compare_tall("head_norm, split_rope and its gradient", dtype, width, [&](const Tall& make) {
            Rope rope;
            rope.head_dim = D;
            for (int i = 0; i < D / 2; ++i) rope.inv_freq[i] = std::pow(10000.0, -2.0 * i / D);
            const Tensor qkv = make.random(width, 1), positions = make.ids({5, 100, 70000}, 0);
            const Tensor wq = tensor(randoms(D, 2), {D}, dtype, Device::cuda),
                         wk = tensor(randoms(D, 3), {D}, dtype, Device::cuda);
            Tensor y = make.empty(width), rotated = make.empty(width);
            Tensor q = make.empty(E), k = make.empty(KE), v = make.empty(KE);
            head_norm(y, qkv, wq, wk, KE, 1e-5);
            split_rope(q, k, v, qkv, positions, rope);
            split_rope_backward(rotated, q, k, v, positions, rope);
            return Results{y, q, k, v, rotated};
        });
    }
}

TEST_CASE("cuda: beyond 2^31 elements: attention and its gradient, by both kernels") {
    if (!have_tall()) return;
    for (DType dtype : kTypes)
        for (const int64_t D : {128, 256}) {
            if (dtype == DType::f32 && D == 128) continue;  // plain, as with 256
            const int64_t T = D == 128 ? 144 : 72, H = 2,
                          B = kTall / (T * H * D) + 2;  // the last begins beyond 2^31
            compare_tall("attention, head size " + std::to_string(D), dtype, H * D, [&](const Tall& make) {
                const bool whole = make.rows > kLastRows;
                Tall all{whole ? B * T : T, dtype};
                const AttentionShape shape{whole ? B : 1, T, T, H, H, D};
                const auto of = [&](uint64_t key) {
                    Tensor x = all.empty(H * D), part = all.last(x, T);
                    copy(part, tensor(randoms(T * H * D, key), {T, H * D}, dtype));
                    return x;
                };
                const Tensor q = of(1), k = of(2), v = of(3), dout = of(4);
                Tensor out = all.empty(H * D), lse = all.floats(H), dq = all.empty(H * D), dk = all.empty(H * D),
                       dv = all.empty(H * D);
                attention(out, lse, q, k, v, shape);
                attention_backward(dq, dk, dv, dout, q, k, v, out, lse, shape);
                Results last;
                for (const Tensor& x : {out, lse, dq, dk, dv}) last.push_back(all.last(x, T));
                return last;
            });
        }
}
