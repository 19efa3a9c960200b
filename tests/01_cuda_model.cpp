// Attention on the GPU against the CPU, tensors without rows, logits that are not finite, and the whole model.
#include "tests/cuda_ops.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("cuda: attention and its gradient, plain and on tensor cores") {
    if (!have_gpu()) return;
    int64_t number = 0;  // in a slice, each shape with one of the gradient's dtypes
    for (DType dtype : kTypes)
        for (int64_t D : {6, 16, 64, 128, 256}) {
            if (kSmall && (dtype == DType::f32 ? D == 64 || D == 128 : D == 16)) continue;  // the plain kernel again
            for (const AttentionShape& s : {AttentionShape{2, 65, 95, 6, 2, D, true},       // row 32 sees 63 keys
                                            {1, 200, 200, 2, 2, D, true},
                                            {1, 130, 70, 4, 1, D, false},
                                            {2, 5, 140, 2, 1, D, true},
                                            {1, 170, 33, 2, 1, D, true},  // the first block sees no key
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
                        Inputs made{make.random({rows, H * D}, 1, 2), make.random({keys, K * D}, 2, 2),
                                    make.random({keys, K * D}, 3)};
                        if (keys > 64) {  // the maximum grows by more than 2^8 behind the first tile of 64
                            Tensor later = made.k.element_slice(64 * K * D, {keys - 64, K * D});
                            scale(later, 4);
                        }
                        return made;
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
}

TEST_CASE("cuda: the gradient of attention where a block has several, but not all query heads of a key/value head") {
    if (!have_gpu() || !in_gpu_slice(5)) return;
    // 33 sequences with 2 key/value heads are 66 blocks; of 10 query heads each, 2 in a block: 4 is no divisor of 10.
    const AttentionShape s{33, 40, 5, 20, 2, 64, false};
    const int64_t rows = s.batch * s.query_len, keys = s.batch * s.key_len, E = s.heads * 64, K = s.kv_heads * 64;
    const auto gradient = [&](Device device, const Results& forward) {
        const Maker make{device, DType::bf16};
        const Tensor q = make.random({rows, E}, 1, 2), k = make.random({keys, K}, 2, 2), v = make.random({keys, K}, 3);
        Tensor out = make.empty({rows, E}), lse = make.floats({rows, s.heads});
        if (forward.empty()) {
            attention(out, lse, q, k, v, s);
        } else {
            copy(out, forward[0]);
            copy(lse, forward[1]);
        }
        Tensor dq = make.empty({rows, E}), dk = make.empty({keys, K}), dv = make.empty({keys, K});
        attention_backward(dq, dk, dv, make.random({rows, E}, 4), q, k, v, out, lse, s);
        return Results{out, lse, dq, dk, dv};
    };
    const Results cpu = gradient(Device::cpu, {});
    expect_near("attention, 2 of 10 query heads in a block", DType::bf16, gradient(Device::cuda, cpu), cpu, 0);
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

TEST_CASE("cuda: merging two sets of keys, exchanging blocks") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (auto [rows, cols] : kSizes) {
            compare(ops("merge_attention", {rows, cols}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                Tensor out = tensor(randoms(rows * 2 * cols, 1), {rows, 2 * cols}, DType::f32, device);
                std::vector<double> first = randoms(rows * 2, 2), second = randoms(rows * 2, 4);
                first[0] = second[0] = first[1] = -INFINITY;  // queries that see no key of both sets, of one
                Tensor lse = tensor(first, {rows, 2}, DType::f32, device);
                merge_attention(out, lse, make.random({rows, 2 * cols}, 3),
                                tensor(second, {rows, 2}, DType::f32, device));
                return Results{out, lse};
            });
            compare(ops("swap_blocks", {rows, cols}), dtype, [&](Device device) {
                const Maker make{device, dtype};
                Tensor to = make.empty({3 * rows, cols});
                swap_blocks(to, make.random({3 * rows, cols}, 1), 3, rows);
                return Results{to};
            });
        }
    for (const int64_t bytes : {65'536, 65'552, 9'002})  // of a run: several blocks and passes; the last one unaligned
        compare(ops("swap_blocks, bytes of a run", {bytes}), DType::bf16, [&](Device device) {
            const Maker make{device, DType::bf16};
            Tensor to = make.empty({6, bytes / 2});
            swap_blocks(to, make.random({6, bytes / 2}, 1), 3, 2);
            return Results{to};
        });
    for (const int64_t from : {0, 1})  // views that begin an element behind an aligned address: of one side, of both
        for (const int64_t to : {0, 1})
            compare(ops("swap_blocks, first elements", {from, to}), DType::bf16, [&](Device device) {
                const Maker make{device, DType::bf16};
                Tensor out = make.empty({6 * 16 + 1}), part = out.element_slice(to, {6, 16});
                swap_blocks(part, make.random({6 * 16 + 1}, 1).element_slice(from, {6, 16}), 3, 2);
                return Results{part};
            });
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
        ExpertsConfig experts = {};
    };
    for (DType dtype : kTypes)
        for (const Case& c : {Case{Recompute::none},
                              {Recompute::pointwise},
                              {Recompute::selective},
                              {Recompute::full},
                              {Recompute::none, true},
                              {Recompute::none, false, true},
                              {Recompute::pointwise, false, true, 96},
                              {Recompute::full, false, false, 0, {.count = 5, .top_k = 2, .ffn = 40, .shared = 1}}}) {
            if (!in_gpu_slice(number++ % 8)) continue;                  // one of the eight for each dtype
            if (c.experts.count > 0 && dtype == DType::bf16) continue;  // rounding decides on the choice
            const Recompute level = c.level;
            config.qkv_bias = c.qkv_bias, config.qk_norm = c.qk_norm, config.head_size = c.head_size;
            config.experts = c.experts;
            const auto run = [&](Device device, DType type) {
                Llama model(config, {.dtype = type,
                                     .grad_dtype = type == DType::f64 ? type : DType::f32,
                                     .device = device,
                                     .recompute = level,
                                     .init_std = 0.1});
                model.materialize(1);
                if (type == DType::f64)  // the weights of fp32
                    for (Param* param : model.params()) copy(param->data, converted(param->data, DType::f32, device));
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
            const auto cpu = run(Device::cpu, dtype), cuda = run(Device::cuda, dtype), again = run(Device::cuda, dtype);
            const auto exact = dtype == DType::f32 ? run(Device::cpu, DType::f64) : cpu;
            for (const auto& [name, expected] : cpu) {
                INFO(name << ", " << name_of(dtype) << ", recompute " << int(level) << ", biases " << c.qkv_bias
                          << ", norms of q and k " << c.qk_norm);
                // Two runs in fp32 may be twice as far from each other as one of them is from fp64: of gradients of
                // attention and of the router that is 2e-6 to 5e-6.
                const double fp32 = std::clamp(2 * distance(expected, exact.at(name)), 5e-6, 1e-5);
                EXPECT(distance(cuda.at(name), expected) <= (dtype == DType::f32 ? fp32 : 3e-2));
            }
            EXPECT(cuda == again);
        }
}
