// A layer of experts against its definition in double, token by token: its output, its losses, and the gradient of
// everything by finite differences. Then what must not change anything: micro-batches, recomputation.
#include "01_single_gpu/complete/experts/expert_balance.h"
#include "tests/ops.h"
#include "tests/shards.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;
using Doubles = std::vector<double>;

namespace {

constexpr int64_t B = 2, T = 6, E = 4, F = 3;  // of the layer; R = B T rows

struct Layer {
    ExpertsConfig config;
    Balance balance;
    Doubles bias, fractions;  // empty: 0; this sequence's own
};

struct Value {
    Doubles y, losses;
    Doubles slots, dropped;
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The n best of these, of equal ones the lower index.
std::vector<int64_t> best(const Doubles& x, int64_t n) {
    std::vector<int64_t> list;
    while (int64_t(list.size()) < n) {
        int64_t most = -1;
        for (int64_t i = 0; i < int64_t(x.size()); ++i)
            if (std::find(list.begin(), list.end(), i) == list.end() && (most < 0 || x[i] > x[most])) most = i;
        list.push_back(most);
    }
    return list;
}

// v: x (R, E), router (N, E), gate_up (N, 2 F, E), down (N, E, F).
Value define(const Layer& layer, const Doubles& v) {
    const ExpertsConfig& c = layer.config;
    const int64_t N = c.count, k = c.top_k, R = B * T;
    const double *x = v.data(), *router = x + R * E, *gate_up = router + N * E, *down = gate_up + N * 2 * F * E;
    Value result{Doubles(R * E), Doubles(2), Doubles(N), Doubles(N)};
    const double scale = 1.0 / double(4 * B);  // of four such micro-batches
    const double capacity = c.capacity_factor > 0 ? std::ceil(c.capacity_factor * double(T * k) / double(N)) : 1e9;
    for (int64_t s = 0; s < B; ++s) {
        Doubles in_sequence(N), taken(N), mean(N);
        for (int64_t t = 0; t < T; ++t) {
            const int64_t r = s * T + t;
            Doubles logits(N), p(N), q(N), ranked(N);
            double sum_exp = 0, sum_p = 0;
            for (int64_t e = 0; e < N; ++e) {
                for (int64_t i = 0; i < E; ++i) logits[e] += router[e * E + i] * x[r * E + i];
                sum_exp += std::exp(logits[e]);
            }
            for (int64_t e = 0; e < N; ++e) {
                p[e] = c.sigmoid ? sigmoid(logits[e]) : std::exp(logits[e]) / sum_exp;
                sum_p += p[e];
                ranked[e] = p[e] + (layer.bias.empty() ? 0 : layer.bias[e]);
            }
            for (int64_t e = 0; e < N; ++e) mean[e] += p[e] / sum_p / double(T);
            result.losses[1] += layer.balance.z_loss * scale / double(T) * std::pow(std::log(sum_exp), 2);
            if (c.groups > 1) {  // two of its best experts speak for a group
                const int64_t n = N / c.groups;
                Doubles of_group(c.groups);
                for (int64_t g = 0; g < c.groups; ++g) {
                    const Doubles mine(ranked.begin() + g * n, ranked.begin() + (g + 1) * n);
                    for (const int64_t e : best(mine, std::min<int64_t>(2, n))) of_group[g] += mine[e];
                }
                const std::vector<int64_t> kept = best(of_group, c.top_groups);
                for (int64_t e = 0; e < N; ++e)
                    if (std::find(kept.begin(), kept.end(), e / n) == kept.end()) ranked[e] = -1e9;
            }
            const std::vector<int64_t> chosen = best(ranked, k);
            double sum = 0;
            for (const int64_t e : chosen) sum += p[e];
            for (const int64_t e : chosen) {
                ++in_sequence[e];
                ++result.slots[e];
                if (taken[e] >= capacity) {
                    ++result.dropped[e];
                    continue;
                }
                ++taken[e];
                const double w = c.scale * p[e] / (c.normalize ? sum : 1);
                for (int64_t f = 0; f < F; ++f) {
                    double gate = 0, up = 0;
                    for (int64_t i = 0; i < E; ++i) {
                        gate += gate_up[(e * 2 * F + f) * E + i] * x[r * E + i];
                        up += gate_up[(e * 2 * F + F + f) * E + i] * x[r * E + i];
                    }
                    const double h = gate * sigmoid(gate) * up;
                    for (int64_t i = 0; i < E; ++i) result.y[r * E + i] += w * h * down[(e * E + i) * F + f];
                }
            }
        }
        for (int64_t e = 0; e < N; ++e) {
            const double f = layer.fractions.empty() ? double(N) / double(k * T) * in_sequence[e] : layer.fractions[e];
            result.losses[0] += layer.balance.aux_loss * scale * f * mean[e];
        }
    }
    return result;
}

const std::vector<Layer>& layers() {
    static const std::vector<Layer> list = {
        {{.count = 4, .top_k = 2, .ffn = F}, {.aux_loss = 0.3}, {}, {}},
        {{.count = 4, .top_k = 2, .ffn = F, .normalize = false, .scale = 2.5}, {.aux_loss = 0, .z_loss = 0.2}, {}, {}},
        {{.count = 6, .top_k = 2, .ffn = F, .sigmoid = true, .scale = 1.5, .groups = 3, .top_groups = 2},
         {.aux_loss = 0.3, .bias_rate = 0.125},
         {0.125, -0.125, 0.25, 0, 0, -0.25},
         {}},
        {{.count = 4, .top_k = 2, .ffn = F, .sigmoid = true, .normalize = false, .capacity_factor = 0.75},
         {.aux_loss = 0.3, .z_loss = 0.1},
         {},
         {}},
        {{.count = 5, .top_k = 1, .ffn = F, .capacity_factor = 1},
         {.aux_loss = 0.4, .of_batch = true},
         {},
         {0.5, 0.25, 2.25, 1, 1}},
        {{.count = 3, .top_k = 3, .ffn = F}, {.aux_loss = 0.1}, {}, {}},
    };
    return list;
}

// The layer's parameters, and one pass forward and backward through it.
struct Computed {
    Value value;
    Doubles gradient;  // of x, router, gate_up, down

    Computed(const Layer& layer, DType dtype, const Doubles& v, const Doubles& dy, bool recomputed) {
        LlamaConfig config;
        config.hidden = E;
        config.experts = layer.config;
        config.experts.balance = layer.balance;
        Experts experts(config, 0, 0.02, 0.02);
        const std::vector<Param*> params = {&experts.router, &experts.expert_gate_up, &experts.expert_down};
        const int64_t R = B * T, first = R * E;
        bind_data(params, tensor({v.begin() + first, v.end()}, {int64_t(v.size()) - first}, dtype));
        Tensor grads = zeros({int64_t(v.size()) - first}, dtype);
        bind_grads(params, grads);
        experts.set_bias({layer.bias.begin(), layer.bias.end()});
        experts.set_fractions({layer.fractions.begin(), layer.fractions.end()});
        experts.losses = zeros({2}, DType::f64);
        Batch batch{.sequences = B, .seq_len = T};
        batch.whole_len = T;
        batch.sequence_scale = 1.0 / double(4 * B);
        Tape tape;
        const Var x{.data = tensor({v.begin(), v.begin() + first}, {R, E}, dtype)};
        const TensorParallelOps one_rank;
        const auto body = [&, routing = experts.new_choice()](Tape& t, const Var& in) {
            return experts(t, in, batch, one_rank, routing);
        };
        const Var y = recomputed ? recompute(tape, x, body) : body(tape, x);
        *y.grad = tensor(dy, {R, E}, dtype);
        tape.backward();
        value = {values(y.data), values(experts.losses), experts.loads.slots, experts.loads.dropped};
        gradient = values(*x.grad);
        const Doubles of_params = values(grads);
        gradient.insert(gradient.end(), of_params.begin(), of_params.end());
    }
};

}  // namespace

TEST_CASE("experts: output, losses and gradients of every router, with capacity and biases, against a loop in double") {
    int64_t dropped = 0;
    for (size_t i = 0; i < layers().size(); ++i) {
        const Layer& layer = layers()[i];
        const int64_t N = layer.config.count, R = B * T;
        for (const auto& [dtype, forward, gradient] : kAccuracies) {
            INFO("layer " << i << ", " << name_of(dtype));
            const Doubles v = randoms(R * E + N * E + N * 3 * F * E, 10 + i, dtype), dy = randoms(R * E, 5, dtype);
            const Value expected = define(layer, v);
            for (const bool recomputed : {false, true}) {
                const Computed computed(layer, dtype, v, dy, recomputed);
                EXPECT(distance(computed.value.y, expected.y) <= forward);
                EXPECT(distance(computed.value.losses, expected.losses) <= forward);
                EXPECT(computed.value.slots == expected.slots);
                EXPECT(computed.value.dropped == expected.dropped);
                if (recomputed && !(dtype == DType::f64)) continue;
                const Doubles numeric = differentiate(
                    [&](const Doubles& at) {
                        const Value value = define(layer, at);
                        return dot(value.y, dy) + value.losses[0] + value.losses[1];
                    },
                    v);
                EXPECT(distance(computed.gradient, numeric) <= gradient);
                // The router's by itself: it is small beside the others.
                const auto router = [&](const Doubles& all) {
                    return Doubles(all.begin() + R * E, all.begin() + R * E + N * E);
                };
                EXPECT(distance(router(computed.gradient), router(numeric)) <= 2 * gradient);
            }
            for (const double each : expected.dropped) dropped += int64_t(each);
        }
    }
    EXPECT(dropped > 0);
}

TEST_CASE("biases of the choice follow the sign of the load's error") {
    std::vector<float> bias = {0, 0.5f, 0, 1};
    update_bias(bias, {1, 7, 4, 4}, 0.25);
    EXPECT(bias == std::vector<float>{0.25f, 0.25f, 0, 1});
}

TEST_CASE("a step whose targets are all ignored moves neither the router's biases nor the fractions") {
    const Folder folder;
    const Text text;
    TrainOptions o = tiny(text);
    o.model.experts = {.count = 4, .top_k = 2, .ffn = 20, .sigmoid = true};
    o.model.experts.balance = {.of_batch = true, .bias_rate = 0.125};
    o.data = folder / "a.bin";
    o.steps = 1;
    for (const uint8_t counts : {0, 1}) {
        write_shard(o.data, random_tokens(1000, 1), std::vector<uint8_t>(1000, counts));
        Session session(o);
        StepState& state = *session.trainer.step_states.at(0);
        const std::vector<float> before = state.rows().values;
        session.run();
        EXPECT((state.rows().values == before) == (counts == 0));
    }
}

TEST_CASE("experts: micro-batches, recomputation and stored routing change nothing") {
    const Text text;
    TrainOptions o = odd(text, 8);
    o.dtype = o.grad_dtype = "fp64";
    o.model.layers = 3;
    o.model.experts = {.count = 6, .top_k = 2, .ffn = 20, .shared = 1, .dense_layers = 1, .capacity_factor = 1.25};
    o.model.experts.balance = {.aux_loss = 0.05, .z_loss = 0.01, .bias_rate = 0.01};
    o.steps = 4;
    for (const bool of_batch : {false, true}) {
        o.model.experts.balance.of_batch = of_batch;
        o.micro_batch = 8;
        o.recompute = "none";
        Session one(o);
        one.run();
        for (const char* recompute : {"none", "pointwise", "selective", "full"})
            for (const int64_t micro : {8, 2, 1}) {
                INFO(std::string(recompute) << ", micro-batches of " << micro);
                o.recompute = recompute;
                o.micro_batch = micro;
                Session other(o);
                other.run();
                EXPECT(worst_deviation(other, one).value <= 1e-10);
                if (micro == 8) EXPECT(other.weights() == one.weights());
            }
    }
}
