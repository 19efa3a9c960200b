// Every CUDA op against the CPU op, in fp32 and bf16, and the whole model's loss and gradients. Where there is no GPU
// each case says so and is skipped.
#include "01_single_gpu/ops/latent_heads.h"
#include "01_single_gpu/ops/sinks.h"
#include "tests/cuda_ops.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("cuda: matrix product in every orientation, accumulating, mixed dtypes") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (auto [m, n, k] : {std::array<int64_t, 3>{64, 128, 256}, {5, 7, 3}, {33, 40, 72}, {1, 256, 64}})
            for (Transpose t : {Transpose::none, Transpose::a, Transpose::b})
                for (DType out : {dtype, DType::f32})
                    for (float beta : {0.0f, 1.0f})
                        compare(ops("matmul, transpose " + std::to_string(int(t)), {m, n, k}), out, [&](Device device) {
                            const Maker make{device, dtype};
                            const Tensor a = make.random(t == Transpose::a ? Shape{k, m} : Shape{m, k}, 1);
                            const Tensor b = make.random(t == Transpose::b ? Shape{n, k} : Shape{k, n}, 2);
                            Tensor c = tensor(randoms(m * n, 3), {m, n}, out, device);
                            matmul_into(c, a, b, t, beta);
                            return Results{c};
                        });
}

TEST_CASE("cuda: products of one shape, aligned or not: each by an algorithm that its pointers allow") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (const int64_t shifted : {-1, 0, 1, 2, -1})  // which operand begins an element behind an aligned address
            compare(ops("matmul, unaligned operand", {shifted}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                const auto at = [&](int64_t operand, int64_t rows, int64_t cols) {
                    const int64_t begin = operand == shifted ? 1 : 0;
                    return make.random({begin + rows * cols}, uint64_t(operand)).element_slice(begin, {rows, cols});
                };
                const Tensor a = at(0, 64, 32), b = at(1, 32, 48);
                Tensor c = at(2, 64, 48);
                matmul_into(c, a, b);
                return Results{c};
            });
}

TEST_CASE("cuda: fill, copy, scale, add, sum of squares") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (auto [rows, cols] : kSizes)
            compare(ops("add, copy, scale, sum_squares, fill", {rows, cols}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                Tensor a = make.random({rows, cols}, 1), b = make.random({rows, cols}, 2),
                       sum = make.empty({rows, cols});
                Tensor wide = make.floats({rows, cols}), squares({1}, DType::f64, device),
                       constant = make.empty({rows, cols});
                add(sum, a, b);
                copy(wide, sum);
                scale(wide, 0.75f);
                sum_squares(squares, b);
                fill(constant, 2.5f);
                add(a, a, wide);  // in place, mixed dtypes
                return Results{sum, wide, squares, constant, a};
            });
}

TEST_CASE("cuda: the sum of squares of more elements than its blocks take in one pass") {
    if (!have_gpu()) return;
    const int64_t n = (1 << 21) + 5000;  // 1,024 blocks x 256 threads x 8
    for (int64_t turn = 0; turn < (kSmall ? 8 : 2); ++turn) {
        if (!in_gpu_slice(turn)) continue;
        const DType dtype = kTypes[turn % 2];
        const auto run = [&](Device device) {
            Tensor x({n}, dtype, device), squares({1}, DType::f64, device);
            fill(x, 1);
            Tensor tail = x.element_slice(n - 4000, {4000});
            scale(tail, 30);
            sum_squares(squares, x);
            return Results{squares};
        };
        expect_near("sum_squares of 2.1 M elements", dtype, run(Device::cuda), run(Device::cpu), 5e-6);
    }
}

TEST_CASE("cuda: fill with 0 in every dtype, with other numbers in those that kernels compute in") {
    if (!have_gpu()) return;
    for (const auto& [dtype, value] :
         {std::pair(DType::f32, 3.0), {DType::bf16, 3.0}, {DType::i32, 3.0}, {DType::f32, 0.0}, {DType::f64, 0.0}}) {
        Tensor x({1001}, dtype, Device::cuda), back({1001}, dtype, Device::cpu), expected({1001}, dtype, Device::cpu);
        fill(x, value);
        fill(expected, value);
        copy(back, x);
        INFO(name_of(dtype));
        EXPECT(std::memcmp(back.raw(), expected.raw(), size_t(back.bytes())) == 0);
    }
}

TEST_CASE("cuda: views that begin anywhere") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (int64_t begin : {1, 3, 8}) {
            compare(ops("scale of a view from element", {begin}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                Tensor whole = make.random({1000}, 1);
                Tensor part = whole.element_slice(begin, {900});
                scale(part, 3);
                return Results{whole};
            });
            compare(ops("rmsnorm by a weight from element", {begin}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                const Tensor weight = make.random({100}, 1).element_slice(begin, {64}), x = make.random({3, 64}, 2);
                Tensor y = make.empty({3, 64}), dx = make.empty({3, 64}), inv = make.floats({3});
                Tensor dweight = make.zeros({64});
                rmsnorm(y, inv, x, weight, 1e-5f);
                rmsnorm_backward(dx, dweight, make.random({3, 64}, 3), x, inv, weight);
                return Results{y, dx, dweight};
            });
            compare(ops("split_rope to a v from element", {begin}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                Tensor q = make.empty({3, 32}), k = make.empty({3, 16}), whole = make.random({64}, 1);
                Tensor v = whole.element_slice(begin, {3, 16});
                split_rope(q, k, v, make.random({3, 64}, 2), make.ids(3, 100, 3), {.head_dim = 16});
                return Results{q, k, whole};
            });
        }
}

namespace {
// Of two batches, with the rows sorted by token here or by the op: the same bits.
Tensor embedding_gradient(const Tensor& tokens, const Shape& shape, const Maker& make, int64_t first) {
    const std::vector<double> ids = read(tokens);
    const Tensor order = upload(rows_by_token({ids.begin(), ids.end()}), {tokens.size()}, tokens.device());
    Tensor sorted = make.zeros(shape), dtable = make.zeros(shape);
    for (const uint64_t seed : {2, 3}) {
        const Tensor dy = make.random({tokens.size(), shape[1]}, seed);
        embedding_backward(sorted, tokens, dy, first, order);
        embedding_backward(dtable, tokens, dy, first);
    }
    EXPECT(same_bits(sorted, dtable));
    return dtable;
}
}  // namespace

TEST_CASE("cuda: embedding and its gradient, repeated and foreign tokens") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (auto [rows, cols] : kSizes)
            for (int64_t first : {0, 4})
                compare(ops("embedding", {rows, cols}), dtype, [&](Device device) {
                    const Maker make{device, dtype};
                    const Tensor tokens = make.ids(rows, 13, 7);
                    Tensor y = make.empty({rows, cols});
                    embedding(y, tokens, make.random({6, cols}, 1), first);
                    return Results{y, embedding_gradient(tokens, {6, cols}, make, first)};
                });
}

TEST_CASE("cuda: the embedding's gradient, tokens with more rows than a block sums") {
    if (!have_gpu()) return;
    // Rows of tokens 0, 1, ..., which are cut at multiples of 64: those of 5 and 6 begin and end there, those of 9 end
    // a row behind a cut, those of 11 begin a row before one.
    const int rows_of[] = {1, 40, 60, 1, 26, 128, 64, 300, 63, 22, 62, 40, 5};
    std::vector<int32_t> ids;
    for (int turn = 0; turn < 300; ++turn)  // interleaved
        for (int32_t token = 0; token < std::ssize(rows_of); ++token)
            if (turn < rows_of[token]) ids.push_back(token);
    for (DType dtype : kTypes)
        for (const auto [first, cols] : {std::array<int64_t, 2>{0, 20}, {3, 24}})
            compare(ops("embedding of tokens with many rows", {first, cols}), dtype, [&](Device device) {
                const Tensor tokens = upload(ids, {std::ssize(ids)}, device);
                return Results{embedding_gradient(tokens, {10, cols}, {device, dtype}, first)};
            });
}

TEST_CASE("cuda: rmsnorm, with the residual addition, recomputed, and its gradient") {
    if (!have_gpu()) return;
    std::vector<std::array<int64_t, 2>> sizes = kSizes;
    sizes.push_back({1, 12'288});  // 48 KiB of sums: not without asking, beside static arrays
    sizes.push_back({530, 8});     // more rows than blocks in the gradient
    for (DType dtype : kTypes)
        for (auto [rows, cols] : sizes) {
            if (rows == 530 && dtype != DType::f32) continue;
            compare(ops("rmsnorm", {rows, cols}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                const Tensor a = make.random({rows, cols}, 1), b = make.random({rows, cols}, 2);
                const Tensor weight = make.random({cols}, 3), dy = make.random({rows, cols}, 4);
                Tensor sum = make.empty({rows, cols}), y = make.empty({rows, cols}), plain = make.empty({rows, cols});
                Tensor recomputed = make.empty({rows, cols}), dx = make.empty({rows, cols});
                Tensor inv = make.floats({rows}), inv_sum = make.floats({rows});
                Tensor dweight = tensor(randoms(cols, 5), {cols}, DType::f32, device);  // added to
                rmsnorm(plain, inv, a, weight, 1e-5f);
                add_rmsnorm(sum, y, inv_sum, a, b, weight, 1e-5f);
                rmsnorm_recompute(recomputed, sum, inv_sum, weight);
                EXPECT(values(recomputed) == values(y));
                rmsnorm_backward(dx, dweight, dy, sum, inv_sum, weight);
                Results results{plain, inv, sum, y, inv_sum, dweight};
                // Of one column, dx = inv dy weight (1 - x^2 inv^2) is nothing but the rounding of inv: x inv is 1 but
                // for eps.
                if (cols > 1) results.push_back(dx);
                return results;
            });
        }
}

TEST_CASE("cuda: RoPE and its gradient, positions anywhere") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (const auto [D, H, R] : {std::array<int, 3>{24, 4, 37}, {6, 4, 37}, {16, 4, 37}, {64, 4, 37}, {128, 40, 3}})
            compare(ops("split_rope, head size, heads", {D, H}), dtype, [&, D = D, H = H, R = R](Device device) {
                const Maker make{device, dtype};
                const int64_t K = H / 2;
                Rope rope;
                rope.head_dim = D;
                for (int i = 0; i < D / 2; ++i) rope.inv_freq[i] = std::pow(10000.0, -2.0 * i / D);
                const Tensor positions = make.ids(R, 1000000, 5);
                Tensor q = make.empty({R, H * D}), k = make.empty({R, K * D}), v = make.empty({R, K * D});
                Tensor dqkv = make.empty({R, (H + 2 * K) * D});
                split_rope(q, k, v, make.random({R, (H + 2 * K) * D}, 1), positions, rope);
                split_rope_backward(dqkv, make.random({R, H * D}, 2), make.random({R, K * D}, 3),
                                    make.random({R, K * D}, 4), positions, rope);
                return Results{q, k, v, dqkv};
            });
}

TEST_CASE("cuda: the norms of each head of q and k, and their gradients") {
    if (!have_gpu()) return;
    int64_t number = 0;
    for (DType dtype : kTypes)
        for (DType grad : {dtype, DType::f32})
            for (auto [rows, D] : {std::array<int64_t, 2>{3, 2}, {37, 6}, {5, 64}, {300, 40}, {2, 128}, {4, 256}}) {
                if (rows == 300 && !in_gpu_slice(number++)) continue;
                compare(ops("head_norm", {rows, D}), dtype, [&](Device device) {
                    const Maker make{device, dtype};
                    const int64_t H = 10, K = 5, width = (H + 2 * K) * D;
                    const Tensor qkv = make.random({rows, width}, 1), wq = make.random({D}, 2),
                                 wk = make.random({D}, 3);
                    Tensor y = make.empty({rows, width}), dqkv = make.random({rows, width}, 4);
                    Tensor dwq = tensor(randoms(D, 5), {D}, grad, device),
                           dwk = tensor(randoms(D, 6), {D}, grad, device);
                    head_norm(y, qkv, wq, wk, K * D, 1e-5);
                    head_norm_backward(dqkv, dwq, dwk, qkv, wq, wk, K * D, 1e-5);
                    return Results{y, dqkv, dwq, dwk};
                });
            }
}

TEST_CASE("cuda: the bias of a linear layer and its gradient") {
    if (!have_gpu()) return;
    std::vector<std::array<int64_t, 2>> sizes = kSizes;
    sizes.push_back({70, 8});  // more rows than parts in the gradient
    for (DType dtype : kTypes)
        for (DType grad : {dtype, DType::f32})
            for (auto [rows, cols] : sizes)
                compare(ops("add_bias", {rows, cols}), dtype, [&](Device device) {
                    const Maker make{device, dtype};
                    Tensor y = make.random({rows, cols}, 1), dbias = tensor(randoms(cols, 2), {cols}, grad, device);
                    add_bias(y, make.random({cols}, 3));
                    add_bias_backward(dbias, make.random({rows, cols}, 4));
                    return Results{y, dbias};
                });
}

TEST_CASE("cuda: heads of latent attention and their gradients, columns") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (auto [rows, H, N, P] : {std::array<int64_t, 4>{3, 1, 2, 2}, {70, 5, 6, 10}, {9, 16, 128, 64}})
            compare(ops("latent_heads", {rows, H, N, P}), dtype, [&, rows = rows, H = H, N = N, P = P](Device device) {
                const Maker make{device, dtype};
                const int64_t D = N + P;
                Rope rope{.head_dim = int(P)};
                for (int i = 0; i < P / 2; ++i) rope.inv_freq[i] = std::pow(10000.0, -2.0 * i / double(P));
                std::vector<int32_t> positions;
                for (int64_t r = 0; r < rows; ++r) positions.push_back(int32_t(r * 7919));
                const Tensor at = upload(positions, {rows}, device), all = make.random({rows, H * D}, 1),
                             kv = make.random({rows, H * 2 * N}, 2), part = make.random({rows, P}, 3);
                Tensor q = make.empty({rows, H * D}), k = make.empty({rows, H * D}), v = make.empty({rows, H * D}),
                       dq = make.empty({rows, H * D}), dkv = make.empty({rows, H * 2 * N}),
                       dpart = make.empty({rows, P}), columns = make.random({rows, H * D}, 4);
                latent_heads(q, k, v, all, kv, part, at, rope);
                latent_heads_backward(dq, dkv, dpart, all, make.random({rows, H * D}, 5), make.random({rows, H * D}, 6),
                                      at, rope);
                copy_columns(columns, 1, kv, N / 2, N);
                return Results{q, k, v, dq, dkv, dpart, columns};
            });
}

TEST_CASE("cuda: attention's sinks and their gradient") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (DType grad : {dtype, DType::f32})
            for (auto [rows, H, D] : {std::array<int64_t, 3>{3, 1, 2}, {70, 5, 40}, {9, 16, 128}})
                compare(ops("add_sinks", {rows, H, D}), dtype, [&, rows = rows, H = H, D = D](Device device) {
                    const Maker make{device, dtype};
                    const Tensor sinks = make.random({H}, 1), dout = make.random({rows, H * D}, 2);
                    Tensor out = make.random({rows, H * D}, 3), dsinks = tensor(randoms(H, 4), {H}, grad, device),
                           lse = tensor(randoms(rows * H, 5), {rows, H}, DType::f32, device);
                    add_sinks(out, lse, sinks);
                    add_sinks_backward(dsinks, dout, out, lse, sinks);
                    return Results{out, lse, dsinks};
                });
}

TEST_CASE("cuda: SwiGLU, cross-entropy, AdamW, initial values") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (auto [rows, cols] : kSizes) {
            compare(ops("swiglu", {rows, cols}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                std::vector<double> numbers = randoms(rows * 2 * cols, 1);
                for (double& x : numbers) x *= 8;
                numbers[0] = 100;  // its exponential is not finite in fp32
                const Tensor gate_up = tensor(numbers, {rows, 2 * cols}, dtype, device);
                Tensor h = make.empty({rows, cols}), dgate_up = make.empty({rows, 2 * cols});
                swiglu(h, gate_up);
                swiglu_backward(dgate_up, make.random({rows, cols}, 2), gate_up);
                return Results{h, dgate_up};
            });
            for (int64_t first : {0, 3})
                compare(ops("cross_entropy", {rows, cols}), dtype, [&](Device device) {
                    const Maker make{device, dtype};
                    Tensor logits = make.random({rows, cols}, 1, 20);
                    const Tensor targets = make.ids(rows, cols + first, 9);
                    Tensor max = make.floats({rows}), sum = make.floats({rows}), at = make.floats({rows});
                    Tensor lse = make.floats({rows}), loss = make.floats({1});
                    softmax_stats(max, sum, at, logits, targets, first);
                    cross_entropy(loss, lse, max, sum, at, 0.25f);
                    cross_entropy_backward(logits, targets, lse, 0.25f, first);
                    return Results{max, sum, at, lse, loss, logits};
                });
            for (int64_t first : {0, 3})
                compare(ops("cross_entropy, ignored targets", {rows, cols}), dtype, [&](Device device) {
                    const Maker make{device, dtype};
                    std::vector<double> numbers = randoms(rows * cols, 1, dtype);
                    std::vector<int32_t> ids;
                    for (int64_t r = 0; r < rows; ++r) {
                        ids.push_back(r % 2 ? kIgnored : int32_t(random_bits(9, r) % uint64_t(cols + first)));
                        if (r % 2) numbers[r * cols] = NAN;
                    }
                    Tensor logits = tensor(numbers, {rows, cols}, dtype, device);
                    const Tensor targets = upload(ids, {rows}, device);
                    Tensor max = make.floats({rows}), sum = make.floats({rows}), at = make.floats({rows});
                    Tensor lse = make.floats({rows}), loss = make.floats({1});
                    softmax_stats(max, sum, at, logits, targets, first);
                    Tensor sums = make.floats({rows});
                    copy(sums, sum);
                    if (first > 0) fill(sum, 1);  // as of all parts: those of ignored rows add up to 1
                    cross_entropy(loss, lse, max, sum, at, 0.25f);
                    cross_entropy_backward(logits, targets, lse, 0.25f, first);
                    return Results{max, sums, at, lse, loss, logits};
                });
            for (const double logit_scale : {1.0, 0.25})
                compare(ops("cross_entropy, z-loss, logit scale", {rows, cols}), dtype, [&](Device device) {
                    const Maker make{device, dtype};
                    Tensor logits = make.random({rows, cols}, 1, 20);
                    const Tensor targets = make.ids(rows, cols, 9);
                    Tensor max = make.floats({rows}), sum = make.floats({rows}), at = make.floats({rows});
                    Tensor lse = make.floats({rows}), loss = make.floats({2});
                    softmax_stats(max, sum, at, logits, targets, 0, cols, logit_scale);
                    cross_entropy(loss, lse, max, sum, at, 0.25, 0.01);
                    cross_entropy_backward(logits, targets, lse, 0.25, 0, cols, logit_scale, 0.01);
                    return Results{max, sum, at, lse, loss, logits};
                });
            for (int64_t vocab : {cols - 1, cols / 2, int64_t(0)})  // the rest is padding
                compare(ops("rescale_sums", {rows, cols, vocab}), dtype, [&](Device device) {
                    const Maker make{device, dtype};
                    Tensor logits = make.random({rows, cols}, 1, 20);
                    const Tensor targets = make.ids(rows, std::max<int64_t>(vocab, 1), 9);
                    Tensor max = make.floats({rows}), sum = make.floats({rows}), at = make.floats({rows});
                    softmax_stats(max, sum, at, logits, targets, 0, vocab);
                    const Tensor whole_max = tensor(std::vector<double>(rows, 30), {rows}, DType::f32, device);
                    rescale_sums(sum, max, whole_max);
                    cross_entropy_backward(logits, targets, whole_max, 0.25f, 0, vocab);
                    return vocab > 0 ? Results{max, sum, at, logits} : Results{sum, at, logits};
                });
            for (DType grad : {dtype, DType::f32}) {
                const auto train = [&](Device device) {
                    const Maker make{device, dtype};
                    Tensor param = make.random({rows, cols}, 1), master;
                    if (dtype == DType::bf16) copy(master = make.floats({rows, cols}), param);
                    Tensor m = make.zeros({rows, cols}), v = make.zeros({rows, cols});
                    for (int step = 1; step <= 3; ++step) {
                        std::vector<double> numbers = randoms(rows * cols, 10 + step);
                        for (size_t i = 1; i < numbers.size(); i += 3) numbers[i] *= 1e-8;  // of the size of eps
                        adamw(param, master, m, v, tensor(numbers, {rows, cols}, grad, device), adamw_step(step));
                    }
                    return master ? Results{param, master, m, v} : Results{param, m, v};
                };
                compare(ops("adamw", {rows, cols}), dtype, train);
                if (dtype == DType::bf16)  // what is kept in fp32 is not rounded
                    compare(ops("adamw, masters and moments", {rows, cols}), DType::f32, [&](Device device) {
                        const Results all = train(device);
                        return Results{all.begin() + 1, all.end()};
                    });
            }
        }
    compare("cross_entropy of more rows than a block has threads", DType::f32, [&](Device device) {
        const Maker make{device, DType::f32};
        Tensor loss = make.floats({2}), lse = make.floats({2500});
        Tensor sum = make.random({2500}, 1);
        add(sum, sum, make.random({2500}, 2));
        fill(lse, 3);
        add(sum, sum, lse);  // 1 to 5
        cross_entropy(loss, lse, make.random({2500}, 3), sum, make.random({2500}, 4), 0.001, 0.01);
        return Results{loss, lse};
    });
    for (const int64_t row : {int64_t(3), int64_t(1) << 27})  // of 64 columns: the second beyond 2^32 elements
        compare(
            ops("fill_normal from row", {row}), DType::f32,
            [&](Device device) {
                Tensor x({1000}, DType::f32, device);
                fill_normal(x, 42, {.row_begin = row, .col_begin = 5, .cols = 20, .global_cols = 64, .offset = 7},
                            0.02f);
                return Results{x};
            },
            1e-7);
}
