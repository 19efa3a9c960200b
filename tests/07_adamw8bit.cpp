// AdamW with moments in 8 bits: levels, random rounding, blocks by coordinates, memory, and against AdamW. And on bf16
// weights and moments without fp32 copies.
#include <map>
#include <set>

#include "01_single_gpu/core/bf16.h"
#include "07_fp8/complete/adamw8bit.h"
#include "07_fp8/complete/adamw_bf16.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr MomentLevels kLevels = moment_levels();

struct Piece {
    Tensor param, grad;
    // A segment of a matrix of which this rank holds the rectangle that `at` describes.
    Segment segment(const GlobalIndex& at) const {
        auto whole = std::make_shared<Param>(make_param("weight", {1 << 20, at.global_cols}, 1));
        whole->local = {at.row_begin, 1 << 20, at.col_begin, at.cols};
        params.push_back(whole);
        return {whole.get(), at.offset, param, grad};
    }
    mutable std::vector<std::shared_ptr<Param>> params;  // what the segments refer to
};
Piece make_piece(const std::vector<double>& weights, const std::vector<double>& grads, DType dtype = DType::f32) {
    const int64_t n = int64_t(weights.size());
    return {tensor(weights, {n}, dtype), tensor(grads, {n})};
}
GlobalIndex whole() { return {}; }

// Of many magnitudes.
std::vector<double> gradients(int64_t n, uint64_t key) {
    std::vector<double> g = randoms(n, key), size = randoms(n, 77);
    for (int64_t i = 0; i < n; ++i) g[size_t(i)] *= 1e-3 * std::pow(10, size[size_t(i)]);
    return g;
}

}  // namespace

TEST_CASE("levels ascend, are symmetric, hold 0 and 1, and have 64 or 128 in the upper decade") {
    int upper = 0, upper_unsigned = 0;
    for (size_t i = 1; i < 255; ++i) {
        EXPECT(kLevels.first[i] > kLevels.first[i - 1]);
        EXPECT(kLevels.second[i] > kLevels.second[i - 1]);
        EXPECT(kLevels.first[254 - i] == -kLevels.first[i]);
        upper += kLevels.first[i] > 0.1f;
        upper_unsigned += kLevels.second[i] > 0.1f;
    }
    EXPECT(kLevels.first[127] == 0);
    EXPECT(kLevels.second[0] == 0);
    EXPECT(kLevels.first[254] == doctest::Approx(1).epsilon(1e-6));
    EXPECT(kLevels.second[254] == doctest::Approx(1).epsilon(1e-6));
    EXPECT(upper == 64);
    EXPECT(upper_unsigned == 128);
}

// Why rounding is random. Beside a maximum that persists, a second moment without gradients shrinks to beta2 of itself
// in a step; rounded to nearest it stays at levels that lie too far apart. Counted from the largest decade down.
TEST_CASE("to nearest, these second moments would never decay") {
    const auto stuck = [](double beta2) {
        std::array<int, 7> count{};
        int decade = 6, left = 128;
        for (int code = 254; code >= 1; --code, --left) {
            if (left == 0) left = 2 << --decade;
            const double value = beta2 * double(kLevels.second[size_t(code)]);
            const double here = double(kLevels.second[size_t(code)]) - value;
            const double below = value - double(kLevels.second[size_t(code) - 1]);
            count[size_t(6 - decade)] += here < below || code == 1;  // above 0 it never becomes 0
        }
        return count;
    };
    EXPECT(stuck(0.95) == std::array{0, 2, 6, 8, 8, 4, 2});
    EXPECT(stuck(0.999) == std::array{128, 64, 32, 16, 8, 4, 2});
}

TEST_CASE("a code is one of the two around the value, and right in the mean") {
    for (const double x : randoms(200, 3)) {
        double sum = 0;
        std::set<int> codes;
        constexpr int kDraws = 4096;
        for (int i = 0; i < kDraws; ++i) {
            const uint8_t code = random_code(kLevels.first.data(), float(x), (float(i) + 0.5f) / kDraws);
            codes.insert(code);
            sum += double(kLevels.first[code]);
        }
        REQUIRE(codes.size() <= 2);
        EXPECT((codes.size() == 1 || *codes.rbegin() == *codes.begin() + 1));
        EXPECT(double(kLevels.first[size_t(*codes.begin())]) <= x);
        EXPECT(double(kLevels.first[size_t(*codes.rbegin())]) >= x);
        EXPECT(std::abs(sum / kDraws - x) <= 1e-5);
    }
    for (size_t i = 0; i < 255; ++i) {  // what is a level stays it
        EXPECT(random_code(kLevels.first.data(), kLevels.first[i], 0) == i);
        EXPECT(random_code(kLevels.first.data(), kLevels.first[i], 0.999f) == i);
    }
}

TEST_CASE("blocks: every element of a piece in one, together with those of its 256 of the whole parameter") {
    for (const GlobalIndex& place :
         {GlobalIndex{.cols = 1, .global_cols = 1},
          {.cols = 1, .global_cols = 1, .offset = 300},
          {.cols = 96, .global_cols = 96},
          {.row_begin = 5, .cols = 96, .global_cols = 96, .offset = 37},
          {.col_begin = 48, .cols = 48, .global_cols = 96},
          {.row_begin = 3, .col_begin = 700, .cols = 350, .global_cols = 1400, .offset = 200},
          {.col_begin = 1, .cols = 1, .global_cols = 3, .offset = 2}})
        for (const int64_t size : {1, 2, 255, 256, 257, 1000}) {
            const BlockLayout blocks{place, size};
            std::vector<int> seen(size_t(size), 0);
            int64_t wrong = 0;
            for (int64_t b = 0; b < blocks.blocks(); ++b) {
                const auto [begin, end, global] = blocks.block(b);
                REQUIRE((0 <= begin && begin <= end && end <= size && end - begin <= kMomentBlock));
                for (int64_t i = begin; i < end; ++i) {
                    ++seen[size_t(i)];
                    const int64_t r = (place.offset + i) / place.cols, c = (place.offset + i) % place.cols;
                    const int64_t index = (place.row_begin + r) * place.global_cols + place.col_begin + c;
                    wrong += index != global + i - begin;
                    wrong += index / kMomentBlock != global / kMomentBlock;
                }
            }
            INFO("place ", place.row_begin, " ", place.col_begin, " ", place.cols, " ", place.global_cols, " ",
                 place.offset, ", size ", size);
            EXPECT(wrong == 0);
            EXPECT(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
        }
    EXPECT(BlockLayout{{}, 0}.blocks() == 0);
}

TEST_CASE("a few steps: near AdamW, in 2.03 bytes per parameter instead of 8") {
    const int64_t n = 40000;
    for (const DType dtype : {DType::f32, DType::bf16}) {
        const std::vector<double> weights = randoms(n, 1);
        Piece a = make_piece(weights, gradients(n, 2), dtype), b = make_piece(weights, gradients(n, 2), dtype);
        const int64_t before = ledger().now()[size_t(Memory::optimizer)];
        AdamW wide({a.segment(whole())}, {});
        const int64_t after = ledger().now()[size_t(Memory::optimizer)];
        AdamW8bit narrow({b.segment(whole())}, {});
        const int64_t master = dtype == DType::f32 ? 0 : 4 * n;
        EXPECT(after - before == 8 * n + master);
        EXPECT(ledger().now()[size_t(Memory::optimizer)] - after == 2 * n + 8 * ((n + 255) / 256) + master);
        for (int step = 0; step < 20; ++step) {
            const std::vector<double> g = gradients(n, 100 + uint64_t(step) % 5);
            for (Piece* piece : {&a, &b}) {
                Tensor fresh = tensor(g, {n});
                copy(piece->grad, fresh);
            }
            wide.update(step + 1, 1e-2f, 1);
            narrow.update(step + 1, 1e-2f, 1);
        }
        std::vector<double> moved = values(a.param), other = values(b.param);
        for (int64_t i = 0; i < n; ++i) moved[size_t(i)] -= weights[size_t(i)], other[size_t(i)] -= weights[size_t(i)];
        INFO(std::string(name_of(dtype)), ": ", distance(other, moved));
        EXPECT(distance(other, moved) <= 0.1);
        EXPECT(distance(other, moved) > 0);
    }
}

TEST_CASE("old gradients are forgotten at the right pace; rounding to nearest would keep them") {
    // One large gradient, then none: exp_avg_sq decays by beta2 a step, and with it the largest of its block, which is
    // stored exactly. So a second value beside it, much smaller, tells.
    const int64_t n = 256;
    std::vector<double> g(size_t(n), 0.0);
    for (int64_t i = 0; i < n; ++i) g[size_t(i)] = i == 0 ? 1 : 0.37 + 0.001 * double(i);
    Piece piece = make_piece(std::vector<double>(size_t(n), 0.0), g);
    Moments m{Tensor({n}, DType::u8, Device::cpu), Tensor({n}, DType::u8, Device::cpu), tensor({0, 0}, {2, 1})};
    fill(m.exp_avg, 0);
    fill(m.exp_avg_sq, 0);
    Tensor none;
    const BlockLayout blocks{whole(), n};
    const auto mean_second = [&] {
        double sum = 0;
        for (int64_t i = 1; i < n; ++i)
            sum += double(kLevels.second[m.exp_avg_sq.data<uint8_t>()[i]]) * double(m.scale.data<float>()[1]);
        return sum;
    };
    AdamWStep step{.lr = 0, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-8f, .weight_decay = 0, .grad_scale = 1, .step = 1};
    adamw8bit(piece.param, none, m, piece.grad, blocks, step, 1);
    const double begin = mean_second();
    // The first stays at its largest with a gradient of its own size, the others get nothing.
    fill(piece.grad, 0);
    piece.grad.data<float>()[0] = 1;
    for (int64_t s = 2; s <= 101; ++s) {
        step.step = s;
        adamw8bit(piece.param, none, m, piece.grad, blocks, step, uint64_t(s));
    }
    const double expected = std::pow(0.99, 100);
    const double left = mean_second() / begin;
    INFO(left, " of ", expected);
    EXPECT(left == doctest::Approx(expected).epsilon(0.05));
}

TEST_CASE("a second moment above 0 never becomes 0, so that no update is divided by nothing") {
    const int64_t n = 256;
    std::vector<double> g(size_t(n), 1e-6);
    g[0] = 1;
    Piece piece = make_piece(std::vector<double>(size_t(n), 0.0), g);
    AdamW8bit optimizer({piece.segment(whole())}, {.weight_decay = 0});
    double most = 0;
    for (int step = 0; step < 50; ++step) {
        const std::vector<double> before = values(piece.param);
        optimizer.update(step + 1, 1e-3f, 1);
        const std::vector<double> after = values(piece.param);
        for (int64_t i = 0; i < n; ++i) most = std::max(most, std::abs(after[size_t(i)] - before[size_t(i)]));
    }
    INFO(most);
    EXPECT(most <= 2e-3);  // AdamW's own steps are about lr
}

TEST_CASE("pieces of a parameter, cut anywhere at blocks' ends: what the whole gives, bit for bit") {
    const int64_t rows = 12, cols = 512, n = rows * cols;
    const std::vector<double> weights = randoms(n, 5);
    Piece all = make_piece(weights, gradients(n, 6));
    AdamW8bit one({all.segment({.cols = cols, .global_cols = cols})}, {});
    // Rows 4..7 of all columns, from the 256th element of them on; columns 256..511 of all rows.
    Piece stretch = make_piece({weights.begin() + 4 * cols + 256, weights.begin() + 8 * cols},
                               std::vector<double>(size_t(4 * cols - 256), 0.0));
    AdamW8bit two({stretch.segment({.row_begin = 4, .cols = cols, .global_cols = cols, .offset = 256})}, {});
    std::vector<double> right;
    for (int64_t r = 0; r < rows; ++r)
        right.insert(right.end(), weights.begin() + r * cols + 256, weights.begin() + (r + 1) * cols);
    Piece columns = make_piece(right, std::vector<double>(right.size(), 0.0));
    AdamW8bit three({columns.segment({.col_begin = 256, .cols = 256, .global_cols = cols})}, {});
    for (int step = 0; step < 5; ++step) {
        const std::vector<double> g = gradients(n, 50 + uint64_t(step));
        for (int64_t i = 0; i < n; ++i) all.grad.data<float>()[i] = float(g[size_t(i)]);
        for (int64_t i = 0; i < stretch.grad.size(); ++i)
            stretch.grad.data<float>()[i] = float(g[size_t(4 * cols + 256 + i)]);
        for (int64_t i = 0; i < columns.grad.size(); ++i)
            columns.grad.data<float>()[i] = float(g[size_t(i / 256 * cols + 256 + i % 256)]);
        for (AdamW8bit* each : {&one, &two, &three}) each->update(step + 1, 1e-2f, 0.5f);
    }
    int64_t wrong = 0;
    for (int64_t i = 0; i < stretch.param.size(); ++i)
        wrong += stretch.param.data<float>()[i] != all.param.data<float>()[4 * cols + 256 + i];
    for (int64_t i = 0; i < columns.param.size(); ++i)
        wrong += columns.param.data<float>()[i] != all.param.data<float>()[i / 256 * cols + 256 + i % 256];
    EXPECT(wrong == 0);
}

TEST_CASE("a parameter's lr_scale multiplies the update, not the weight decay") {
    const auto run = [](double lr_scale, double lr, double weight_decay, double gradient) {
        Param matrix = make_param("matrix", {5, 7}, 1);
        matrix.lr_scale = lr_scale;
        bind_data({&matrix}, tensor(randoms(35, 1), {35}));
        std::vector<double> grads = randoms(35, 2);
        for (double& g : grads) g *= gradient;
        bind_grads({&matrix}, tensor(grads, {35}));
        AdamW8bit adamw(full_segments({&matrix}), {.weight_decay = weight_decay});
        for (int step = 1; step <= 3; ++step) adamw.update(step, lr, 1);
        return values(matrix.data);
    };
    EXPECT(run(0.125, 0.5, 0, 1) == run(1, 0.0625, 0, 1));  // powers of two: not a bit is lost
    EXPECT(run(0.125, 0.5, 0.25, 0) == run(1, 0.5, 0.25, 0));
    EXPECT(distance(run(0.125, 0.5, 0.25, 1), run(1, 0.5, 0.25, 1)) > 0.01);
}

TEST_CASE("bf16 at random: one of the two neighbours, as often as the other is far; what is bf16 already stays") {
    for (const double x : randoms(300, 4)) {
        const uint32_t bits = std::bit_cast<uint32_t>(float(x * std::pow(10, 20 * x)));  // of both signs
        uint32_t up = 0, down = 0;
        for (uint32_t noise = 0; noise < 65536; ++noise) {
            const uint16_t rounded = rounded_up_or_down(std::bit_cast<float>(bits), noise);
            up += rounded == (bits >> 16) + 1;
            down += rounded == bits >> 16;
        }
        EXPECT((up == (bits & 0xffff) && up + down == 65536));
        EXPECT(rounded_up_or_down(float(bf16(float(x))), 65535) == bf16(float(x)).bits);
    }
    for (const uint64_t noise : {0, 65535}) {
        EXPECT(rounded_up_or_down(INFINITY, noise) == bf16(INFINITY).bits);
        EXPECT(rounded_up_or_down(-INFINITY, noise) == bf16(-INFINITY).bits);
        for (const uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xffc00000u})
            EXPECT(
                std::isnan(std::bit_cast<float>(uint32_t(rounded_up_or_down(std::bit_cast<float>(nan), noise)) << 16)));
    }
}

TEST_CASE("bf16 without fp32 copies: 4 bytes of states; small updates and a slow second moment are right in the mean") {
    const int64_t n = 40000;
    const std::vector<double> ones(n, 1.0), g(n, 1e-3);
    Piece piece{tensor(ones, {n}, DType::bf16), tensor(g, {n})};
    const int64_t before = ledger().now()[size_t(Memory::optimizer)];
    AdamWBf16 adamw({piece.segment(whole())}, {.beta2 = 0.999, .eps = 0, .weight_decay = 0});
    EXPECT(ledger().now()[size_t(Memory::optimizer)] - before == 4 * n);
    for (int step = 1; step <= 20; ++step) adamw.update(step, 1e-4, 1);  // 1/20 of half a unit in the last place of 1
    const auto mean = [](const Tensor& x) {
        double sum = 0;
        for (const double value : values(x)) sum += value;
        return sum / double(x.size());
    };
    EXPECT(std::abs((1 - mean(piece.param)) / 20e-4 - 1) <= 0.02);  // the constant gradient's step is the rate
    adamw.for_each_state([&](const Segment&, const std::string& name, Tensor& state) {
        if (name == "exp_avg_sq") EXPECT(std::abs(mean(state) / (1e-6 * (1 - std::pow(0.999, 20))) - 1) <= 1e-3);
    });
}

TEST_CASE("bf16 without fp32 copies: any pieces of a matrix have the whole's bits") {
    constexpr int64_t kRows = 12, kCols = 20;
    const std::vector<double> w = randoms(kRows * kCols, 1), g = gradients(kRows * kCols, 2);
    const auto run = [&](const GlobalIndex& at, int64_t size) {
        std::vector<double> weights, grads;
        std::vector<size_t> places;
        for (int64_t i = 0; i < size; ++i) places.push_back(size_t(at.of(i)));
        for (const size_t place : places) weights.push_back(w[place]), grads.push_back(g[place]);
        const Piece piece = make_piece(weights, grads, DType::bf16);
        AdamWBf16 adamw({piece.segment(at)}, {});
        for (int step = 1; step <= 4; ++step) adamw.update(step, 1e-2, 1);
        std::map<size_t, double> result;
        for (int64_t i = 0; i < size; ++i) result[places[size_t(i)]] = values(piece.param)[size_t(i)];
        return result;
    };
    const GlobalIndex all{.cols = kCols, .global_cols = kCols};
    const std::map<size_t, double> expected = run(all, kRows * kCols);
    for (const GlobalIndex& at : {GlobalIndex{.row_begin = 3, .cols = kCols, .global_cols = kCols, .offset = 7},
                                  {.row_begin = 2, .col_begin = 5, .cols = 4, .global_cols = kCols, .offset = 1}})
        for (const auto& [place, value] : run(at, 17)) EXPECT(expected.at(place) == value);
}
