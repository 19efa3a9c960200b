// The pieces of tensor parallelism on their own: f and g, products in chunks, the loss over a sharded vocabulary.
#include "04_tensor_parallel/complete/overlap.h"
#include "04_tensor_parallel/complete/vocabulary.h"
#include "tests/tensor_parallel.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("f and g are each other's gradient: <y, f(x)> summed over ranks is <f*(y), x>, and the same for g") {
    Failures failures;
    on_first_ranks(4, [&](const Comm& ranks) {
        const int64_t N = ranks.size(), R = 8, E = 6, r = ranks.rank();
        const auto whole = [&](uint64_t key) { return tensor(randoms(R * E, key), {R, E}); };
        const auto rows = [&](uint64_t key) {  // this rank's of a whole that all know
            const Tensor x = whole(key).row_slice(r * R / N, (r + 1) * R / N);
            Tensor own({R / N, E}, DType::f32, Device::cpu);
            copy(own, x);
            return own;
        };
        const auto sum = [&](double x) { return ranks.sum(x); };
        const auto product = [](const Tensor& a, const Tensor& b) { return dot(values(a), values(b)); };
        // input, output gradient -> output and input gradient
        const auto run = [](const auto& op, const Tensor& x, const Tensor& dy) {
            Tape tape;
            const Var in{.data = x};
            Var out = op(tape, in);
            const Tensor y = out.data;
            *out.grad = dy;
            tape.backward();
            return std::pair(y, *in.grad);
        };
        // The same x on every rank counts once; everything else is a part of what the ranks hold together.
        const auto close = [](double a, double b) { return std::abs(a - b) <= 1e-5 * (1 + std::abs(b)); };
        {
            const auto [y, dx] =
                run([&](Tape& t, const Var& x) { return copy_to_ranks(t, x, ranks); }, whole(1), whole(10 + r));
            failures.expect(close(sum(product(y, whole(10 + r))), product(dx, whole(1))), "copy_to_ranks");
        }
        {
            Tensor x = whole(20 + r);
            const auto [y, dx] =
                run([&](Tape& t, const Var& v) { return reduce_from_ranks(t, v, ranks); }, x, whole(2));
            failures.expect(close(product(y, whole(2)), sum(product(dx, whole(20 + r)))), "reduce_from_ranks");
            // x has another owner here: the sum may not overwrite it
            failures.expect(values(x) == values(whole(20 + r)), "reduce_from_ranks overwrites its input");
        }
        {
            const auto [y, dx] =
                run([&](Tape& t, const Var& x) { return gather_sequence(t, x, ranks); }, rows(3), whole(30 + r));
            failures.expect(values(y) == values(whole(3)), "gather_sequence, forward");
            failures.expect(close(sum(product(y, whole(30 + r))), sum(product(dx, rows(3)))), "gather_sequence");
        }
        {
            const auto [y, dx] = run([&](Tape& t, const Var& x) { return reduce_scatter_sequence(t, x, ranks); },
                                     whole(40 + r), rows(4));
            failures.expect(values(dx) == values(whole(4)), "reduce_scatter_sequence, backward");
            failures.expect(close(sum(product(y, rows(4))), sum(product(dx, whole(40 + r)))),
                            "reduce_scatter_sequence");
        }
    });
    EXPECT_NONE(failures);
}

TEST_CASE("products in chunks equal products after, and before, a collective, on any number of ranks") {
    Failures failures;
    for (const int n : {1, 2, 3, 5, 8})
        on_first_ranks(n, [&](const Comm& ranks) {
            const int64_t N = ranks.size(), r = ranks.rank(), each = 3, in = 10, out = 7;
            const Tensor part = tensor(randoms(each * in, 10 + r), {each, in});
            const Tensor weight = tensor(randoms(out * in, 50 + r), {out, in});
            Tensor gathered;
            const Tensor y = all_gather_matmul(ranks, part, weight, Transpose::b, gathered);
            const Tensor rows = gather_rows(ranks, part);
            const auto expect = [&](bool good, const char* what) {
                failures.expect(good, fmt::format("{} ranks: {}", n, what));
            };
            expect(values(gathered) == values(rows), "all_gather_matmul's gathered rows");
            expect(distance(y, values(matmul(rows, weight, Transpose::b))) <= 1e-6, "all_gather_matmul");
            const Tensor x = tensor(randoms(N * each * in, 90 + r), {N * each, in});
            Tensor sum({each, out}, DType::f32, Device::cpu);
            ranks.reduce_scatter(sum, matmul(x, weight, Transpose::b)).wait();
            expect(distance(matmul_reduce_scatter(ranks, x, weight), values(sum)) <= 1e-6, "matmul_reduce_scatter");
        });
    EXPECT_NONE(failures);
}

TEST_CASE("the loss of a sharded vocabulary: logits far below and far above the padding's, targets on every rank") {
    Failures failures;
    for (const int n : {2, 4, 8})
        for (const int64_t V : {64, 61, 9, 5})  // 9 and 5 on 8 ranks: some hold nothing but padding
            on_first_ranks(n, [&](const Comm& ranks) {
                const int64_t R = 24, N = ranks.size(), each = (V + N - 1) / N, first = each * ranks.rank();
                std::vector<int32_t> ids;
                for (int64_t i = 0; i < R; ++i) ids.push_back(i % 5 == 2 ? kIgnored : int32_t(random_bits(3, i) % V));
                Batch batch{.targets = upload(ids, {R}, Device::cpu), .loss_scale = 0.125};
                for (const double level : {-80.0, 0.0, 80.0}) {
                    std::vector<double> logits = randoms(R * V, 4), mine;
                    for (double& x : logits) x = level + 4 * x;
                    for (int64_t v = 0; v < V; ++v) logits[2 * V + v] = v % 2 ? NAN : INFINITY;  // an ignored row
                    for (int64_t row = 0; row < R; ++row)
                        for (int64_t v = first; v < first + each; ++v) mine.push_back(v < V ? logits[row * V + v] : 0);
                    Tape whole_tape, tape;
                    Var whole{.data = tensor(logits, {R, V})}, part{.data = tensor(mine, {R, each})};
                    const Var expected = next_token_loss(whole_tape, whole, batch);
                    const Var loss = vocabulary_parallel_loss(tape, part, batch, ranks, first, V);
                    const double highest = ranks.max(read(loss.data)[0]);
                    const auto expect = [&](bool good, const std::string& what) {
                        failures.expect(
                            good, fmt::format("{} ranks, vocabulary {}, logits around {}: {}", n, V, level, what));
                    };
                    expect(highest == read(loss.data)[0], "the loss is not the same on all ranks");
                    expect(std::abs(highest / read(expected.data)[0] - 1) <= 1e-6, "the loss");
                    whole_tape.backward();
                    tape.backward();
                    const std::vector<double> all = values(*whole.grad), got = values(*part.grad);
                    std::vector<double> wanted;
                    for (int64_t row = 0; row < R; ++row)
                        for (int64_t v = first; v < first + each; ++v) wanted.push_back(v < V ? all[row * V + v] : 0);
                    for (size_t i = 0; i < got.size(); ++i) {
                        // lse near 80 is known to 4e-6 only, and the gradient is at most 0.125
                        expect(std::abs(got[i] - wanted[i]) <= 2e-6, fmt::format("gradient of logit {}", i));
                        if (wanted[i] == 0) expect(got[i] == 0, fmt::format("gradient of padding logit {}", i));
                    }
                }
            });
    EXPECT_NONE(failures);
}
