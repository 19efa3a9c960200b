// routing.h on the CPU: the definition that routing.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/ops/elementwise.h"

namespace train70b {

namespace cpu {

namespace {

// For each row: body(row, its scores, log(sum of exp(logits))). Scores: its softmax, or a sigmoid of each logit.
template <class C, class Body>
void for_scores(const Tensor& logits, bool sigmoid, const Body& body) {
    const int64_t N = logits.cols();
    parallel_ranges(logits.rows(), 1 + 4096 / N, [&](int64_t begin, int64_t end) {
        std::vector<C> p(static_cast<size_t>(N));
        for (int64_t r = begin; r < end; ++r) {
            const C *x = logits.data<C>() + r * N, max_logit = *std::max_element(x, x + N);
            C sum = 0;
            for (size_t i = 0; i < p.size(); ++i) sum += p[i] = std::exp(x[i] - max_logit);
            for (size_t i = 0; i < p.size(); ++i) p[i] = sigmoid ? 1 / (1 + std::exp(-x[i])) : p[i] / sum;
            body(r, p, max_logit + std::log(sum));
        }
    });
}

// The indices of the n largest of x, the largest first; of equal ones the lower index.
template <class C>
std::vector<int32_t> largest(const std::vector<C>& x, int64_t n) {
    // tag::lab-top-k-capacity-choose[]
    std::vector<int32_t> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return x[size_t(a)] > x[size_t(b)]; });
    order.resize(size_t(n));
    return order;
    // end::lab-top-k-capacity-choose[]
}

// Leaves out, as -infinity, the experts of all groups but the best ones.
template <class C>
void keep_best_groups(std::vector<C>& rank, const RouterShape& shape) {
    if (shape.top_groups == shape.groups) return;
    const int64_t in_group = int64_t(rank.size()) / shape.groups;
    std::vector<C> best;
    for (int64_t g = 0; g < shape.groups; ++g) {
        const std::vector<C> group(rank.begin() + g * in_group, rank.begin() + (g + 1) * in_group);
        C sum = 0;
        for (const int32_t e : largest(group, std::min<int64_t>(2, in_group))) sum += group[size_t(e)];
        best.push_back(sum);
    }
    std::vector<bool> kept(size_t(shape.groups), false);
    for (const int32_t g : largest(best, shape.top_groups)) kept[size_t(g)] = true;
    for (size_t e = 0; e < rank.size(); ++e)
        if (!kept[e / size_t(in_group)]) rank[e] = -std::numeric_limits<C>::infinity();
}

}  // namespace

void choose_experts(Tensor& chosen, const Tensor& logits, const Tensor& bias, const RouterShape& shape) {
    with_wide(logits.dtype(), [&]<class C>(C) {
        for_scores<C>(logits, shape.sigmoid, [&](int64_t r, std::vector<C>& p, C) {
            for (size_t e = 0; bias && e < p.size(); ++e) p[e] += bias.data<C>()[e];
            keep_best_groups(p, shape);
            const std::vector<int32_t> best = largest(p, shape.top_k);
            std::copy(best.begin(), best.end(), chosen.data<int32_t>() + r * shape.top_k);
        });
    });
}

void router_weights(Tensor& weights, const Tensor& logits, const Tensor& chosen, const RouterShape& shape) {
    with_wide(logits.dtype(), [&]<class C>(C) {
        const int64_t k = shape.top_k;
        for_scores<C>(logits, shape.sigmoid, [&](int64_t r, const std::vector<C>& p, C) {
            const int32_t* experts = chosen.data<int32_t>() + r * k;
            C sum = 0;
            for (int64_t j = 0; j < k; ++j) sum += p[size_t(experts[j])];
            for (int64_t j = 0; j < k; ++j)
                weights.data<C>()[r * k + j] = C(shape.scale) * p[size_t(experts[j])] / (shape.normalize ? sum : 1);
        });
    });
}

void router_losses(Tensor& sums, const Tensor& logits, const Tensor& piece_grads, double z_loss,
                   const RouterShape& shape) {
    with_wide(logits.dtype(), [&]<class C>(C) {
        const int64_t N = logits.cols(), rows = logits.rows();
        std::vector<double> balance(size_t(rows), 0.0), z(size_t(rows), 0.0);
        for_scores<C>(logits, shape.sigmoid, [&](int64_t r, const std::vector<C>& p, C lse) {
            z[size_t(r)] = z_loss * double(lse) * double(lse);
            if (!piece_grads) return;
            const C* grads = piece_grads.data<C>() + r / (rows / piece_grads.rows()) * N;
            double sum = 0, dot = 0;
            for (int64_t e = 0; e < N; ++e) sum += p[size_t(e)], dot += double(grads[e]) * p[size_t(e)];
            balance[size_t(r)] = shape.sigmoid ? dot / sum : dot;
        });
        for (int64_t r = 0; r < rows; ++r) {
            sums.data<double>()[0] += balance[size_t(r)];
            sums.data<double>()[1] += z[size_t(r)];
        }
    });
}

void router_backward(Tensor& dlogits, const Tensor& dweights, const Tensor& logits, const Tensor& chosen,
                     const Tensor& piece_grads, double z_loss, const RouterShape& shape) {
    with_wide(logits.dtype(), [&]<class C>(C) {
        const int64_t N = logits.cols(), k = shape.top_k, rows = logits.rows();
        for_scores<C>(logits, shape.sigmoid, [&](int64_t r, const std::vector<C>& p, C lse) {
            std::vector<C> dp(size_t(N), C(0));
            const int32_t* experts = chosen.data<int32_t>() + r * k;
            const C* dw = dweights.data<C>() + r * k;
            C all = 0, sum = 0, dot = 0;  // of all p; of the chosen p, and of dw p
            for (const C score : p) all += score;
            for (int64_t j = 0; j < k; ++j) sum += p[size_t(experts[j])], dot += dw[j] * p[size_t(experts[j])];
            for (int64_t j = 0; j < k; ++j)
                dp[size_t(experts[j])] = C(shape.scale) * (shape.normalize ? (dw[j] - dot / sum) / sum : dw[j]);
            if (piece_grads) {
                const C* grads = piece_grads.data<C>() + r / (rows / piece_grads.rows()) * N;
                C mean = 0;
                for (int64_t e = 0; e < N; ++e) mean += grads[e] * p[size_t(e)] / all;
                for (int64_t e = 0; e < N; ++e) dp[size_t(e)] += shape.sigmoid ? (grads[e] - mean) / all : grads[e];
            }
            C through_sum = 0;  // of the softmax
            for (int64_t e = 0; e < N; ++e) through_sum += dp[size_t(e)] * p[size_t(e)];
            const C* x = logits.data<C>() + r * N;
            C* dx = dlogits.data<C>() + r * N;
            for (int64_t e = 0; e < N; ++e) {
                const C score = p[size_t(e)];
                dx[e] = score * (shape.sigmoid ? dp[size_t(e)] * (1 - score) : dp[size_t(e)] - through_sum);
                if (z_loss != 0) dx[e] += C(2 * z_loss) * lse * std::exp(x[e] - lse);
            }
        });
    });
}

void count_choices(Tensor& counts, const Tensor& chosen) {
    const int64_t N = counts.cols(), slots = chosen.size() / counts.rows();  // of a piece
    parallel_rows(counts.rows(), slots, [&](int64_t p) {
        int32_t* count = counts.data<int32_t>() + p * N;
        std::fill_n(count, N, 0);
        for (int64_t i = p * slots; i < (p + 1) * slots; ++i) ++count[chosen.data<int32_t>()[i]];
    });
}

void place_slots(Tensor& order, Tensor& place, const Tensor& chosen, const Tensor& begin_keep) {
    // tag::lab-top-k-capacity-place[]
    const int64_t P = begin_keep.shape()[1], N = begin_keep.shape()[2], slots = chosen.size() / P;
    parallel_rows(P, slots, [&](int64_t p) {
        std::vector<int32_t> seen(size_t(N), 0);
        const int32_t *begin = begin_keep.data<int32_t>() + p * N, *keep = begin + P * N;
        for (int64_t i = p * slots; i < (p + 1) * slots; ++i) {
            const int32_t expert = chosen.data<int32_t>()[i], before = seen[size_t(expert)]++;
            const int32_t at = before < keep[expert] ? begin[expert] + before : -1;
            place.data<int32_t>()[i] = at;
            if (at >= 0) order.data<int32_t>()[at] = int32_t(i);
        }
    });
    // end::lab-top-k-capacity-place[]
}

void gather_slots(Tensor& y, const Tensor& x, const Tensor& order, int64_t top_k, const Tensor& weights) {
    with_float(y.dtype(), [&]<class T>(T) {
        const int64_t cols = y.cols();
        parallel_rows(y.rows(), cols, [&](int64_t s) {
            const int64_t slot = order.data<int32_t>()[s];
            const Wide<T> weight = weights ? weights.data<Wide<T>>()[slot] : Wide<T>(1);
            const T* in = x.data<T>() + slot / top_k * cols;
            T* out = y.data<T>() + s * cols;
            vectorized(0, cols, [&](int64_t c) { out[c] = T(weight * Wide<T>(in[c])); });
        });
    });
}

void sum_slots(Tensor& y, const Tensor& z, const Tensor& place, const Tensor& weights) {
    with_float(y.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        const int64_t cols = y.cols(), k = place.cols();
        parallel_ranges(y.rows(), 1 + 4096 / cols, [&](int64_t begin, int64_t end) {
            std::vector<C> sum(static_cast<size_t>(cols));
            for (int64_t r = begin; r < end; ++r) {
                std::fill(sum.begin(), sum.end(), C(0));
                for (int64_t i = r * k; i < (r + 1) * k; ++i) {
                    if (place.data<int32_t>()[i] < 0) continue;
                    const T* in = z.data<T>() + place.data<int32_t>()[i] * cols;
                    const C weight = weights ? weights.data<C>()[i] : C(1);
#pragma omp simd
                    for (int64_t c = 0; c < cols; ++c) sum[size_t(c)] += weight * C(in[c]);
                }
                vectorized(0, cols, [&, out = y.data<T>() + r * cols](int64_t c) { out[c] = T(sum[size_t(c)]); });
            }
        });
    });
}

void slot_products(Tensor& dots, const Tensor& dy, const Tensor& z, const Tensor& place) {
    with_float(dy.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        const int64_t cols = dy.cols(), k = place.cols();
        parallel_rows(place.size(), cols, [&](int64_t i) {
            C dot = 0;
            if (const int64_t at = place.data<int32_t>()[i]; at >= 0) {
                const T *a = dy.data<T>() + i / k * cols, *b = z.data<T>() + at * cols;
                for (int64_t c = 0; c < cols; ++c) dot += C(a[c]) * C(b[c]);
            }
            dots.data<C>()[i] = dot;
        });
    });
}

}  // namespace cpu

namespace cuda {  // routing.cu
decltype(train70b::choose_experts) choose_experts;
decltype(train70b::router_weights) router_weights;
decltype(train70b::router_losses) router_losses;
decltype(train70b::router_backward) router_backward;
decltype(train70b::count_choices) count_choices;
decltype(train70b::place_slots) place_slots;
decltype(train70b::gather_slots) gather_slots;
decltype(train70b::sum_slots) sum_slots;
decltype(train70b::slot_products) slot_products;
}  // namespace cuda

namespace {
void expect_router(const Tensor& logits, const RouterShape& s) {
    expect_rows("logits", logits, logits.rows(), s.experts, stats_dtype(logits.dtype()));
    CHECK(0 < s.groups && s.experts % s.groups == 0 && 0 < s.top_groups && s.top_groups <= s.groups, "{} of {} groups",
          s.top_groups, s.groups);
    CHECK(0 < s.top_k && s.top_k <= s.experts / s.groups * s.top_groups, "{} of {}", s.top_k, s.experts);
}
// Its rows are divided into those of piece_grads.
void expect_piece_grads(const Tensor& piece_grads, const Tensor& logits) {
    if (!piece_grads) return;
    expect_rows("piece_grads", piece_grads, piece_grads.rows(), logits.cols(), logits.dtype());
    CHECK(logits.rows() % piece_grads.rows() == 0, "{} rows in {} pieces", logits.rows(), piece_grads.rows());
}
}  // namespace

void choose_experts(Tensor& chosen, const Tensor& logits, const Tensor& bias, const RouterShape& shape) {
    expect_router(logits, shape);
    expect_rows("chosen", chosen, logits.rows(), shape.top_k, DType::i32);
    if (bias) expect("bias", bias, {shape.experts}, logits.dtype());
    Span span("choose_experts", "op", 0, bytes_of({logits, chosen}));
    DISPATCH(device_of({chosen, logits}), choose_experts(chosen, logits, bias, shape));
}

void router_weights(Tensor& weights, const Tensor& logits, const Tensor& chosen, const RouterShape& shape) {
    expect_router(logits, shape);
    expect_rows("weights", weights, logits.rows(), shape.top_k, logits.dtype());
    expect_rows("chosen", chosen, logits.rows(), shape.top_k, DType::i32);
    Span span("router_weights", "op", 0, bytes_of({logits, chosen, weights}));
    DISPATCH(device_of({weights, logits, chosen}), router_weights(weights, logits, chosen, shape));
}

void router_losses(Tensor& sums, const Tensor& logits, const Tensor& piece_grads, double z_loss,
                   const RouterShape& shape) {
    expect_router(logits, shape);
    expect_piece_grads(piece_grads, logits);
    expect("sums", sums, {2}, DType::f64);
    Span span("router_losses", "op", 0, bytes_of({logits}));
    DISPATCH(device_of({sums, logits}), router_losses(sums, logits, piece_grads, z_loss, shape));
}

void router_backward(Tensor& dlogits, const Tensor& dweights, const Tensor& logits, const Tensor& chosen,
                     const Tensor& piece_grads, double z_loss, const RouterShape& shape) {
    expect_router(logits, shape);
    expect_piece_grads(piece_grads, logits);
    expect_rows("dlogits", dlogits, logits.rows(), shape.experts, logits.dtype());
    expect_rows("dweights", dweights, logits.rows(), shape.top_k, logits.dtype());
    expect_rows("chosen", chosen, logits.rows(), shape.top_k, DType::i32);
    Span span("router_backward", "op", 0, bytes_of({dlogits, logits}));
    DISPATCH(device_of({dlogits, dweights, logits, chosen}),
             router_backward(dlogits, dweights, logits, chosen, piece_grads, z_loss, shape));
}

void count_choices(Tensor& counts, const Tensor& chosen) {
    CHECK(counts.dtype() == DType::i32 && chosen.dtype() == DType::i32 && chosen.rows() % counts.rows() == 0,
          "{} rows in {} pieces", chosen.rows(), counts.rows());
    Span span("count_choices", "op", 0, bytes_of({chosen}));
    DISPATCH(device_of({counts, chosen}), count_choices(counts, chosen));
}

std::vector<int32_t> begin_keep_of(const PieceCounts& local, const PieceCounts& all, double factor, int64_t slots) {
    // tag::lab-top-k-capacity-keep[]
    const int64_t P = int64_t(local.pieces.size()), N = int64_t(local.counts.size()) / P;
    const double capacity = std::ceil(factor * double(slots) / double(N));
    std::vector<int32_t> begin_keep(size_t(2 * P * N));
    for (int64_t p = 0; p < P; ++p)
        for (int64_t e = 0; e < N; ++e) {
            double kept = local.counts[size_t(p * N + e)];
            if (factor > 0) {
                const RowPiece& piece = local.pieces[size_t(p)];
                double before = 0;  // of the sequence's slots for this expert
                for (size_t q = 0; q < all.pieces.size(); ++q)
                    if (all.pieces[q].sequence == piece.sequence && all.pieces[q].position < piece.position)
                        before += all.counts[q * size_t(N) + size_t(e)];
                kept = std::clamp(capacity - before, 0.0, kept);
            }
            begin_keep[size_t((P + p) * N + e)] = int32_t(kept);
        }
    int32_t begin = 0;
    for (int64_t e = 0; e < N; ++e)
        for (int64_t p = 0; p < P; ++p) {
            begin_keep[size_t(p * N + e)] = begin;
            begin += begin_keep[size_t((P + p) * N + e)];
        }
    return begin_keep;
    // end::lab-top-k-capacity-keep[]
}

void place_slots(Tensor& order, Tensor& place, const Tensor& chosen, const Tensor& begin_keep) {
    expect("place", place, chosen.shape(), DType::i32);
    expect("order", order, {order.size()}, DType::i32);
    CHECK(begin_keep.shape().size() == 3 && begin_keep.shape()[0] == 2 && begin_keep.dtype() == DType::i32 &&
              chosen.rows() % begin_keep.shape()[1] == 0,
          "begin_keep {}", to_string(begin_keep.shape()));
    Span span("place_slots", "op", 0, bytes_of({order, place, chosen}));
    DISPATCH(device_of({order, place, chosen, begin_keep}), place_slots(order, place, chosen, begin_keep));
}

void gather_slots(Tensor& y, const Tensor& x, const Tensor& order, int64_t top_k, const Tensor& weights) {
    expect("order", order, {y.rows()}, DType::i32);
    expect_rows("x", x, x.rows(), y.cols(), y.dtype());
    if (weights) expect_rows("weights", weights, x.rows(), top_k, stats_dtype(x.dtype()));
    Span span("gather_slots", "op", 0, 2 * bytes_of({y}));
    DISPATCH(device_of({y, x, order}), gather_slots(y, x, order, top_k, weights));
}

void sum_slots(Tensor& y, const Tensor& z, const Tensor& place, const Tensor& weights) {
    expect_rows("place", place, y.rows(), place.cols(), DType::i32);
    expect_rows("z", z, z.rows(), y.cols(), y.dtype());
    if (weights) expect_rows("weights", weights, y.rows(), place.cols(), stats_dtype(y.dtype()));
    Span span("sum_slots", "op", 0, bytes_of({y, z}));
    DISPATCH(device_of({y, z, place}), sum_slots(y, z, place, weights));
}

void slot_products(Tensor& dots, const Tensor& dy, const Tensor& z, const Tensor& place) {
    expect_rows("place", place, dy.rows(), place.cols(), DType::i32);
    expect_rows("z", z, z.rows(), dy.cols(), dy.dtype());
    expect_rows("dots", dots, dy.rows(), place.cols(), stats_dtype(dy.dtype()));
    Span span("slot_products", "op", 0, 2 * bytes_of({z}));
    DISPATCH(device_of({dots, dy, z, place}), slot_products(dots, dy, z, place));
}

}  // namespace train70b
