#include "01_single_gpu/ops/routing.h"
#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

namespace {

using Ints = std::vector<int32_t>;

Ints slot_list(const Tensor& x) { return Ints(x.data<int32_t>(), x.data<int32_t>() + x.size()); }

struct Router {
    RouterShape shape;
    int64_t rows = 6;
    Doubles bias, piece_grads;  // piece_grads (P, N)
    double z_loss = 0;
};

Doubles scores_of(const double* logits, const RouterShape& s) {
    Doubles p;
    double sum = 0;
    for (int64_t e = 0; e < s.experts; ++e) sum += std::exp(logits[e]);
    for (int64_t e = 0; e < s.experts; ++e)
        p.push_back(s.sigmoid ? 1 / (1 + std::exp(-logits[e])) : std::exp(logits[e]) / sum);
    return p;
}

// One at a time: the largest of those that are allowed and not taken yet, the first of equal ones.
Ints take_largest(const Doubles& x, std::vector<bool> allowed, int64_t count) {
    Ints taken;
    for (int64_t j = 0; j < count; ++j) {
        int32_t best = -1;
        for (int32_t e = 0; e < int32_t(x.size()); ++e)
            if (allowed[size_t(e)] && (best < 0 || x[size_t(e)] > x[size_t(best)])) best = e;
        taken.push_back(best);
        allowed[size_t(best)] = false;
    }
    return taken;
}

Ints choices_double(const Doubles& logits, const Router& router) {
    const auto& s = router.shape;
    Ints chosen;
    for (int64_t r = 0; r < router.rows; ++r) {
        Doubles p = scores_of(&logits[size_t(r * s.experts)], s);
        for (size_t e = 0; e < router.bias.size(); ++e) p[e] += router.bias[e];
        Doubles pairs(size_t(s.groups), -INFINITY);  // the best sum of two experts of each group
        const int64_t in_group = s.experts / s.groups;
        for (int64_t g = 0; g < s.groups; ++g)
            for (int64_t a = g * in_group; a < (g + 1) * in_group; ++a) {
                if (in_group == 1) pairs[size_t(g)] = p[size_t(a)];
                for (int64_t b = g * in_group; b < a; ++b)
                    pairs[size_t(g)] = std::max(pairs[size_t(g)], p[size_t(a)] + p[size_t(b)]);
            }
        std::vector<bool> allowed(p.size(), false);
        for (const int32_t g : take_largest(pairs, std::vector<bool>(pairs.size(), true), s.top_groups))
            for (int64_t e = g * in_group; e < (g + 1) * in_group; ++e) allowed[size_t(e)] = true;
        for (const int32_t e : take_largest(p, allowed, s.top_k)) chosen.push_back(e);
    }
    return chosen;
}

Doubles weights_double(const Doubles& logits, const Ints& chosen, const Router& router) {
    const auto& s = router.shape;
    Doubles weights;
    for (int64_t r = 0; r < router.rows; ++r) {
        const Doubles p = scores_of(&logits[size_t(r * s.experts)], s);
        double sum = 0;
        for (int64_t j = 0; j < s.top_k; ++j) sum += p[size_t(chosen[size_t(r * s.top_k + j)])];
        for (int64_t j = 0; j < s.top_k; ++j)
            weights.push_back(s.scale * p[size_t(chosen[size_t(r * s.top_k + j)])] / (s.normalize ? sum : 1));
    }
    return weights;
}

Doubles losses_double(const Doubles& logits, const Router& router) {
    const auto& s = router.shape;
    const int64_t N = s.experts, pieces = int64_t(router.piece_grads.size()) / N;
    Doubles sums(2, 0.0);
    for (int64_t r = 0; r < router.rows; ++r) {
        const Doubles p = scores_of(&logits[size_t(r * N)], s);
        double of_scores = 0, of_exponentials = 0;
        for (const double score : p) of_scores += score;
        for (int64_t e = 0; e < N; ++e) {
            of_exponentials += std::exp(logits[size_t(r * N + e)]);
            if (pieces > 0)
                sums[0] += router.piece_grads[size_t(r * pieces / router.rows * N + e)] * p[size_t(e)] / of_scores;
        }
        sums[1] += router.z_loss * std::log(of_exponentials) * std::log(of_exponentials);
    }
    return sums;
}

Doubles scaled(Doubles x, double factor) {
    for (double& each : x) each *= factor;
    return x;
}

// 0 or more per row and expert: those of each piece that chose it.
struct Slots {
    int64_t pieces, experts, top_k;
    Ints chosen;  // (R, k)
    Ints begin_keep;
    int64_t kept = 0;
    int64_t rows() const { return int64_t(chosen.size()) / top_k; }
};
// Places by expert, of each expert piece by piece; of a piece at most `capacity` slots of an expert are kept.
Slots slots_of(int64_t pieces, int64_t experts, int64_t top_k, Ints chosen, int32_t capacity) {
    Slots s{pieces, experts, top_k, std::move(chosen), Ints(size_t(2 * pieces * experts))};
    const size_t of_piece = s.chosen.size() / size_t(pieces);
    for (int64_t e = 0; e < experts; ++e)
        for (int64_t p = 0; p < pieces; ++p) {
            const auto first = s.chosen.begin() + int64_t(of_piece) * p;
            const auto count = int32_t(std::count(first, first + int64_t(of_piece), int32_t(e)));
            s.begin_keep[size_t(p * experts + e)] = int32_t(s.kept);
            s.begin_keep[size_t((pieces + p) * experts + e)] = std::min(count, capacity);
            s.kept += std::min(count, capacity);
        }
    return s;
}

struct Placed {
    Tensor order, place;
};
Placed place(const Slots& s) {
    Placed placed{empty({s.kept}, DType::i32), empty({s.rows(), s.top_k}, DType::i32)};
    place_slots(placed.order, placed.place, upload(s.chosen, {s.rows(), s.top_k}, Device::cpu),
                upload(s.begin_keep, {2, s.pieces, s.experts}, Device::cpu));
    return placed;
}

}  // namespace

TEST_CASE("routing: choices and weights, by softmax and sigmoid, with a bias and groups") {
    for (const auto& [dtype, forward, gradient] : kAccuracies)
        for (const bool sigmoid : {false, true})
            for (const bool normalize : {false, true})
                for (const auto& [N, k, groups, top_groups] :
                     {std::array<int64_t, 4>{7, 3, 1, 1}, {12, 4, 4, 2}, {12, 5, 3, 3}, {8, 2, 8, 3}, {6, 6, 2, 2}})
                    for (const bool has_bias : {false, true}) {
                        INFO(name_of(dtype) << ", sigmoid " << sigmoid << ", experts " << N << ", groups " << groups);
                        Router router{{N, k, sigmoid, normalize, 2.5, groups, top_groups}};
                        if (has_bias) router.bias = randoms(N, 5, dtype);
                        const Doubles logits = scaled(randoms(router.rows * N, uint64_t(N), dtype), 2);
                        const Tensor x = tensor(logits, {router.rows, N}, dtype);
                        Tensor chosen = empty({router.rows, k}, DType::i32), weights = empty({router.rows, k}, dtype);
                        choose_experts(chosen, x, has_bias ? tensor(router.bias, {N}, dtype) : Tensor(), router.shape);
                        router_weights(weights, x, chosen, router.shape);
                        EXPECT(slot_list(chosen) == choices_double(logits, router));
                        EXPECT(distance(weights, weights_double(logits, slot_list(chosen), router)) <= forward);
                    }
}

TEST_CASE("routing: losses, and their gradient together with that of the weights") {
    for (const auto& [dtype, forward, gradient] : kAccuracies)
        for (const bool sigmoid : {false, true})
            for (const bool normalize : {false, true})
                for (const int64_t pieces : {0, 1, 3})
                    for (const double z_loss : {0.0, 0.1}) {
                        INFO(name_of(dtype) << ", sigmoid " << sigmoid << ", normalize " << normalize << ", pieces "
                                            << pieces << ", z-loss " << z_loss);
                        const int64_t N = 7, k = 3;
                        Router router{{N, k, sigmoid, normalize, 2.5}};
                        router.piece_grads = randoms(pieces * N, 2, dtype);
                        router.z_loss = z_loss;
                        const Doubles logits = scaled(randoms(router.rows * N, 1, dtype), 2),
                                      dweights = randoms(router.rows * k, 3, dtype);
                        const Tensor x = tensor(logits, {router.rows, N}, dtype);
                        const Tensor grads = pieces > 0 ? tensor(router.piece_grads, {pieces, N}, dtype) : Tensor();
                        Tensor chosen = empty({router.rows, k}, DType::i32), dlogits = empty({router.rows, N}, dtype);
                        choose_experts(chosen, x, {}, router.shape);
                        Tensor sums = tensor({0.5, 0.25}, {2}, DType::f64);  // is added to
                        router_losses(sums, x, grads, z_loss, router.shape);
                        Doubles expected = losses_double(logits, router);
                        expected[0] += 0.5;
                        expected[1] += 0.25;
                        EXPECT(distance(sums, expected) <= forward);
                        router_backward(dlogits, tensor(dweights, {router.rows, k}, dtype), x, chosen, grads, z_loss,
                                        router.shape);
                        const Ints experts = slot_list(chosen);
                        const auto loss = [&](const Doubles& v) {
                            const Doubles sums_of = losses_double(v, router);
                            return dot(weights_double(v, experts, router), dweights) + sums_of[0] + sums_of[1];
                        };
                        EXPECT(distance(dlogits, differentiate(loss, logits)) <= gradient);
                    }
}

TEST_CASE("routing: of equal scores the lower index, of experts and of groups") {
    const auto choose = [](const Doubles& logits, RouterShape shape, const Doubles& bias = {}) {
        Tensor chosen = empty({1, shape.top_k}, DType::i32);
        choose_experts(chosen, tensor(logits, {1, shape.experts}),
                       bias.empty() ? Tensor() : tensor(bias, {shape.experts}), shape);
        return slot_list(chosen);
    };
    for (const bool sigmoid : {false, true}) {
        EXPECT(choose({1, 1, 1, 1, 1}, {5, 3, sigmoid}) == Ints{0, 1, 2});
        EXPECT(choose({0, 2, 1, 2, 1, 2}, {6, 5, sigmoid}) == Ints{1, 3, 5, 2, 4});
        EXPECT(choose({0, 0, 0, 0}, {4, 2, sigmoid}, {0, 0.5, 0, 0.5}) == Ints{1, 3});
        // Groups {0, 1}, {2, 3}, {4, 5}; the best expert is in the group of the lowest sum.
        EXPECT(choose({1, 1, 1, 1, 1, 1}, {6, 2, sigmoid, true, 1, 3, 1}) == Ints{0, 1});
        EXPECT(choose({0, 0, 1, 1, 1, 1}, {6, 3, sigmoid, true, 1, 3, 2}) == Ints{2, 3, 4});
        EXPECT(choose({1, 1, 1, 1, 1.5, -9}, {6, 2, sigmoid, true, 1, 3, 2}) == Ints{0, 1});
    }
}

TEST_CASE("routing: logits far out do not overflow") {
    for (const bool sigmoid : {false, true}) {
        const RouterShape shape{3, 2, sigmoid};
        const Tensor x = tensor({500, -500, 499, -300, -400, -500}, {2, 3});
        Tensor chosen = empty({2, 2}, DType::i32), weights = empty({2, 2}), sums = zeros({2}, DType::f64);
        choose_experts(chosen, x, {}, shape);
        router_weights(weights, x, chosen, shape);
        EXPECT(slot_list(chosen) == Ints{0, 2, 0, 1});
        const double first = values(weights)[0];
        EXPECT(std::abs(first - (sigmoid ? 0.5 : 1 / (1 + std::exp(-1.0)))) <= 1e-6);
        router_losses(sums, x, {}, 1, shape);
        const double lse = 500 + std::log1p(std::exp(-1.0));
        EXPECT(std::abs(values(sums)[1] - (lse * lse + 300.0 * 300)) <= 0.1);
    }
}

TEST_CASE("routing: slots counted and placed: stable, piece by piece, dropped beyond their capacity") {
    const Ints chosen = {2, 0, 2, 4, 0, 2, 2, 4, 2, 0, 4, 2};  // nobody chose 1 and 3
    Tensor counts = empty({3, 5}, DType::i32);
    count_choices(counts, upload(chosen, {6, 2}, Device::cpu));
    EXPECT(slot_list(counts) == Ints{1, 0, 2, 0, 1, 1, 0, 2, 0, 1, 1, 0, 2, 0, 1});

    const Placed one = place(slots_of(1, 5, 2, chosen, 100));
    EXPECT(slot_list(one.order) == Ints{1, 4, 9, 0, 2, 5, 6, 8, 11, 3, 7, 10});
    EXPECT(slot_list(one.place) == Ints{3, 0, 4, 9, 1, 5, 6, 10, 7, 2, 11, 8});

    const Placed three = place(slots_of(1, 5, 2, chosen, 2));
    EXPECT(slot_list(three.order) == Ints{1, 4, 0, 2, 3, 7});
    EXPECT(slot_list(three.place) == Ints{2, 0, 3, 4, 1, -1, -1, 5, -1, -1, -1, -1});

    const Placed pieces = place(slots_of(3, 5, 2, chosen, 1));  // of each piece the first
    EXPECT(slot_list(pieces.order) == Ints{1, 4, 9, 0, 5, 8, 3, 7, 10});
    EXPECT(slot_list(pieces.place) == Ints{3, 0, -1, 6, 1, 4, -1, 7, 5, 2, 8, -1});

    // The places of a piece's expert need not follow those of the piece before.
    Tensor order = empty({4}, DType::i32), where = empty({2, 2}, DType::i32);
    place_slots(order, where, upload({0, 1, 1, 0}, {2, 2}, Device::cpu),
                upload({3, 1, 0, 2, 1, 1, 1, 1}, {2, 2, 2}, Device::cpu));
    EXPECT(slot_list(order) == Ints{3, 1, 2, 0});
    EXPECT(slot_list(where) == Ints{3, 1, 2, 0});

    const Placed nothing = place(slots_of(3, 5, 2, {}, 1));
    EXPECT(nothing.order.size() + nothing.place.size() == 0);
    Tensor none = empty({3, 5}, DType::i32);
    count_choices(none, empty({0, 2}, DType::i32));
    EXPECT(slot_list(none) == Ints(15, 0));
}

TEST_CASE("routing: rows gathered, summed and multiplied, with dropped slots, with and without weights") {
    for (const auto& [dtype, forward, gradient] : kAccuracies)
        for (const int32_t capacity : {2, 100})
            for (const bool weighted : {false, true}) {
                INFO(name_of(dtype) << ", capacity " << capacity << ", weights " << weighted);
                const int64_t E = 13, k = 2;
                const Slots s = slots_of(2, 5, k, {2, 0, 2, 4, 0, 2, 2, 4, 2, 0, 4, 2}, capacity);
                const int64_t R = s.rows(), S = s.kept;
                const Placed placed = place(s);
                const Ints order = slot_list(placed.order), where = slot_list(placed.place);
                const Doubles x = randoms(R * E, 1, dtype), z = randoms(S * E, 2, dtype), dy = randoms(R * E, 3, dtype),
                              w = weighted ? randoms(R * k, 4, dtype) : Doubles(size_t(R * k), 1.0);
                const Tensor weights = weighted ? tensor(w, {R, k}, dtype) : Tensor();
                Doubles gathered, summed(size_t(R * E), 0.0), products(size_t(R * k), 0.0);
                for (const int32_t slot : order)
                    for (int64_t c = 0; c < E; ++c) gathered.push_back(w[size_t(slot)] * x[size_t(slot / k * E + c)]);
                const auto sum_double = [&](const Doubles& of) {
                    Doubles y(size_t(R * E), 0.0);
                    for (int64_t i = 0; i < R * k; ++i)
                        for (int64_t c = 0; where[size_t(i)] >= 0 && c < E; ++c)
                            y[size_t(i / k * E + c)] += of[size_t(i)] * z[size_t(where[size_t(i)] * E + c)];
                    return y;
                };
                Tensor y = empty({S, E}, dtype), sum = empty({R, E}, dtype), dots = empty({R, k}, dtype);
                gather_slots(y, tensor(x, {R, E}, dtype), placed.order, k, weights);
                EXPECT(distance(y, gathered) <= forward);
                sum_slots(sum, tensor(z, {S, E}, dtype), placed.place, weights);
                EXPECT(distance(sum, sum_double(w)) <= forward);
                slot_products(dots, tensor(dy, {R, E}, dtype), tensor(z, {S, E}, dtype), placed.place);
                const Doubles expected = differentiate([&](const Doubles& v) { return dot(sum_double(v), dy); }, w);
                EXPECT(distance(dots, expected) <= gradient);
                for (size_t i = 0; i < where.size(); ++i)
                    if (where[i] < 0) EXPECT(values(dots)[i] == 0);
            }
    // bf16: the sum is rounded once, the weights are fp32.
    const Placed placed = place(slots_of(1, 2, 2, {0, 1}, 1));
    Tensor y = empty({1, 1}, DType::bf16);
    sum_slots(y, tensor({1, 0x1p-8}, {2, 1}, DType::bf16), placed.place, tensor({1 + 0x1p-8, 1}, {1, 2}));
    EXPECT(values(y) == Doubles{1 + 0x1p-7});
}

TEST_CASE("routing: products of groups of rows, some of them empty, as a loop over rows") {
    for (const auto& [dtype, forward, gradient] : kAccuracies)
        for (const std::vector<int64_t>& rows :
             {std::vector<int64_t>{3, 0, 5, 1}, {0, 4, 0}, {0, 0}, {9}, {1, 1, 1, 1, 1}}) {
            const auto G = int64_t(rows.size());
            const int64_t in = 6, out = 5;
            Ints group;  // of each row
            for (int64_t g = 0; g < G; ++g) group.insert(group.end(), size_t(rows[size_t(g)]), int32_t(g));
            const auto S = int64_t(group.size());
            INFO(name_of(dtype) << ", " << S << " rows in " << G << " groups");
            const Doubles x = randoms(S * in, 1, dtype), w = randoms(G * out * in, 2, dtype),
                          dy = randoms(S * out, 3, dtype), before = randoms(G * out * in, 4, dtype);
            Doubles y(size_t(S * out), 0.0), dx(size_t(S * in), 0.0), dw = before;
            for (int64_t s = 0; s < S; ++s)
                for (int64_t o = 0; o < out; ++o)
                    for (int64_t i = 0; i < in; ++i) {
                        const auto at = size_t((group[size_t(s)] * out + o) * in + i), row = size_t(s * out + o);
                        y[row] += w[at] * x[size_t(s * in + i)];
                        dx[size_t(s * in + i)] += w[at] * dy[row];
                        dw[at] += dy[row] * x[size_t(s * in + i)];
                    }
            const Tensor tx = tensor(x, {S, in}, dtype), tw = tensor(w, {G * out, in}, dtype),
                         tdy = tensor(dy, {S, out}, dtype);
            Tensor ty = empty({S, out}, dtype), tdx = empty({S, in}, dtype), tdw = tensor(before, {G * out, in}, dtype);
            grouped_forward(ty, tx, tw, rows);
            grouped_dgrad(tdx, tdy, tw, rows);
            grouped_wgrad(tdw, tdy, tx, rows);
            EXPECT(distance(ty, y) <= forward);
            EXPECT(distance(tdx, dx) <= forward);
            EXPECT(distance(tdw, dw) <= forward);
        }
}

TEST_CASE("routing: an expert layer equals a loop over all experts") {
    // y_r = sum_j w_rj W_(e_rj) x_r, by slots and by experts.
    const int64_t R = 9, N = 5, k = 3, E = 6;
    const RouterShape shape{N, k};
    const DType dtype = DType::f64;
    const Doubles x = randoms(R * E, 1, dtype), w = randoms(N * E * E, 2, dtype), logits = randoms(R * N, 3, dtype);
    Tensor chosen = empty({R, k}, DType::i32), weights = empty({R, k}, dtype), counts = empty({1, N}, DType::i32);
    const Tensor tl = tensor(logits, {R, N}, dtype);
    choose_experts(chosen, tl, {}, shape);
    router_weights(weights, tl, chosen, shape);
    count_choices(counts, chosen);
    const Placed placed = place(slots_of(1, N, k, slot_list(chosen), 100));
    std::vector<int64_t> rows;
    for (const int32_t count : slot_list(counts)) rows.push_back(count);
    Tensor slots = empty({R * k, E}, dtype), z = empty({R * k, E}, dtype), y = empty({R, E}, dtype);
    gather_slots(slots, tensor(x, {R, E}, dtype), placed.order, k);
    grouped_forward(z, slots, tensor(w, {N * E, E}, dtype), rows);
    sum_slots(y, z, placed.place, weights);
    Doubles expected(size_t(R * E), 0.0);
    const Doubles factor = values(weights);
    const Ints experts = slot_list(chosen);
    for (int64_t r = 0; r < R; ++r)
        for (int64_t e = 0; e < N; ++e) {
            double of_expert = 0;  // 0 where the row did not choose it
            for (int64_t j = 0; j < k; ++j)
                if (experts[size_t(r * k + j)] == e) of_expert = factor[size_t(r * k + j)];
            for (int64_t o = 0; o < E; ++o)
                for (int64_t i = 0; i < E; ++i)
                    expected[size_t(r * E + o)] += of_expert * w[size_t((e * E + o) * E + i)] * x[size_t(r * E + i)];
        }
    EXPECT(distance(y, expected) <= 1e-14);
}

TEST_CASE("routing: shapes that do not fit are refused") {
    const RouterShape shape{4, 2};
    const Tensor logits = zeros({6, 4});
    Tensor chosen = zeros({6, 2}, DType::i32), weights = zeros({6, 2}), sums = zeros({2}, DType::f64);
    Tensor dlogits = zeros({6, 4}), narrow = zeros({6, 3});
    EXPECT_CHECK_FAILS(choose_experts(chosen, narrow, {}, shape));
    EXPECT_CHECK_FAILS(choose_experts(weights, logits, {}, shape));                        // not i32
    EXPECT_CHECK_FAILS(choose_experts(chosen, logits, zeros({3}), shape));                 // the bias
    EXPECT_CHECK_FAILS(choose_experts(chosen, logits, {}, {4, 5}));                        // more than there are
    EXPECT_CHECK_FAILS(choose_experts(chosen, logits, {}, {4, 0}));                        // nothing chosen
    EXPECT_CHECK_FAILS(choose_experts(chosen, logits, {}, {4, 2, false, true, 1, 3, 1}));  // groups of unequal size
    EXPECT_CHECK_FAILS(choose_experts(chosen, logits, {}, {4, 2, false, true, 1, 2, 3}));  // more groups than there are
    EXPECT_CHECK_FAILS(choose_experts(chosen, logits, {}, {4, 2, false, true, 1, 2, 0}));  // none
    EXPECT_CHECK_FAILS(choose_experts(chosen, logits, {}, {4, 2, false, true, 1, 4, 1}));  // of one expert for two
    EXPECT_CHECK_FAILS(router_weights(narrow, logits, chosen, shape));
    EXPECT_CHECK_FAILS(router_losses(weights, logits, {}, 0, shape));
    EXPECT_CHECK_FAILS(router_losses(sums, logits, zeros({4, 4}), 0, shape));  // 6 rows in 4 pieces
    EXPECT_CHECK_FAILS(router_losses(sums, logits, zeros({2, 3}), 0, shape));
    EXPECT_CHECK_FAILS(router_backward(narrow, weights, logits, chosen, {}, 0, shape));
    EXPECT_CHECK_FAILS(router_backward(dlogits, narrow, logits, chosen, {}, 0, shape));
    Tensor counts = zeros({4, 4}, DType::i32), order = zeros({12}, DType::i32), place = zeros({6, 2}, DType::i32);
    EXPECT_CHECK_FAILS(count_choices(counts, chosen));
    EXPECT_CHECK_FAILS(place_slots(order, place, chosen, zeros({2, 4, 4}, DType::i32)));
    EXPECT_CHECK_FAILS(place_slots(order, place, chosen, zeros({1, 4}, DType::i32)));
    EXPECT_CHECK_FAILS(place_slots(order, counts, chosen, zeros({2, 1, 4}, DType::i32)));
    Tensor y = zeros({12, 5}), sum = zeros({6, 5});
    EXPECT_CHECK_FAILS(gather_slots(y, sum, zeros({11}, DType::i32), 2));
    EXPECT_CHECK_FAILS(gather_slots(y, zeros({6, 4}), order, 2));
    EXPECT_CHECK_FAILS(gather_slots(y, sum, order, 3, weights));
    EXPECT_CHECK_FAILS(sum_slots(sum, y, zeros({5, 2}, DType::i32)));
    EXPECT_CHECK_FAILS(sum_slots(sum, y, place, zeros({6, 3})));
    EXPECT_CHECK_FAILS(slot_products(narrow, sum, y, place));
    EXPECT_CHECK_FAILS(slot_products(weights, zeros({6, 4}), y, place));
    Tensor grouped = zeros({12, 3});
    EXPECT_CHECK_FAILS(grouped_forward(grouped, y, zeros({6, 5}), {6, 5}));  // 11 of 12 rows
}
