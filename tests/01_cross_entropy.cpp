#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// What the ops compute of a loss besides its cross-entropy: the z-loss, and muP's multiplier of the logits.
struct Extra {
    double z_loss = 0, logit_scale = 1;
};

// The cross-entropy and what the z-loss adds to it.
std::array<double, 2> losses_double(const Doubles& logits, const std::vector<int32_t>& targets, int64_t cols,
                                    double scale, const Extra& extra) {
    double loss = 0, squares = 0;
    for (size_t r = 0; r < targets.size(); ++r) {
        if (targets[r] == kIgnored) continue;
        double sum = 0;
        for (int64_t c = 0; c < cols; ++c) sum += std::exp(extra.logit_scale * logits[r * cols + c]);
        loss += std::log(sum) - extra.logit_scale * logits[r * cols + targets[r]];
        squares += std::log(sum) * std::log(sum);
    }
    return {loss * scale, extra.z_loss * squares * scale};
}

double cross_entropy_double(const Doubles& logits, const std::vector<int32_t>& targets, int64_t cols, double scale) {
    return losses_double(logits, targets, cols, scale, {})[0];
}

}  // namespace

TEST_CASE("cross-entropy, whole and with the vocabulary in two parts") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        const int64_t R = 5, V = 11, cut = 4;
        INFO("cross_entropy " << name_of(dtype) << ", R " << R << " V " << V);
        const double factor = 1.0 / 7;
        Doubles logits = randoms(R * V, 1, dtype);
        for (double& v : logits) v *= 20;
        const std::vector<int32_t> ids = {0, 10, 3, 4, 7};
        const Tensor targets = upload(ids, {R}, Device::cpu);
        Tensor x = tensor(logits, {R, V}, dtype), max = empty({R}, dtype), sum = empty({R}, dtype),
               at = empty({R}, dtype), lse = empty({R}, dtype), loss = empty({1}, dtype);
        softmax_stats(max, sum, at, x, targets);
        cross_entropy(loss, lse, max, sum, at, factor);
        EXPECT(std::abs(read(loss)[0] / cross_entropy_double(logits, ids, V, factor) - 1) <= forward);
        cross_entropy_backward(x, targets, lse, factor);
        EXPECT(distance(x, differentiate([&](const Doubles& v) { return cross_entropy_double(v, ids, V, factor); },
                                         logits)) <= gradient);

        for (auto [begin, end] : {std::array<int64_t, 2>{0, cut}, {cut, V}}) {
            INFO("columns " << begin << " to " << end);
            Doubles part;
            for (int64_t r = 0; r < R; ++r)
                part.insert(part.end(), &logits[r * V + begin], &logits[r * V + begin] + (end - begin));
            Tensor y = tensor(part, {R, end - begin}, dtype);
            softmax_stats(max, sum, at, y, targets, begin);
            for (int64_t r = 0; r < R; ++r)
                EXPECT(values(at)[r] ==
                       (ids[r] >= begin && ids[r] < end ? values(y)[r * (end - begin) + ids[r] - begin] : 0));
            cross_entropy_backward(y, targets, lse, factor, begin);
            const Doubles got = values(y), whole = values(x);
            for (int64_t r = 0; r < R; ++r)
                for (int64_t c = begin; c < end; ++c) EXPECT(got[r * (end - begin) + c - begin] == whole[r * V + c]);
        }
    }
}

TEST_CASE("cross-entropy: padding never wins, gets no gradient, and a part that is nothing but padding adds nothing") {
    const int64_t R = 4, V = 7, wide = 12;
    const double factor = 0.25;
    const std::vector<int32_t> ids = {0, 6, 3, 2};
    const Tensor targets = upload(ids, {R}, Device::cpu);
    for (const double level : {-60.0, 0.0, 60.0}) {  // far below the padding's 0, and far above
        INFO("logits around " << level);
        Doubles real, padded;
        for (int64_t r = 0; r < R; ++r) {
            const Doubles row = randoms(V, 10 + r);
            for (int64_t v = 0; v < wide; ++v) padded.push_back(v < V ? level + 5 * row[v] : 0);
            real.insert(real.end(), &padded[r * wide], &padded[r * wide] + V);
        }
        const double expected = cross_entropy_double(real, ids, V, factor);
        const Doubles gradient =
            differentiate([&](const Doubles& x) { return cross_entropy_double(x, ids, V, factor); }, real);
        for (DType dtype : {DType::f32, DType::bf16}) {
            INFO(std::string(name_of(dtype)));
            Tensor x = tensor(padded, {R, wide}, dtype), max = empty({R}), sum = empty({R}), at = empty({R});
            Tensor lse = empty({R}), loss = empty({1});
            softmax_stats(max, sum, at, x, targets, 0, V);
            cross_entropy(loss, lse, max, sum, at, factor);
            cross_entropy_backward(x, targets, lse, factor, 0, V);
            const Doubles got = values(x);
            if (dtype == DType::f32) {
                EXPECT(std::abs(read(loss)[0] / expected - 1) <= kForward);
                Doubles inside;
                for (int64_t r = 0; r < R; ++r) inside.insert(inside.end(), &got[r * wide], &got[r * wide] + V);
                EXPECT(distance(inside, gradient) <= 5e-5);  // of logits around 60
            }
            for (int64_t i = 0; i < R * wide; ++i)
                if (i % wide >= V) EXPECT(got[i] == 0);
        }
        // Three ranks: columns 0..3, 4..7 of which one is padding, 8..11 of which all are.
        Tensor whole_max = tensor(Doubles(R, -INFINITY), {R}), whole_sum = zeros({R}), whole_at = zeros({R});
        std::vector<Tensor> maxima, sums;
        for (int64_t first : {0, 4, 8}) {
            Doubles part;
            for (int64_t r = 0; r < R; ++r)
                part.insert(part.end(), &padded[r * wide + first], &padded[r * wide + first] + 4);
            Tensor at = empty({R});
            maxima.push_back(empty({R}));
            sums.push_back(empty({R}));
            softmax_stats(maxima.back(), sums.back(), at, tensor(part, {R, 4}), targets, first, V);
            add(whole_at, whole_at, at);
            for (int64_t r = 0; r < R; ++r)
                whole_max.data<float>()[r] = std::max(whole_max.data<float>()[r], maxima.back().data<float>()[r]);
        }
        for (size_t i = 0; i < 3; ++i) {
            rescale_sums(sums[i], maxima[i], whole_max);
            add(whole_sum, whole_sum, sums[i]);
        }
        for (double x : read(sums[2])) EXPECT(x == 0);
        Tensor lse = empty({R}), loss = empty({1});
        cross_entropy(loss, lse, whole_max, whole_sum, whole_at, factor);
        EXPECT(std::abs(read(loss)[0] / expected - 1) <= kForward);
    }
}

TEST_CASE("sums of two parts of the vocabulary on the scale of the whole row's maximum") {
    const int64_t R = 5, V = 11, cut = 4;
    const Tensor targets = upload({0, 10, 3, 4, 7}, {R}, Device::cpu);
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        INFO("rescale_sums " << name_of(dtype) << ", R " << R << " V " << V);
        const Doubles logits = values(tensor(randoms(R * V, 1, dtype), {R, V}, dtype));
        Tensor max[2], sum[2], whole_max = empty({R}, dtype), at = empty({R}, dtype);
        for (int i = 0; i < 2; ++i) {
            const int64_t begin = i ? cut : 0, end = i ? V : cut;
            Doubles part;
            for (int64_t r = 0; r < R; ++r)
                part.insert(part.end(), &logits[r * V + begin], &logits[r * V + begin] + (end - begin));
            max[i] = empty({R}, dtype), sum[i] = empty({R}, dtype);
            softmax_stats(max[i], sum[i], at, tensor(part, {R, end - begin}, dtype), targets, begin);
        }
        Doubles most, expected;
        for (int64_t r = 0; r < R; ++r) {
            most.push_back(*std::max_element(&logits[r * V], &logits[r * V] + V));
            double total = 0;
            for (int64_t v = 0; v < V; ++v) total += std::exp(logits[r * V + v] - most.back());
            expected.push_back(total);
        }
        copy(whole_max, tensor(most, {R}, dtype));
        for (int i = 0; i < 2; ++i) rescale_sums(sum[i], max[i], whole_max);
        add(sum[0], sum[0], sum[1]);
        EXPECT(distance(sum[0], expected) <= forward);
    }
}

TEST_CASE("ignored targets add no loss and no gradient, and the other rows are those of a batch without them") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        const int64_t R = 6, V = 11, cut = 4;
        INFO("cross_entropy with ignored targets " << name_of(dtype) << ", R " << R << " V " << V);
        const double factor = 1.0 / 4;
        Doubles logits = randoms(R * V, 1, dtype);
        for (double& v : logits) v *= 20;
        const std::vector<int32_t> ids = {kIgnored, 10, 3, kIgnored, 7, 0};
        const Doubles expected = differentiate(
            [&](const Doubles& v) { return cross_entropy_double(v, ids, V, factor); }, logits);  // 0 in ignored rows
        Doubles kept;
        std::vector<int32_t> kept_ids;
        for (int64_t r = 0; r < R; ++r)
            if (ids[r] != kIgnored) {
                kept.insert(kept.end(), &logits[r * V], &logits[r * V] + V);
                kept_ids.push_back(ids[r]);
            }
        struct Run {
            Doubles loss, gradient;
        };
        // In one piece, or in two parts of the vocabulary that are joined as ranks join theirs.
        const auto run = [&](const Doubles& x, const std::vector<int32_t>& of, bool split) {
            const int64_t rows = int64_t(of.size());
            const Tensor targets = upload(of, {rows}, Device::cpu);
            Tensor max = tensor(Doubles(rows, -INFINITY), {rows}, stats_dtype(dtype));
            Tensor sum = zeros({rows}, stats_dtype(dtype)), at = zeros({rows}, stats_dtype(dtype));
            Tensor lse = empty({rows}, stats_dtype(dtype)), loss = empty({1}, stats_dtype(dtype));
            struct Part {
                int64_t begin, end;
                Tensor x, max, sum;
            };
            std::vector<Part> parts;
            for (auto [begin, end] : split ? std::vector<std::array<int64_t, 2>>{{0, cut}, {cut, V}}
                                           : std::vector<std::array<int64_t, 2>>{{0, V}}) {
                Doubles columns;
                for (int64_t r = 0; r < rows; ++r) columns.insert(columns.end(), &x[r * V + begin], &x[r * V] + end);
                parts.push_back(
                    {begin, end, tensor(columns, {rows, end - begin}, dtype), Tensor::like(max), Tensor::like(sum)});
                Tensor part_at = Tensor::like(at);
                softmax_stats(parts.back().max, parts.back().sum, part_at, parts.back().x, targets, begin);
                add(at, at, part_at);
                Doubles highest = read(max), other = read(parts.back().max);
                for (int64_t r = 0; r < rows; ++r) highest[r] = std::max(highest[r], other[r]);
                copy(max, tensor(highest, {rows}, max.dtype()));
            }
            for (Part& part : parts) {
                if (split) rescale_sums(part.sum, part.max, max);
                add(sum, sum, part.sum);
            }
            cross_entropy(loss, lse, max, sum, at, factor);
            Run result{read(loss), Doubles(rows * V)};
            for (Part& part : parts) {
                cross_entropy_backward(part.x, targets, lse, factor, part.begin);
                const Doubles got = values(part.x);
                const int64_t width = part.end - part.begin;
                for (int64_t i = 0; i < rows * width; ++i)
                    result.gradient[i / width * V + part.begin + i % width] = got[i];
            }
            return result;
        };
        for (const bool split : {false, true}) {
            INFO("in " << (split ? "two parts" : "one"));
            const Run all = run(logits, ids, split), without = run(kept, kept_ids, split);
            EXPECT(std::abs(all.loss[0] / cross_entropy_double(logits, ids, V, factor) - 1) <= forward);
            EXPECT(distance(tensor(all.gradient, {R, V}, DType::f64), expected) <= gradient);
            EXPECT(all.loss == without.loss);
            Doubles rest;
            for (int64_t r = 0; r < R; ++r)
                for (int64_t v = 0; v < V; ++v) {
                    if (ids[r] != kIgnored) rest.push_back(all.gradient[r * V + v]);
                    if (ids[r] == kIgnored) EXPECT(all.gradient[r * V + v] == 0);
                }
            EXPECT(rest == without.gradient);

            Doubles poisoned = logits;  // what an ignored row holds reaches nothing
            for (int64_t v = 0; v < V; ++v) poisoned[v] = v % 2 ? NAN : INFINITY;
            const Run same = run(poisoned, ids, split);
            EXPECT(same.loss == all.loss);
            EXPECT(same.gradient == all.gradient);
        }
        const Run nothing = run(logits, std::vector<int32_t>(size_t(R), kIgnored), false);
        EXPECT(nothing.loss[0] == 0);
        EXPECT(nothing.gradient == Doubles(R * V));
    }
}

TEST_CASE("z-loss and multiplier of the logits: both losses and their common gradient, whole and in two parts") {
    for (const auto& [dtype, forward, gradient] : kAccuracies)
        for (const Extra& extra : {Extra{.z_loss = 1e-2}, Extra{.logit_scale = 0.25}, Extra{1.5, 0.125}, Extra{3, 2}}) {
            const int64_t R = 6, V = 11, cut = 4;
            INFO("cross_entropy with z_loss " << extra.z_loss << " and logit_scale " << extra.logit_scale << " "
                                              << name_of(dtype) << ", R " << R << " V " << V);
            const double factor = 1.0 / 5;
            Doubles logits = randoms(R * V, 1, dtype);
            for (double& v : logits) v *= 8;
            const std::vector<int32_t> ids = {0, 10, kIgnored, 3, 4, 7};
            const Tensor targets = upload(ids, {R}, Device::cpu);
            Tensor x = tensor(logits, {R, V}, dtype), max = empty({R}, dtype), sum = empty({R}, dtype),
                   at = empty({R}, dtype), lse = empty({R}, dtype);
            Tensor loss = empty({extra.z_loss > 0 ? 2 : 1}, dtype);
            softmax_stats(max, sum, at, x, targets, 0, V, extra.logit_scale);
            cross_entropy(loss, lse, max, sum, at, factor, extra.z_loss);
            const auto expected = losses_double(logits, ids, V, factor, extra);
            const Doubles got = read(loss);
            for (size_t i = 0; i < got.size(); ++i) EXPECT(std::abs(got[i] / expected[i] - 1) <= forward);
            cross_entropy_backward(x, targets, lse, factor, 0, V, extra.logit_scale, extra.z_loss);
            const auto total = [&](const Doubles& v) {
                const auto both = losses_double(v, ids, V, factor, extra);
                return both[0] + both[1];
            };
            EXPECT(distance(x, differentiate(total, logits)) <= gradient);
            const Doubles whole = values(x);
            for (int64_t v = 0; v < V; ++v) EXPECT(whole[2 * V + v] == 0);  // the ignored row

            for (auto [begin, end] : {std::array<int64_t, 2>{0, cut}, {cut, V}}) {
                INFO("columns " << begin << " to " << end);
                Doubles part;
                for (int64_t r = 0; r < R; ++r) part.insert(part.end(), &logits[r * V + begin], &logits[r * V] + end);
                Tensor y = tensor(part, {R, end - begin}, dtype);
                softmax_stats(max, sum, at, y, targets, begin, V, extra.logit_scale);
                for (int64_t r = 0; r < R; ++r) {
                    const bool here = ids[r] >= begin && ids[r] < end;
                    const double stored = here ? values(y)[r * (end - begin) + ids[r] - begin] : 0;
                    EXPECT(std::abs(values(at)[r] - extra.logit_scale * stored) <= forward);
                }
                cross_entropy_backward(y, targets, lse, factor, begin, V, extra.logit_scale, extra.z_loss);
                const Doubles columns = values(y);
                for (int64_t r = 0; r < R; ++r)
                    for (int64_t c = begin; c < end; ++c)
                        EXPECT(columns[r * (end - begin) + c - begin] == whole[r * V + c]);
            }
        }
}

TEST_CASE("only -1 is ignored: another target outside the vocabulary counts its row's lse") {
    const int64_t V = 3;
    for (const int32_t id : {-2, 3, INT32_MAX, INT32_MIN}) {
        INFO("target " << id);
        Tensor x = tensor({1, 2, 3}, {1, V}, DType::f64), max = empty({1}, DType::f64), sum = empty({1}, DType::f64);
        Tensor at = empty({1}, DType::f64), lse = empty({1}, DType::f64), loss = empty({1}, DType::f64);
        const Tensor targets = upload(std::vector<int32_t>{id}, {1}, Device::cpu);
        softmax_stats(max, sum, at, x, targets);
        cross_entropy(loss, lse, max, sum, at, 1);
        const double whole = std::log(std::exp(1) + std::exp(2) + std::exp(3));
        EXPECT(std::abs(read(loss)[0] - whole) <= 1e-12);
        cross_entropy_backward(x, targets, lse, 1);
        for (int64_t v = 0; v < V; ++v) EXPECT(std::abs(values(x)[v] - std::exp(double(v + 1) - whole)) <= 1e-12);
    }
}

TEST_CASE("NaN and infinity in the logits reach the loss") {
    for (double poison : {double(NAN), double(INFINITY)}) {
        INFO("logit " << poison);
        Tensor x = tensor({0, poison, 0, 0, 0, 0}, {2, 3}), max = empty({2}), sum = empty({2}), at = empty({2});
        Tensor lse = empty({2}), loss = empty({1});
        softmax_stats(max, sum, at, x, upload({0, 1}, {2}, Device::cpu));
        cross_entropy(loss, lse, max, sum, at, 1);
        EXPECT(!std::isfinite(read(loss)[0]));
    }
}

TEST_CASE("cross-entropy: dtypes that do not fit are refused") {
    Tensor stats = zeros({2}), wide = zeros({2, 2}, DType::f64);
    const Tensor targets = upload({0, 1}, {2}, Device::cpu);
    EXPECT_CHECK_FAILS(softmax_stats(stats, stats, stats, wide, targets));  // what is kept beside fp64 is fp64
}
