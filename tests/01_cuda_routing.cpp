// The ops of routing.h on the GPU against the CPU. Where there is no GPU each case says so and is skipped.
#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/ops/routing.h"
#include "tests/cuda_ops.h"

using namespace train70b;
using namespace train70b::test;

namespace {

#if TRAIN70B_CUDA
int64_t algorithms() { return cuda::matmul_algorithms(); }
int64_t multiprocessors() { return cuda_info().multiprocessors; }
#else
int64_t algorithms() { return 0; }
int64_t multiprocessors() { return 0; }
#endif

// How often cuBLAS has computed products of groups in one call, while profile() sums.
double grouped_calls() { return double(profile().sums["grouped_matmul"].calls); }

struct RouterCase {
    int64_t experts, top_k, groups, top_groups, pieces;
};
// Logits that differ by 0.6 times 4 / N or more within a row, so that no rounding changes a choice.
Doubles router_logits(int64_t rows, int64_t experts, uint64_t key) {
    Doubles logits;
    const Doubles noise = randoms(rows * experts, key);
    for (int64_t r = 0; r < rows; ++r) {
        std::vector<int64_t> order(static_cast<size_t>(experts));
        for (int64_t e = 0; e < experts; ++e) order[size_t(e)] = e;
        std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
            return random_bits(key, uint64_t(r * experts + a)) < random_bits(key, uint64_t(r * experts + b));
        });
        for (int64_t e = 0; e < experts; ++e)
            logits.push_back((double(order[size_t(e)]) + 0.2 * noise[size_t(r * experts + e)]) * 4 / double(experts) -
                             2);
    }
    return logits;
}
Doubles router_bias(int64_t experts, double step) {
    Doubles bias;
    for (int64_t e = 0; e < experts; ++e) bias.push_back(step * double(random_bits(3, uint64_t(e)) % 4));
    return bias;
}

// Few experts are chosen often, some never.
std::vector<int32_t> uneven_choices(int64_t slots, int64_t experts) {
    std::vector<int32_t> chosen;
    for (const double u : randoms(slots, 5)) chosen.push_back(int32_t(u * u * double(experts)));
    return chosen;
}

struct Places {
    std::vector<int32_t> begin_keep;  // (2, P, N)
    int64_t kept = 0;                 // S
};
// Each expert's slots, piece by piece, of each piece at most `capacity`.
Places places_of(const std::vector<int32_t>& chosen, int64_t pieces, int64_t experts, int32_t capacity) {
    Places places{std::vector<int32_t>(size_t(2 * pieces * experts), 0)};
    const int64_t slots = int64_t(chosen.size()) / pieces;
    int32_t* keep = places.begin_keep.data() + pieces * experts;
    for (size_t i = 0; i < chosen.size(); ++i) {
        int32_t& count = keep[int64_t(i) / slots * experts + chosen[i]];
        count = std::min(count + 1, capacity);
    }
    for (int64_t e = 0; e < experts; ++e)
        for (int64_t p = 0; p < pieces; ++p) {
            places.begin_keep[size_t(p * experts + e)] = int32_t(places.kept);
            places.kept += keep[p * experts + e];
        }
    return places;
}

}  // namespace

TEST_CASE("cuda: the router's choices, weights, losses and gradient") {
    if (!have_gpu()) return;
    int64_t number = 0;
    for (const auto& [N, k, groups, top_groups, pieces] : {RouterCase{8, 2, 1, 1, 3},
                                                           {64, 6, 8, 3, 7},
                                                           {160, 8, 40, 5, 1},
                                                           {512, 32, 16, 4, 3},
                                                           {512, 1, 1, 1, 7},
                                                           {8, 8, 4, 4, 1},
                                                           {8, 2, 8, 3, 7},
                                                           {64, 32, 64, 40, 3}})
        for (const bool sigmoid : {false, true})
            for (const bool has_bias : {false, true}) {
                const bool normalize = number++ % 3 != 0;
                const RouterShape shape{N, k, sigmoid, normalize, 2.5, groups, top_groups};
                const int64_t rows = 21;
                const Doubles logits_of = router_logits(rows, N, uint64_t(N));
                const auto choose = [&](Device device, const Tensor& logits) {
                    Tensor chosen({rows, k}, DType::i32, device);
                    const Doubles bias = router_bias(N, sigmoid ? 4 : 0.02);
                    choose_experts(chosen, logits, has_bias ? tensor(bias, {N}, DType::f32, device) : Tensor(), shape);
                    return chosen;
                };
                const std::string what = ops("router", {N, k, groups, top_groups, pieces, sigmoid, has_bias});
                compare(
                    what + ", choices", DType::f32,
                    [&](Device device) {
                        return Results{choose(device, tensor(logits_of, {rows, N}, DType::f32, device))};
                    },
                    0);
                const Tensor on_cpu = choose(Device::cpu, tensor(logits_of, {rows, N}));
                compare(what, DType::f32, [&, pieces = pieces, N = N, k = k](Device device) {
                    const Maker make{device, DType::f32};
                    const Tensor logits = tensor(logits_of, {rows, N}, DType::f32, device);
                    Tensor chosen({rows, k}, DType::i32, device), weights = make.floats({rows, k});
                    copy(chosen, on_cpu);
                    router_weights(weights, logits, chosen, shape);
                    const Tensor piece_grads = has_bias ? make.random({pieces, N}, 7) : Tensor();
                    const double z_loss = has_bias == sigmoid ? 0.01 : 0;
                    Tensor sums = tensor({0.5, 0.25}, {2}, DType::f64, device), dlogits = make.floats({rows, N});
                    router_losses(sums, logits, piece_grads, z_loss, shape);
                    router_backward(dlogits, make.random({rows, k}, 8), logits, chosen, piece_grads, z_loss, shape);
                    // Of softmax weights that one expert has alone, the gradient is nothing but rounding.
                    if (k == 1 && normalize && !has_bias && z_loss == 0) return Results{weights, sums};
                    return Results{weights, sums, dlogits};
                });
            }
}

TEST_CASE("cuda: the router's losses of more rows than a block has threads") {
    if (!have_gpu()) return;
    compare("router_losses of 1,050 rows", DType::f32, [&](Device device) {
        const Maker make{device, DType::f32};
        Tensor sums = tensor({0.5, 0.25}, {2}, DType::f64, device);
        router_losses(sums, make.random({1050, 8}, 1, 2), make.random({3, 8}, 2), 0.01, {8, 2});
        return Results{sums};
    });
}

TEST_CASE(
    "cuda: the router of logits far from 0, the largest behind any lane; a row with a NaN has experts that exist") {
    if (!have_gpu()) return;
    const int64_t N = 64, k = 6, rows = 21;
    for (const bool has_nan : {false, true})
        compare(
            ops("choose_experts, large logits, NaN", {has_nan}), DType::f32,
            [&](Device device) {
                Doubles logits;
                for (int64_t i = 0; i < rows * N; ++i) logits.push_back(double(4 * ((i % N + 9 * (i / N)) % N)));
                if (has_nan) logits[size_t(3 * N + 40)] = NAN;
                const Tensor there = tensor(logits, {rows, N}, DType::f32, device);
                Tensor chosen({rows, k}, DType::i32, device), weights({rows, k}, DType::f32, device);
                choose_experts(chosen, there, {}, {N, k});
                if (has_nan) return Results{chosen};
                Tensor sums = tensor({0.5, 0.25}, {2}, DType::f64, device);
                router_weights(weights, there, chosen, {N, k});
                router_losses(sums, there, Maker{device, DType::f32}.random({3, N}, 2), 0.01, {N, k});
                return Results{chosen, weights, sums};
            },
            has_nan ? 0 : 1e-5);
}

TEST_CASE("cuda: of equal scores the lower index is chosen, in groups, too") {
    if (!have_gpu()) return;
    for (const bool sigmoid : {false, true})
        for (const int64_t groups : {1, 16})
            compare(
                ops("choose_experts, ties", {sigmoid, groups}), DType::f32,
                [&](Device device) {
                    const int64_t N = 160, k = 8;
                    Doubles logits(size_t(9 * N), 0.0);
                    for (size_t i = 0; i < logits.size(); ++i)
                        logits[i] = i < size_t(N) ? 1 : double(random_bits(1, i) % 3);  // the first row: all equal
                    Tensor chosen({9, k}, DType::i32, device);
                    const RouterShape shape{N, k, sigmoid, true, 1, groups, std::min<int64_t>(groups, 3)};
                    choose_experts(chosen, tensor(logits, {9, N}, DType::f32, device), {}, shape);
                    return Results{chosen};
                },
                0);
}

TEST_CASE("cuda: slots counted and placed, stable, with and without a capacity") {
    if (!have_gpu()) return;
    for (const auto& [N, k, rows, pieces] : {std::array<int64_t, 4>{8, 2, 21, 3},
                                             {64, 6, 21, 7},
                                             {8, 8, 99, 3},  // more slots of a piece than a block has threads
                                             {160, 1, 21, 1},
                                             {512, 32, 9, 1}})
        for (const int32_t capacity : {3, 1000}) {
            if (kSmall && N == 512 && capacity == 3) continue;
            const std::vector<int32_t> choices = uneven_choices(rows * k, N);
            const Places places = places_of(choices, pieces, N, capacity);
            compare(
                ops("count_choices, place_slots", {N, k, rows, pieces, capacity}), DType::f32,
                [&, N = N, k = k, rows = rows, pieces = pieces](Device device) {
                    const Tensor chosen = upload(choices, {rows, k}, device);
                    Tensor counts({pieces, N}, DType::i32, device), order({places.kept}, DType::i32, device),
                        place({rows, k}, DType::i32, device);
                    count_choices(counts, chosen);
                    place_slots(order, place, chosen, upload(places.begin_keep, {2, pieces, N}, device));
                    return Results{counts, order, place};
                },
                0);
        }
}

TEST_CASE("cuda: rows gathered, summed and multiplied by slots, some of them dropped") {
    if (!have_gpu()) return;
    for (DType dtype : kTypes)
        for (const int64_t E : {8, 19, 1000, 2056})
            for (const bool weighted : {false, true}) {
                const int64_t N = 8, k = 3, rows = 7;
                const std::vector<int32_t> choices = uneven_choices(rows * k, N);
                const Places places = places_of(choices, 1, N, 4);
                compare(ops("gather_slots, sum_slots, slot_products", {E, weighted}), dtype, [&](Device device) {
                    const Maker make{device, dtype};
                    const Tensor chosen = upload(choices, {rows, k}, device);
                    Tensor order({places.kept}, DType::i32, device), place({rows, k}, DType::i32, device);
                    place_slots(order, place, chosen, upload(places.begin_keep, {2, 1, N}, device));
                    const Tensor z = make.random({places.kept, E}, 2);
                    const Tensor weights =
                        weighted ? tensor(randoms(rows * k, 3), {rows, k}, DType::f32, device) : Tensor();
                    Tensor gathered = make.empty({places.kept, E}), sum = make.empty({rows, E});
                    Tensor dots = make.floats({rows, k});
                    gather_slots(gathered, make.random({rows, E}, 1), order, k, weights);
                    sum_slots(sum, z, place, weights);
                    slot_products(dots, make.random({rows, E}, 4), z, place);
                    return Results{gathered, sum, dots};
                });
            }
}

TEST_CASE("cuda: products of groups of any number of rows, in one call and one by one") {
    if (!have_gpu()) return;
    const ProfileScope scope({.sums_on = true});
    // In one call, unless rows of 18 elements are not aligned, or there is a tile for each multiprocessor.
    for (DType dtype : kTypes)
        for (const auto& [in, out] :
             {std::array<int64_t, 2>{24, 16}, {136, 392}, {18, 16}, {24, 18}, {8, 128 * multiprocessors()}})
            for (const std::vector<int64_t>& rows :
                 {std::vector<int64_t>{5, 0, 33, 1}, {7, 9, 17, 0}, {0, 0, 0, 3}, {64, 67, 100, 31}, {0, 0}}) {
                if (kSmall && out > 1000 && rows.back() != 1) continue;
                const int64_t N = int64_t(rows.size()), S = std::accumulate(rows.begin(), rows.end(), int64_t(0));
                const std::string what = ops(fmt::format("products of {} to {} columns, rows", in, out), rows);
                compare(what, dtype, [&, in = in, out = out](Device device) {
                    const Maker make{device, dtype};
                    const Tensor x = make.random({S, in}, 1), w = make.random({N * out, in}, 2),
                                 dy = make.random({S, out}, 3);
                    Tensor y = make.empty({S, out}), dx = make.empty({S, in});
                    Tensor dw = tensor(randoms(N * out * in, 4), {N * out, in}, DType::f32, device);
                    const double before = grouped_calls();
                    grouped_forward(y, x, w, rows);
                    grouped_dgrad(dx, dy, w, rows);
                    const bool aligned = in * size_of(dtype) % 16 == 0 && out * size_of(dtype) % 16 == 0;
                    const int expected = device == Device::cpu || !aligned || S == 0 ? 0 : out > 1000 ? 1 : 2;
                    EXPECT(grouped_calls() - before == expected);
                    grouped_wgrad(dw, dy, x, rows);
                    return Results{y, dx, dw};
                });
            }
}

TEST_CASE("cuda: products one by one, of any number of rows, choose few algorithms") {
    if (!have_gpu()) return;
    const int64_t in = 18, out = 16;  // rows of 18 elements are not aligned: cuBLAS does not take them in one call
    const int64_t before = algorithms(), most = kSmall ? 64 : 300;
    const Maker make{Device::cuda, DType::f32};
    for (int64_t rows = 1; rows <= most; ++rows) {
        Tensor y = make.empty({rows, out});
        grouped_forward(y, make.random({rows, in}, 1), make.random({out, in}, 2), {rows});
    }
    EXPECT(algorithms() - before <= 16 + 8 * int64_t(std::log2(double(most))));
    EXPECT(algorithms() - before >= 4);
}

TEST_CASE("cuda: routing of no rows, and more experts than the kernels take") {
    if (!have_gpu()) return;
    const Maker make{Device::cuda, DType::f32};
    const RouterShape shape{8, 2};
    const Tensor logits = make.floats({0, 8}), none = make.floats({0, 2});
    Tensor chosen({0, 2}, DType::i32, Device::cuda), weights = make.floats({0, 2}), dlogits = make.floats({0, 8});
    Tensor sums = tensor({0.5, 0.25}, {2}, DType::f64, Device::cuda), rows = make.floats({0, 16});
    Tensor counts({3, 8}, DType::i32, Device::cuda), order({0}, DType::i32, Device::cuda), place = Tensor::like(chosen);
    choose_experts(chosen, logits, {}, shape);
    router_weights(weights, logits, chosen, shape);
    router_losses(sums, logits, make.floats({3, 8}), 0.1, shape);
    router_backward(dlogits, none, logits, chosen, make.floats({3, 8}), 0.1, shape);
    count_choices(counts, chosen);
    place_slots(order, place, chosen, make.zeros({2, 3, 8}, DType::i32));
    gather_slots(rows, rows, order, 2);
    sum_slots(rows, rows, place);
    slot_products(weights, rows, rows, place);
    EXPECT(values(sums) == Doubles{0.5, 0.25});
    EXPECT(values(counts) == Doubles(24, 0.0));
    Tensor many({1, 2}, DType::i32, Device::cuda);
    EXPECT_CHECK_FAILS(choose_experts(many, make.zeros({1, 520}), {}, {520, 2}));
    Tensor deep({1, 33}, DType::i32, Device::cuda);
    EXPECT_CHECK_FAILS(choose_experts(deep, make.zeros({1, 64}), {}, {64, 33}));
}
