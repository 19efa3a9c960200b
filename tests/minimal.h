#pragma once
// A minimal.cpp, which the test has included, against the complete program on one device: loss and norm of every step,
// and of the gradients of step 1 what this rank has.
#include "01_single_gpu/minimal.h"
#include "tests/training.h"

namespace train70b::test {

// Sizes that divide over 8 ranks of any kind but tp, which takes 4, and pp, which takes as many as there are layers.
inline minimal::Sizes small_sizes(Device device = Device::cpu, int64_t layers = 2) {
    minimal::Sizes s{.layers = layers, .E = 64, .H = 8, .K = 4, .F = 96, .V = 256, .T = 64, .batch = 8};
    s.dtype = device == Device::cpu ? DType::f64 : DType::f32;
    s.device = device;
    if (device != Device::cpu) s.layers = s.batch = 2, s.T = 32;
    return s;
}

inline TrainOptions options_of(const minimal::Sizes& s, int64_t steps) {
    TrainOptions o;
    o.model = {.name = "test", .layers = s.layers, .hidden = s.E, .heads = s.H, .kv_heads = s.K, .ffn = s.F};
    o.data = repository_file("docs/data/corpus.txt");
    o.seq_len = s.T;
    o.global_batch = o.micro_batch = s.batch;
    o.steps = steps;
    o.dtype = s.dtype == DType::f64 ? "fp64" : "fp32";
    o.lr_schedule = "constant";  // after the warm-up of 20 steps
    o.device = name_of(s.device);
    return o;
}

// The complete program's run on this rank alone; on the CPU for an emulated GPU: chapter 01's tests hold the two equal.
inline std::unique_ptr<Session> complete(minimal::Sizes s, int64_t steps = 4) {
    if (kEmulated) s.device = Device::cpu;
    auto session = std::make_unique<Session>(options_of(s, steps));
    session->run();
    return session;
}

// On an emulated GPU one of `count` variants on each commit.
inline bool has_turn(int64_t variant, int64_t count) {
    const char* slice = std::getenv("TRAIN70B_TEST_SLICE");
    return !kSmall || variant == (slice ? std::atoll(slice) : 0) % count;
}

// The whole gradient of a unit.
struct Whole {
    const minimal::Llama& model;
    std::pair<Tensor, int64_t> operator()(size_t unit) const { return {model.units[unit].grad, 0}; }
};

struct Comparison {
    Farthest worst;
    double elements = 0;  // of gradients that were compared
};
// Trains as `complete` did. part(unit): what this rank has of a unit's gradient, and where that begins in the unit.
template <class Training, class Part>
Comparison compare(Training& training, const Session& complete, const Part& part) {
    Comparison result;
    for (const StepReport& report : complete.reports) {
        const minimal::Result mine = training.step(report.step);
        result.worst.add(std::abs(mine.loss / report.loss - 1), fmt::format("step {}, loss", report.step));
        result.worst.add(std::abs(mine.norm / report.grad_norm - 1), fmt::format("step {}, norm", report.step));
        for (size_t unit = 0; report.step == 1 && unit < training.model.units.size(); ++unit) {
            const auto [grad, offset] = part(unit);
            const std::vector<double> numbers = read(grad);
            int64_t begin = -offset;  // of the parameter, in `numbers`
            for (const Param* p : training.model.units[unit].params) {
                const size_t named =
                    size_t(std::find(complete.names.begin(), complete.names.end(), p->name) - complete.names.begin());
                const int64_t width = p->is_matrix() ? p->global_shape[1] : 1;
                std::vector<double> a, b;
                for (int64_t i = 0; i < p->local.size(); ++i) {
                    if (begin + i < 0 || begin + i >= int64_t(numbers.size())) continue;
                    const int64_t row = p->local.row_begin + i / p->local.cols;
                    a.push_back(numbers[size_t(begin + i)]);
                    b.push_back(
                        complete.gradients.at(named)[size_t(row * width + p->local.col_begin + i % p->local.cols)]);
                }
                begin += p->local.size();
                result.elements += double(a.size());
                result.worst.add(distance(a, b), "step 1, gradient of " + p->name);
            }
        }
    }
    return result;
}

}  // namespace train70b::test
