// Grades the lab accumulate. fp64: sums in another order differ by less than any mistake.
#include "01_single_gpu/complete/roles.h"
#include "tests/labs.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int64_t kSequences = 12, kLength = 24;  // 1, 3 or 4 micro-batches

LlamaConfig config() {
    LlamaConfig c;
    c.layers = 3, c.hidden = 32, c.heads = 4, c.kv_heads = 2, c.ffn = 64, c.vocab = 48;
    return c;
}

// The first half of the sequences have few targets if `masked`, the others all.
bool is_target(int64_t sequence, int64_t t, bool masked) { return !masked || sequence >= kSequences / 2 || t < 2; }

int64_t targets(bool masked) {
    int64_t count = 0;
    for (int64_t s = 0; s < kSequences; ++s)
        for (int64_t t = 0; t < kLength; ++t) count += is_target(s, t, masked);
    return count;
}

// Sequences [begin, end) of the step; `all`: targets of the global batch.
Batch sequences(int64_t begin, int64_t end, bool masked, int64_t all) {
    std::vector<int32_t> tokens, wanted, positions;
    for (int64_t s = begin; s < end; ++s)
        for (int64_t t = 0; t < kLength; ++t) {
            const auto token = [&](int64_t at) {
                return int32_t(random_bits(7, uint64_t(s * (kLength + 1) + at)) % 48);
            };
            tokens.push_back(token(t));
            wanted.push_back(is_target(s, t, masked) ? token(t + 1) : kIgnored);
            positions.push_back(int32_t(t));
        }
    const auto up = [&](const std::vector<int32_t>& v) { return upload(v, {int64_t(v.size())}, Device::cpu); };
    return {end - begin, kLength, up(tokens), up(wanted), up(positions), 1.0 / double(all)};
}

struct Run {
    Llama model{config(), {.dtype = DType::f64, .grad_dtype = DType::f64, .init_std = 0.1}};
    double loss = 0;

    Run() { model.materialize(1); }
    std::vector<double> gradients() {
        std::vector<double> list;
        for (const Param* param : model.params()) {
            const std::vector<double> part = values(param->grad);
            list.insert(list.end(), part.begin(), part.end());
        }
        return list;
    }
    double norm() {
        const std::vector<double> list = gradients();
        return std::sqrt(dot(list, list));
    }
};

// Sequences [begin, end) in one forward and backward pass.
std::unique_ptr<Run> one_pass(bool masked, int64_t all, int64_t begin = 0, int64_t end = kSequences) {
    auto run = std::make_unique<Run>();
    Tape tape;
    run->loss = read(run->model.forward(tape, sequences(begin, end, masked, all)).data)[0];
    tape.backward();
    return run;
}

std::unique_ptr<Run> in_micro_batches(int64_t count, bool masked, int64_t all) {
    auto run = std::make_unique<Run>();
    std::vector<int64_t> taken;
    const int64_t each = kSequences / count;
    const MicroBatches batches{count, [&](int64_t i) {
                                   taken.push_back(i);
                                   return sequences(i * each, (i + 1) * each, masked, all);
                               }};
    const Tensor loss = Accumulate(run->model).forward_backward(batches);
    REQUIRE(loss);
    run->loss = read(loss)[0];
    std::vector<int64_t> once;
    for (int64_t i = 0; i < count; ++i) once.push_back(i);
    EXPECT(taken == once);
    return run;
}

// The gradient norm that is left where all gradients are divided by m after each of m micro-batches.
double divided_each_time(int64_t m, int64_t all) {
    std::vector<double> sum;
    for (int64_t i = 0; i < m; ++i) {
        const std::vector<double> part =
            one_pass(false, all, i * kSequences / m, (i + 1) * kSequences / m)->gradients();
        sum.resize(part.size());
        for (size_t k = 0; k < part.size(); ++k) sum[k] = (sum[k] + part[k]) / double(m);
    }
    return std::sqrt(dot(sum, sum));
}

bool near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::abs(b); }

}  // namespace

TEST_CASE("lab: the loss of a step in micro-batches") {
    const int64_t all = targets(false);
    const double whole = one_pass(false, all)->loss;
    for (const int64_t m : {1, 3, 4}) {
        const double got = in_micro_batches(m, false, all)->loss;
        const double last = one_pass(false, all, kSequences - kSequences / m)->loss;
        figure(fmt::format("loss of a step in {} micro-batches", m), got, whole, "",
               "the loss of the step in one micro-batch",
               near(got, whole / double(m))
                   ? "The loss is divided by the number of micro-batches once more: it has been scaled."
               : near(got, last)              ? "This is the loss of the last micro-batch alone: add them."
               : near(got, whole * double(m)) ? "Each micro-batch's loss counts as if it were the whole batch's."
                                              : "",
               1e-9);
    }
}

TEST_CASE("lab: the gradients of a step in micro-batches") {
    const int64_t all = targets(false);
    const auto whole = one_pass(false, all);
    for (const int64_t m : {1, 3, 4}) {
        const auto run = in_micro_batches(m, false, all);
        const double got = run->norm(), last = one_pass(false, all, kSequences - kSequences / m)->norm();
        figure(fmt::format("gradient norm of {} micro-batches", m), got, whole->norm(), "", "that of one micro-batch",
               got == 0 ? "There are no gradients: is every tape's backward pass run?"
               : near(got, last)
                   ? "Only the last micro-batch's gradients are left: do not zero or replace them between two."
               : near(got, divided_each_time(m, all))
                   ? "The sum is divided again after each micro-batch: the first ones hardly count, and loss_scale has "
                     "divided already."
                   : "",
               1e-9);
        EXPECT(distance(run->gradients(), whole->gradients()) <= 1e-9);
    }
}

TEST_CASE("lab: the scale is that of the global batch") {
    // Many targets are ignored, and the other ranks have twice as many as this one. Of one micro-batch, which is right
    // in whatever way losses are added.
    const int64_t mine = targets(true), all = 3 * mine;
    const double sum = one_pass(true, 1)->loss, got = in_micro_batches(1, true, all)->loss;
    figure("loss of a rank of three, targets ignored", got, sum / double(all), "",
           "sum over targets / targets of all ranks",
           near(got, sum / double(mine)) || near(got, sum / double(kSequences * kLength))
               ? "This is a mean of each micro-batch's own targets or tokens: a micro-batch with few targets, or a "
                 "rank with few, then counts too much."
               : "",
           1e-9);
}

TEST_CASE("lab: activations of one micro-batch") {
    const int64_t m = 4, each = kSequences / m;
    const int64_t before = ledger().now()[int(Memory::activations)];
    ledger().reset_peak();
    in_micro_batches(m, false, targets(false));
    const int64_t peak = ledger().peak().kind[int(Memory::activations)] - before;
    const auto formula = [](int64_t sequences) {
        return activation_formula(config(), sequences, kLength, DType::f64, Recompute::none).total;
    };
    figure("peak activations of 4 micro-batches", peak, int64_t(formula(each)), "B", "activations of one micro-batch",
           double(peak) >= 0.8 * double(formula(each)) * double(m)
               ? "As much as all micro-batches together: run each backward pass before the next forward pass."
               : "",
           0.02);
}
