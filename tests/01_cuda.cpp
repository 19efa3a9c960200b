// Every CUDA op against the CPU op, in fp32 and bf16, and the whole model's loss and gradients. Where there is no GPU
// each case says so and is skipped.
#include <cstring>
#include <map>

#include "01_single_gpu/llama.h"
#include "01_single_gpu/optimizer.h"
#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

namespace {

bool have_gpu() {
    if (why_no_cuda().empty()) return true;
    DOCTEST_MESSAGE("skipped: " << why_no_cuda());
    return false;
}

constexpr DType kTypes[] = {DType::f32, DType::bf16};

// Results of the ops under test; the same call on both devices must agree within the rounding of the dtype. `what`: op
// and shape, for the message where one fails.
using Results = std::vector<Tensor>;
double norm(const std::vector<double>& x) { return std::sqrt(dot(x, x)); }

// Relative to the norm of each result, or to `least` where that is larger.
void expect_near(const std::string& what, DType dtype, const Results& cuda, const Results& cpu, double fp32_bound,
                 double least = 0) {
    REQUIRE(cpu.size() == cuda.size());
    for (size_t i = 0; i < cpu.size(); ++i) {
        INFO(what << ": result " << i << ", " << std::string(name_of(dtype)));
        // bf16: both round the same fp32 value, up to the last bit of bf16 where the values differ in fp32's last bits.
        std::vector<double> found = values(cuda[i]), expected = values(cpu[i]);
        for (size_t j = 0; j < expected.size(); ++j)  // the lse of a query that sees no key
            if (expected[j] == -INFINITY && found[j] == -INFINITY) expected[j] = found[j] = 0;
        const double size = norm(expected), scale = size > 0 && size < least ? size / least : 1;
        EXPECT(scale * distance(found, expected) <= (dtype == DType::f32 ? fp32_bound : 4e-3));
    }
}

void compare(const std::string& what, DType dtype, const std::function<Results(Device)>& op, double fp32_bound = 5e-6) {
    const Results cpu = op(Device::cpu);
    expect_near(what, dtype, op(Device::cuda), cpu, fp32_bound);
}

// An op and its gradient, which takes the op's results: compares the results, then the gradients that both devices
// compute from the CPU's results. From its own results each would compute other gradients: attention's takes
// sum(dout * out), a sum in which the rounding of out can be much of what is left. Where each query sees one key at
// most, dq and dk are 0 but for rounding: no gradient is held to less than a tenth of the largest one's norm, dv's.
void compare_with_gradient(const std::string& what, DType dtype, DType gradient_dtype,
                           const std::function<Results(Device)>& op,
                           const std::function<Results(Device, const Results&)>& gradient, double fp32_bound) {
    const Results cpu = op(Device::cpu);
    expect_near(what, dtype, op(Device::cuda), cpu, fp32_bound);
    Results copies;
    for (const Tensor& x : cpu) copy(copies.emplace_back(x.shape(), x.dtype(), Device::cuda), x);
    const Results expected = gradient(Device::cpu, cpu);
    double largest = 0;
    for (const Tensor& x : expected) largest = std::max(largest, norm(values(x)));
    expect_near(what + ", gradient", gradient_dtype, gradient(Device::cuda, copies), expected, fp32_bound,
                0.1 * largest);
}

std::string ops(const std::string& names, const Shape& sizes) { return names + " " + to_string(sizes); }

// An array of the test, on one device.
struct Maker {
    Device device;
    DType dtype;
    Tensor random(Shape shape, uint64_t key, double size = 1) const {
        int64_t count = 1;
        for (int64_t dim : shape) count *= dim;
        std::vector<double> numbers = randoms(count, key);
        for (double& x : numbers) x *= size;
        return tensor(numbers, std::move(shape), dtype, device);
    }
    Tensor empty(Shape shape) const { return Tensor(std::move(shape), dtype, device); }
    Tensor floats(Shape shape) const { return Tensor(std::move(shape), DType::f32, device); }
    Tensor zeros(Shape shape, DType type = DType::f32) const {
        Tensor x(std::move(shape), type, device);
        fill(x, 0);
        return x;
    }
    Tensor ids(int64_t count, int64_t below, uint64_t key) const {
        std::vector<int32_t> list(count);
        for (int64_t i = 0; i < count; ++i) list[i] = int32_t(random_bits(key, i) % uint64_t(below));
        return upload(list, {count}, device);
    }
};

// Rows and columns: whole packs, remainders, one, and rows that are not 16-byte aligned.
// In a slice, one of the two long ones.
const std::vector<std::array<int64_t, 2>> kSizes = [] {
    std::vector<std::array<int64_t, 2>> list = {{4, 64}, {7, 40}, {5, 19}, {1, 1}};
    for (const std::array<int64_t, 2> large : {std::array<int64_t, 2>{33, 1000}, {300, 136}}) {
        bool taken = false;
        for (int64_t i = 0; i < 4; ++i) taken = taken || in_gpu_slice(2 * i + (large[0] == 300));
        if (taken) list.push_back(large);
    }
    return list;
}();

}  // namespace

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
        for (int64_t begin : {1, 3, 8})
            compare(ops("scale of a view from element", {begin}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                Tensor whole = make.random({1000}, 1);
                Tensor part = whole.element_slice(begin, {900});
                scale(part, 3);
                return Results{whole};
            });
}

TEST_CASE("cuda: embedding and its gradient, repeated and foreign tokens") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (auto [rows, cols] : kSizes)
            for (int64_t first : {0, 4})
                compare(ops("embedding", {rows, cols}), dtype, [&](Device device) {
                    const Maker make{device, dtype};
                    const Tensor tokens = make.ids(rows, 13, 7);
                    Tensor y = make.empty({rows, cols}), dtable = make.zeros({6, cols});
                    embedding(y, tokens, make.random({6, cols}, 1), first);
                    embedding_backward(dtable, tokens, make.random({rows, cols}, 2), first);
                    embedding_backward(dtable, tokens, make.random({rows, cols}, 3), first);
                    return Results{y, dtable};
                });
}

TEST_CASE("cuda: rmsnorm, with the residual addition, recomputed, and its gradient") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (auto [rows, cols] : kSizes) {
            compare(ops("rmsnorm", {rows, cols}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                const Tensor a = make.random({rows, cols}, 1), b = make.random({rows, cols}, 2);
                const Tensor weight = make.random({cols}, 3), dy = make.random({rows, cols}, 4);
                Tensor sum = make.empty({rows, cols}), y = make.empty({rows, cols}), plain = make.empty({rows, cols});
                Tensor recomputed = make.empty({rows, cols}), dx = make.empty({rows, cols});
                Tensor inv = make.floats({rows}), inv_sum = make.floats({rows}), dweight = make.zeros({cols});
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
        for (int D : {4, 6, 16, 64, 128})
            compare(ops("split_rope, head size", {D}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                const int64_t H = 4, K = 2, R = 37;
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
    for (DType dtype : kTypes)
        for (DType grad : {dtype, DType::f32})
            for (auto [rows, cols] : kSizes)
                compare(ops("add_bias", {rows, cols}), dtype, [&](Device device) {
                    const Maker make{device, dtype};
                    Tensor y = make.random({rows, cols}, 1), dbias = tensor(randoms(cols, 2), {cols}, grad, device);
                    add_bias(y, make.random({cols}, 3));
                    add_bias_backward(dbias, make.random({rows, cols}, 4));
                    return Results{y, dbias};
                });
}

TEST_CASE("cuda: attention and its gradient, plain and on tensor cores") {
    if (!have_gpu()) return;
    int64_t number = 0;  // in a slice, each shape with one of the gradient's dtypes
    for (DType dtype : kTypes)
        for (int64_t D : {6, 16, 64, 128, 256})
            for (const AttentionShape& s : {AttentionShape{2, 65, 65, 4, 2, D, true},
                                            {1, 200, 200, 2, 2, D, true},
                                            {1, 130, 70, 4, 1, D, false},
                                            {2, 5, 140, 2, 1, D, true},
                                            {1, 70, 33, 2, 1, D, true},
                                            {1, 1, 3, 1, 1, D, false}})
                for (DType grad : {dtype, DType::f32}) {
                    const int64_t shape = number++ / 2;
                    if (!in_gpu_slice(shape) || (kSmall && shape / 8 % 2 != number % 2)) continue;
                    const int64_t rows = s.batch * s.query_len, keys = s.batch * s.key_len, H = s.heads, K = s.kv_heads;
                    struct Inputs {
                        Tensor q, k, v;
                    };
                    const auto inputs = [&](Device device) {
                        const Maker make{device, dtype};
                        return Inputs{make.random({rows, H * D}, 1, 2), make.random({keys, K * D}, 2, 2),
                                      make.random({keys, K * D}, 3)};
                    };
                    compare_with_gradient(
                        ops("attention, Tq Tk D", {s.query_len, s.key_len, D}), dtype,
                        dtype == DType::bf16 ? DType::bf16 : grad,
                        [&](Device device) {
                            const Maker make{device, dtype};
                            const auto [q, k, v] = inputs(device);
                            Tensor out = make.empty({rows, H * D}), lse = make.floats({rows, H});
                            attention(out, lse, q, k, v, s);
                            return Results{out, lse};
                        },
                        [&](Device device, const Results& forward) {
                            const Maker make{device, dtype};
                            const auto [q, k, v] = inputs(device);
                            Tensor dq(q.shape(), grad, device), dk(k.shape(), grad, device),
                                dv(v.shape(), grad, device);
                            attention_backward(dq, dk, dv, make.random({rows, H * D}, 4), q, k, v, forward[0],
                                               forward[1], s);
                            return Results{dq, dk, dv};
                        },
                        1e-5);
                }
}

TEST_CASE("cuda: attention inside documents and its gradient, plain and on tensor cores") {
    if (!have_gpu()) return;
    struct Blocks {
        AttentionShape shape;  // with the index of the first key
        int64_t query_offset;  // of the first query
    };
    int64_t number = 0;  // in a slice, each shape with documents of one length, in one order
    for (DType dtype : kTypes)
        for (int64_t D : {6, 64, 128})
            for (const auto& [s, query_offset] :
                 {Blocks{{2, 150, 150, 4, 2, D, true}, 0},
                  {{1, 300, 300, 2, 1, D, true, 300}, 300},  // a ring step on the diagonal
                  {{2, 70, 70, 2, 1, D, false, 70}, 140},    // and off it
                  {{1, 40, 190, 2, 2, D, true, 0}, 150},     // an all-gather's keys
                  {{1, 130, 130, 2, 1, D, false, 0}, 260}})  // keys farther back
                for (const int64_t mean : {2, 10, 100})
                    for (const bool ordered : {true, false}) {
                        const int64_t drawn = number % 6, shape = number++ / 6;
                        if (!in_gpu_slice(shape) || (kSmall && drawn != shape % 6)) continue;
                        const int64_t rows = s.batch * s.query_len, keys = s.batch * s.key_len, H = s.heads,
                                      K = s.kv_heads;
                        const auto starts = random_starts(s, query_offset, mean, ordered, uint64_t(number));
                        struct Inputs {
                            Tensor q, k, v;
                        };
                        const auto inputs = [&](Device device) {
                            const Maker make{device, dtype};
                            return Inputs{make.random({rows, H * D}, 1, 2), make.random({keys, K * D}, 2, 2),
                                          make.random({keys, K * D}, 3)};
                        };
                        compare_with_gradient(
                            fmt::format("attention inside documents, Tq {} Tk {} D {}, offset {}, mean {}, ordered {}",
                                        s.query_len, s.key_len, D, s.key_offset, mean, ordered),
                            dtype, dtype,
                            [&](Device device) {
                                const Maker make{device, dtype};
                                const auto [q, k, v] = inputs(device);
                                Tensor out = make.empty({rows, H * D}), lse = make.floats({rows, H});
                                attention(out, lse, q, k, v, s, DocumentStarts(starts, device));
                                return Results{out, lse};
                            },
                            [&](Device device, const Results& forward) {
                                const Maker make{device, dtype};
                                const auto [q, k, v] = inputs(device);
                                Tensor dq(q.shape(), DType::f32, device), dk(k.shape(), DType::f32, device),
                                    dv(v.shape(), DType::f32, device);
                                attention_backward(dq, dk, dv, make.random({rows, H * D}, 4), q, k, v, forward[0],
                                                   forward[1], s, DocumentStarts(starts, device));
                                return Results{dq, dk, dv};
                            },
                            1e-5);
                    }
    // One document for each sequence: the kernels without documents, to the last bit.
    for (DType dtype : kTypes) {
        const Maker make{Device::cuda, dtype};
        const AttentionShape s{1, 70, 70, 2, 1, 64, true};
        const Tensor q = make.random({70, 128}, 1), k = make.random({70, 64}, 2), dout = make.random({70, 128}, 3);
        const auto run = [&](const DocumentStarts& documents) {
            Tensor out = make.empty({70, 128}), lse = make.floats({70, 2});
            attention(out, lse, q, k, k, s, documents);
            Tensor dq = Tensor::like(q), dk = Tensor::like(k), dv = Tensor::like(k);
            attention_backward(dq, dk, dv, dout, q, k, k, out, lse, s, documents);
            std::vector<std::vector<double>> all;
            for (const Tensor* x : {&out, &lse, &dq, &dk, &dv}) all.push_back(values(*x));
            return all;
        };
        EXPECT(run(DocumentStarts(std::vector<int32_t>(70, 0), Device::cuda)) == run({}));
    }
}

TEST_CASE("cuda: SwiGLU, cross-entropy, AdamW, initial values") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (auto [rows, cols] : kSizes) {
            compare(ops("swiglu", {rows, cols}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                const Tensor gate_up = make.random({rows, 2 * cols}, 1, 8);
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
            for (DType grad : {dtype, DType::f32})
                compare(ops("adamw", {rows, cols}), dtype, [&](Device device) {
                    const Maker make{device, dtype};
                    Tensor param = make.random({rows, cols}, 1), master;
                    if (dtype == DType::bf16) copy(master = make.floats({rows, cols}), param);
                    Tensor m = make.zeros({rows, cols}), v = make.zeros({rows, cols});
                    for (int step = 1; step <= 3; ++step)
                        adamw(param, master, m, v, tensor(randoms(rows * cols, 10 + step), {rows, cols}, grad, device),
                              {.lr = 0.01f,
                               .beta1 = 0.9f,
                               .beta2 = 0.95f,
                               .eps = 1e-8f,
                               .weight_decay = 0.1f,
                               .grad_scale = 0.5f,
                               .step = step});
                    return Results{param, m, v};
                });
        }
    compare(
        "fill_normal", DType::f32,
        [&](Device device) {
            Tensor x({1000}, DType::f32, device);
            fill_normal(x, 42, {.row_begin = 3, .col_begin = 5, .cols = 20, .global_cols = 64, .offset = 7}, 0.02f);
            return Results{x};
        },
        1e-7);
}

TEST_CASE("cuda: merging two sets of keys, exchanging blocks") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (auto [rows, cols] : kSizes) {
            compare(ops("merge_attention", {rows, cols}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                Tensor out = tensor(randoms(rows * 2 * cols, 1), {rows, 2 * cols}, DType::f32, device);
                Tensor lse = tensor(randoms(rows * 2, 2), {rows, 2}, DType::f32, device);
                merge_attention(out, lse, make.random({rows, 2 * cols}, 3),
                                tensor(randoms(rows * 2, 4), {rows, 2}, DType::f32, device));
                return Results{out, lse};
            });
            compare(ops("swap_blocks", {rows, cols}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                Tensor to = make.empty({3 * rows, cols});
                swap_blocks(to, make.random({3 * rows, cols}, 1), 3, rows);
                return Results{to};
            });
        }
}

TEST_CASE("cuda: masked logits, -inf for whole packs, count nothing") {
    if (!have_gpu()) return;
    compare("softmax_stats of masked logits", DType::f32, [](Device device) {
        const Maker make{device, DType::f32};
        std::vector<double> numbers = randoms(2 * 4096, 1);
        for (int i = 64; i < 4096; ++i) numbers[i] = -INFINITY;
        Tensor x = tensor(numbers, {2, 4096}, DType::f32, device), max = make.floats({2}), sum = make.floats({2});
        Tensor at = make.floats({2});
        softmax_stats(max, sum, at, x, upload({0, 1}, {2}, device));
        return Results{max, sum, at};
    });
}

TEST_CASE("every op takes tensors without rows, on both devices: nothing is written, and sums are 0") {
    for (Device device : {Device::cpu, Device::cuda}) {
        if (device == Device::cuda && !have_gpu()) continue;
        for (DType dtype : kTypes) {
            const Maker make{device, dtype};
            const int64_t E = 24, D = 8;
            const Tensor none = make.empty({0, E}), no_ids = make.ids(0, 1, 1), no_stats = make.floats({0});
            const Tensor weight = make.random({E}, 1),
                         ones = tensor(std::vector<double>(E * E, 1), {E, E}, dtype, device);
            INFO(name_of(device) << ", " << name_of(dtype));
            const auto holds = [](const Tensor& x, double value) {
                const std::vector<double> list = values(x);
                return list == std::vector<double>(list.size(), value);
            };
            Tensor x = make.empty({0, E}), y = make.empty({0, E}), wide = make.floats({0, E}), stats = make.floats({0});
            Tensor sum = make.floats({1}), squares = tensor({1}, {1}, DType::f64, device), kept = make.floats({E, E});
            fill(kept, 2);

            matmul_into(x, none, ones, Transpose::none);
            matmul_into(kept, none, none, Transpose::a, 1);  // a gradient of no rows
            EXPECT(holds(kept, 2));
            const Tensor no_columns = make.empty({E, 0});
            for (Transpose transpose : {Transpose::none, Transpose::a, Transpose::b}) {
                Tensor product = make.empty({E, E});
                fill(product, 5);
                matmul_into(product, transpose == Transpose::a ? none : no_columns,
                            transpose == Transpose::b ? no_columns : none, transpose);
                EXPECT(holds(product, 0));
            }
            Tensor no_product = make.empty({E, 0});
            matmul_into(no_product, ones, no_columns, Transpose::none);

            fill(x, 1);
            fill_normal(x, 1, {.cols = E, .global_cols = E}, 1);
            copy(y, x);
            copy(wide, x);
            scale(x, 2);
            add(x, x, wide);
            swap_blocks(x, y, 3, 0);
            sum_squares(squares, x);
            EXPECT(holds(squares, 0));

            embedding(x, no_ids, ones, 0);
            embedding_backward(kept, no_ids, none, 0);
            EXPECT(holds(kept, 2));

            Tensor dweight = make.zeros({E});
            rmsnorm(y, stats, x, weight, 1e-5);
            add_rmsnorm(x, y, stats, none, none, weight, 1e-5);
            rmsnorm_recompute(y, x, stats, weight);
            rmsnorm_backward(x, dweight, none, none, no_stats, weight);
            EXPECT(holds(dweight, 0));

            Rope rope;
            rope.head_dim = D;
            Tensor q = make.empty({0, D}), k = make.empty({0, D}), v = make.empty({0, D});
            split_rope(q, k, v, none, no_ids, rope);
            split_rope_backward(x, q, k, v, no_ids, rope);

            Tensor dq_weight = make.zeros({D}), dk_weight = make.zeros({D}), dbias = make.zeros({E});
            const Tensor qk_weight = make.random({D}, 4);
            Tensor qkv = make.empty({0, 3 * D}), normed = make.empty({0, 3 * D});
            head_norm(normed, qkv, qk_weight, qk_weight, D, 1e-5);
            head_norm_backward(normed, dq_weight, dk_weight, qkv, qk_weight, qk_weight, D, 1e-5);
            add_bias(x, weight);
            add_bias_backward(dbias, none);
            for (const Tensor& gradient : {dq_weight, dk_weight, dbias}) EXPECT(holds(gradient, 0));

            const Tensor gate_up = make.empty({0, 2 * E});
            Tensor dgate_up = make.empty({0, 2 * E});
            swiglu(x, gate_up);
            swiglu_backward(dgate_up, none, gate_up);

            Tensor max = make.floats({0}), at = make.floats({0});
            softmax_stats(max, stats, at, none, no_ids);
            rescale_sums(stats, max, at);
            fill(sum, 1);
            cross_entropy(sum, stats, max, stats, at, 1);
            EXPECT(holds(sum, 0));
            cross_entropy_backward(x, no_ids, stats, 1);

            Tensor master = dtype == DType::bf16 ? make.floats({0}) : Tensor(), param = make.empty({0});
            Tensor m = make.floats({0}), second = make.floats({0});
            adamw(param, master, m, second, make.empty({0}), {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .step = 1});

            // No sequence; no query, so no key has a gradient; no key, so no query sees one. Plain and on tensor cores.
            for (int64_t head_dim : {8, 64})
                for (const AttentionShape& s : {AttentionShape{0, 3, 3, 2, 1, head_dim, true},
                                                {1, 0, 3, 2, 1, head_dim, false},
                                                {1, 3, 0, 2, 1, head_dim, false}}) {
                    const int64_t rows = s.batch * s.query_len, keys = s.batch * s.key_len;
                    const Tensor query = make.random({rows, 2 * head_dim}, 1), key = make.random({keys, head_dim}, 2);
                    Tensor out = Tensor::like(query), lse = make.floats({rows, 2});
                    attention(out, lse, query, key, key, s);
                    EXPECT(holds(out, 0));
                    EXPECT(holds(lse, -INFINITY));
                    Tensor dq = Tensor::like(query), dk = Tensor::like(key), dv = Tensor::like(key);
                    for (Tensor* each : {&dq, &dk, &dv}) fill(*each, 7);
                    attention_backward(dq, dk, dv, query, query, key, key, out, lse, s);
                    for (const Tensor* each : {&dq, &dk, &dv}) EXPECT(holds(*each, 0));
                }
            Tensor merged = make.floats({0, E}), merged_lse = make.floats({0, 2});
            merge_attention(merged, merged_lse, none, make.floats({0, 2}));
        }
    }
}

TEST_CASE("cuda: NaN and infinity in the logits reach the loss") {
    if (!have_gpu()) return;
    for (double poison : {double(NAN), double(INFINITY)}) {
        const Maker make{Device::cuda, DType::f32};
        const Tensor x = tensor({0, poison, 0, 0, 0, 0}, {2, 3}, DType::f32, Device::cuda);
        Tensor max = make.floats({2}), sum = make.floats({2}), at = make.floats({2}), lse = make.floats({2}),
               loss = make.floats({1});
        softmax_stats(max, sum, at, x, upload({0, 1}, {2}, Device::cuda));
        cross_entropy(loss, lse, max, sum, at, 1);
        EXPECT(!std::isfinite(read(loss)[0]));
    }
}

TEST_CASE("cuda: the whole model's loss and every gradient, and the run repeats bit for bit") {
    if (!have_gpu()) return;
    LlamaConfig config;
    config.layers = 2, config.hidden = 256, config.heads = 4, config.kv_heads = 2, config.ffn = 320, config.vocab = 300;
    if (kSmall) config.layers = 1, config.hidden = 128, config.heads = 2, config.kv_heads = 1, config.ffn = 96;
    if (kSmall) config.vocab = 64;
    const int64_t sequences = 2, seq_len = kSmall ? 24 : 72, rows = sequences * seq_len;
    int64_t number = 0;
    struct Case {
        Recompute level;
        bool qkv_bias = false, qk_norm = false;
        int64_t head_size = 0;
    };
    for (DType dtype : kTypes)
        for (const Case& c : {Case{Recompute::none},
                              {Recompute::pointwise},
                              {Recompute::selective},
                              {Recompute::full},
                              {Recompute::none, true},
                              {Recompute::none, false, true},
                              {Recompute::pointwise, false, true, 96}}) {
            const int64_t turn = number++ % 7;  // one of the seven for each dtype
            if (!in_gpu_slice(turn) && !in_gpu_slice(turn + 7)) continue;
            const Recompute level = c.level;
            config.qkv_bias = c.qkv_bias, config.qk_norm = c.qk_norm, config.head_size = c.head_size;
            const auto run = [&](Device device) {
                Llama model(config, {.dtype = dtype, .device = device, .recompute = level, .init_std = 0.1});
                model.materialize(1);
                std::vector<int32_t> ids(rows), targets(rows), positions(rows);
                for (int64_t i = 0; i < rows; ++i) {
                    ids[i] = int32_t(random_bits(1, i) % uint64_t(config.vocab));
                    targets[i] = int32_t(random_bits(2, i) % uint64_t(config.vocab));
                    positions[i] = int32_t(i % seq_len);
                }
                const auto up = [&](const std::vector<int32_t>& v) { return upload(v, {rows}, device); };
                std::map<std::string, std::vector<double>> results;
                Tape tape;
                results["loss"] = values(
                    model.forward(tape, {sequences, seq_len, up(ids), up(targets), up(positions), 1.0 / double(rows)})
                        .data);
                tape.backward();
                for (Param* param : model.params()) results[param->name] = values(param->grad);
                return results;
            };
            const auto cpu = run(Device::cpu), cuda = run(Device::cuda), again = run(Device::cuda);
            for (const auto& [name, expected] : cpu) {
                INFO(name << ", " << name_of(dtype) << ", recompute " << int(level) << ", biases " << c.qkv_bias
                          << ", norms of q and k " << c.qk_norm);
                EXPECT(distance(cuda.at(name), expected) <= (dtype == DType::f32 ? 5e-6 : 3e-2));
            }
            EXPECT(cuda == again);
        }
}
