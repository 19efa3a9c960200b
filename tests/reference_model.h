#pragma once
// The models of chapter 01 once more, in double precision: weights by name, one token at a time.
#include <map>
#include <numeric>
#include <utility>

#include "01_single_gpu/complete/llama.h"
#include "01_single_gpu/complete/optimizer.h"
#include "01_single_gpu/core/profile.h"
#include "tests/support.h"

namespace train70b::test {

using Doubles = std::vector<double>;

constexpr LlamaConfig make_config() {
    LlamaConfig c;
    c.layers = 2, c.hidden = 16, c.heads = 4, c.kv_heads = 2, c.ffn = 24, c.vocab = 20;
    return c;
}

struct Tokens {
    int64_t sequences = 2, seq_len = 7;
    std::vector<int32_t> tokens, targets, positions, next_tokens, next_targets;
    Tokens() {
        for (int64_t i = 0; i < sequences * seq_len; ++i) {
            tokens.push_back(int32_t(random_bits(5, i) % 20));
            targets.push_back(int32_t(random_bits(6, i) % 20));
            positions.push_back(int32_t(i % seq_len));
            next_tokens.push_back(int32_t(random_bits(7, i) % 20));
            next_targets.push_back(i % seq_len == seq_len - 1 ? -1 : int32_t(random_bits(8, i) % 20));
        }
    }
    Batch batch(int64_t window = 0) const {
        const auto up = [](const std::vector<int32_t>& v) { return upload(v, {int64_t(v.size())}, Device::cpu); };
        Batch batch{sequences, seq_len, up(tokens), up(targets), up(positions), 1.0 / double(tokens.size())};
        std::vector<int32_t> starts;
        for (const int32_t t : positions) starts.push_back(t + 1 - int32_t(window));
        if (window > 0) batch.window_starts = DocumentStarts(starts, Device::cpu);
        batch.next_tokens = up(next_tokens), batch.next_targets = up(next_targets);
        return batch;
    }
};

// ---- the reference: weights by name, one token at a time ------------------------------------------------------------
using Weights = std::map<std::string, Doubles>;

inline Doubles times(const Doubles& w, const Doubles& x) {  // W x
    Doubles y(w.size() / x.size());
    for (size_t o = 0; o < y.size(); ++o) y[o] = std::inner_product(x.begin(), x.end(), &w[o * x.size()], 0.0);
    return y;
}

inline Doubles normed(const Doubles& x, const Doubles& weight, double eps) {
    const double scale = 1 / std::sqrt(dot(x, x) / double(x.size()) + eps);
    Doubles y(x);
    for (size_t i = 0; i < x.size(); ++i) y[i] *= scale * weight[i];
    return y;
}

inline Doubles heads_normed(const Doubles& heads, const Doubles& weight, double eps) {
    Doubles y;
    for (size_t h = 0; h < heads.size(); h += weight.size())
        for (double value : normed(Doubles(heads.begin() + h, heads.begin() + h + weight.size()), weight, eps))
            y.push_back(value);
    return y;
}

inline void rotate(Doubles& heads, int64_t D, double position, double theta) {
    for (int64_t i = 0; i < D / 2; ++i) {
        const double angle = position * std::pow(theta, -2.0 * i / D), cosine = std::cos(angle), sine = std::sin(angle);
        for (size_t h = 0; h < heads.size(); h += D) {
            const double a = heads[h + i], b = heads[h + i + D / 2];
            heads[h + i] = a * cosine - b * sine;
            heads[h + i + D / 2] = b * cosine + a * sine;
        }
    }
}

struct Heads {
    Doubles q, k, v;
};
// Of latent attention, for one token x; `at` finds a weight by its name.
template <class Find>
Heads latent_heads_of(const LlamaConfig& c, const Doubles& x, double position, const Find& at) {
    const int64_t D = c.head_dim(), N = c.value_dim(), P = D - N, C = c.latent.kv_rank;
    const auto turned = [&](const double* from) {  // the pairs (2i, 2i+1): all first ones, then all second ones
        Doubles halves;
        for (const int64_t odd : {0, 1})
            for (int64_t i = 0; i < P / 2; ++i) halves.push_back(from[2 * i + odd]);
        rotate(halves, P, position, c.rope_theta);
        return halves;
    };
    const Doubles from = c.latent.q_rank > 0 ? normed(times(at("q_a_proj"), x), at("q_a_layernorm"), 1e-6) : x;
    Heads heads{.q = times(at(c.latent.q_rank > 0 ? "q_b_proj" : "q_proj"), from), .k = {}, .v = {}};
    const Doubles low = times(at("kv_a_proj_with_mqa"), x), rope = turned(&low[C]);
    const Doubles kv =
        times(at("kv_b_proj"), normed(Doubles(low.begin(), low.begin() + C), at("kv_a_layernorm"), 1e-6));
    for (int64_t h = 0; h < c.heads; ++h) {
        std::ranges::copy(turned(&heads.q[h * D + N]), &heads.q[h * D + N]);
        heads.k.insert(heads.k.end(), &kv[h * 2 * N], &kv[h * 2 * N] + N);
        heads.k.insert(heads.k.end(), rope.begin(), rope.end());
        heads.v.insert(heads.v.end(), &kv[h * 2 * N] + N, &kv[h * 2 * N] + 2 * N);
    }
    return heads;
}

inline void add_to(Doubles& x, const Doubles& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

inline double reference_loss(const LlamaConfig& c, const Weights& w, const Tokens& data) {
    const int64_t D = c.head_dim(), V = c.value_dim();
    const bool latent = c.latent.kv_rank > 0;
    double loss = 0;
    for (int64_t s = 0; s < data.sequences; ++s) {
        const int64_t first = s * data.seq_len;
        std::vector<Doubles> x;
        for (int64_t t = 0; t < data.seq_len; ++t) {
            const double* row = &w.at("model.embed_tokens.weight")[data.tokens[first + t] * c.hidden];
            x.emplace_back(row, row + c.hidden);
        }
        const auto run_block = [&](int64_t layer, std::vector<Doubles>& x) {
            const auto find = [&](const char* name, const char* what = "weight", bool there = true) -> const Doubles& {
                static const Doubles none;
                return there ? w.at(fmt::format("model.layers.{}.{}.{}", layer, name, what)) : none;
            };
            const Doubles &input_norm = find("input_layernorm"), &mlp_norm = find("post_attention_layernorm"),
                          &q_proj = find("self_attn.q_proj", "weight", !latent),
                          &q_bias = find("self_attn.q_proj", "bias", c.qkv_bias),
                          &k_proj = find("self_attn.k_proj", "weight", !latent),
                          &k_bias = find("self_attn.k_proj", "bias", c.qkv_bias),
                          &v_proj = find("self_attn.v_proj", "weight", !latent),
                          &v_bias = find("self_attn.v_proj", "bias", c.qkv_bias),
                          &q_norm = find("self_attn.q_norm", "weight", c.qk_norm),
                          &k_norm = find("self_attn.k_norm", "weight", c.qk_norm), &o_proj = find("self_attn.o_proj"),
                          &sinks = find("self_attn", "sinks", c.sinks), &gate_proj = find("mlp.gate_proj"),
                          &up_proj = find("mlp.up_proj"), &down_proj = find("mlp.down_proj");
            std::vector<Doubles> keys, vals;
            for (int64_t t = 0; t < data.seq_len; ++t) {
                const Doubles n = normed(x[t], input_norm, c.norm_eps);
                const auto product = [&](const Doubles& weight, const Doubles& bias) {
                    Doubles y = times(weight, n);
                    if (c.qkv_bias) add_to(y, bias);
                    return y;
                };
                const double position = double(t) / (c.rope_scaling ? c.rope_scaling->factor : 1);  // linear
                Heads made;
                auto& [q, k, v] = made;
                if (latent) {
                    made = latent_heads_of(
                        c, n, position, [&](const std::string& name) { return find(("self_attn." + name).c_str()); });
                } else {
                    made = {product(q_proj, q_bias), product(k_proj, k_bias), product(v_proj, v_bias)};
                    if (c.qk_norm) {
                        q = heads_normed(q, q_norm, c.norm_eps);
                        k = heads_normed(k, k_norm, c.norm_eps);
                    }
                    rotate(q, D, position, c.rope_theta);
                    rotate(k, D, position, c.rope_theta);
                }
                keys.push_back(k);
                vals.push_back(v);
                Doubles mixed(c.out_width());
                for (int64_t h = 0; h < c.heads; ++h) {
                    const int64_t kv = h / (c.heads / c.kv_heads);
                    Doubles p(t + 1);
                    double sum = c.sinks ? std::exp(sinks[h]) : 0;
                    const int64_t first = c.has_window(layer) ? std::max<int64_t>(t - c.window + 1, 0) : 0;
                    for (int64_t j = first; j <= t; ++j) {
                        for (int64_t d = 0; d < D; ++d) p[j] += q[h * D + d] * keys[j][kv * D + d];
                        sum += p[j] = std::exp(p[j] / std::sqrt(double(D)));
                    }
                    for (int64_t j = first; j <= t; ++j)
                        for (int64_t d = 0; d < V; ++d) mixed[h * V + d] += p[j] / sum * vals[j][kv * V + d];
                }
                add_to(x[t], times(o_proj, mixed));
                const Doubles m = normed(x[t], mlp_norm, c.norm_eps);
                Doubles gate = times(gate_proj, m);
                const Doubles up = times(up_proj, m);
                for (int64_t f = 0; f < c.ffn; ++f) gate[f] *= up[f] / (1 + std::exp(-gate[f]));
                add_to(x[t], times(down_proj, gate));
            }
        };
        for (int64_t layer = 0; layer < c.layers; ++layer) run_block(layer, x);
        const Doubles& head = w.at(c.tied ? "model.embed_tokens.weight" : "lm_head.weight");
        const Doubles& last_norm = w.at("model.norm.weight");
        const auto loss_of = [&](const Doubles& h, int32_t target) {
            const Doubles logits = times(head, h);
            double sum = 0;
            for (double logit : logits) sum += std::exp(logit);
            return target < 0 ? 0 : std::log(sum) - logits[target];
        };
        for (Doubles& h : x) h = normed(h, last_norm, c.norm_eps);
        for (int64_t t = 0; t < data.seq_len; ++t) loss += loss_of(x[t], data.targets[first + t]);
        if (!c.multi_token) continue;
        const std::string prefix = fmt::format("model.layers.{}.", c.layers);
        std::vector<Doubles> u;
        for (int64_t t = 0; t < data.seq_len; ++t) {
            const double* row = &w.at("model.embed_tokens.weight")[data.next_tokens[first + t] * c.hidden];
            Doubles both = normed(Doubles(row, row + c.hidden), w.at(prefix + "enorm.weight"), c.norm_eps);
            for (const double h : normed(x[t], w.at(prefix + "hnorm.weight"), c.norm_eps)) both.push_back(h);
            u.push_back(times(w.at(prefix + "eh_proj.weight"), both));
        }
        run_block(c.layers, u);
        for (int64_t t = 0; t < data.seq_len; ++t)
            loss += 0.3 * loss_of(normed(u[t], w.at(prefix + "shared_head.norm.weight"), c.norm_eps),
                                  data.next_targets[first + t]);
    }
    return loss / double(data.tokens.size());
}

inline Weights weights_of(Llama& model) {
    Weights w;
    for (Param* param : model.params()) w[param->name] = values(param->data);
    return w;
}

// The elements of a parameter that are differentiated: all, or an eighth of a large one on each commit.
inline Doubles chosen(const Doubles& all, bool every_element) {
    Doubles some;
    for (size_t i = 0; i < all.size(); ++i)
        if (every_element || all.size() < 128 || in_slice(int64_t(i + i / 8))) some.push_back(all[i]);
    return some;
}

inline Weights reference_gradient(const LlamaConfig& c, Weights w, const Tokens& data, bool every_element) {
    Weights gradient;
    for (auto& [name, weight] : w) {
        std::vector<double*> elements;  // those that are chosen, in the same order
        Doubles places(weight.size());
        for (size_t i = 0; i < places.size(); ++i) places[i] = double(i);
        for (const double place : chosen(places, every_element)) elements.push_back(&weight[size_t(place)]);
        const Doubles before = chosen(weight, every_element);
        const auto write = [&elements](const Doubles& numbers) {
            for (size_t i = 0; i < elements.size(); ++i) *elements[i] = numbers[i];
        };
        gradient[name] = differentiate(
            [&](const Doubles& numbers) {
                write(numbers);
                return reference_loss(c, w, data);
            },
            before);
        write(before);
    }
    return gradient;
}

// The families of models: Llama's, and what others have besides.
struct Family {
    const char* name;
    LlamaConfig config;
};
inline std::vector<Family> families() {
    std::vector<Family> list = {{"llama", make_config()}};
    const auto add = [&](const char* name) -> LlamaConfig& {
        list.push_back({name, make_config()});
        return list.back().config;
    };
    add("tied embeddings").tied = true;
    add("biases of q, k, v").qkv_bias = true;
    LlamaConfig& normed = add("norms of q and k, heads wider than the hidden size");
    normed.qk_norm = true, normed.head_size = 6;
    LlamaConfig& narrow = add("narrow heads, linear RoPE scaling");
    narrow.heads = 2, narrow.kv_heads = 1, narrow.head_size = 4,
    narrow.rope_scaling = RopeScaling{.factor = 3, .linear = true};
    LlamaConfig& windowed = add("sliding windows in one of two layers, sinks");
    windowed.window = 3, windowed.windowed = {true, false}, windowed.sinks = true;
    LlamaConfig& latent = add("latent attention");
    latent.kv_heads = latent.heads, latent.latent = {.kv_rank = 12, .q_rank = 14, .rope_dim = 2};
    LlamaConfig& direct = add("latent attention, queries of x, wide heads, scaled RoPE, a window, sinks");
    direct.kv_heads = direct.heads, direct.head_size = 6, direct.latent = {.kv_rank = 12, .rope_dim = 4};
    direct.rope_scaling = RopeScaling{.factor = 3, .linear = true}, direct.window = 3, direct.sinks = true;
    LlamaConfig& further = add("multi-token prediction, latent attention, a window in the first layer");
    further.kv_heads = further.heads, further.latent = {.kv_rank = 12, .rope_dim = 2}, further.multi_token = true;
    further.layers = 1, further.window = 3, further.windowed = {true};
    return list;
}

// Biases and the norms of q and k start as 0 and 1, where mistakes do not show: others instead.
inline void draw_vectors(Llama& model) {
    uint64_t key = 77;
    for (Block& block : model.blocks) {
        std::vector<Param*> list = {&block.q_bias, &block.k_bias, &block.v_bias, &block.q_norm, &block.k_norm};
        if (block.latent) list.insert(list.end(), {&block.latent->q_a_norm, &block.latent->kv_a_norm});
        if (model.multi_token && &block == &model.blocks.back())
            list.insert(list.end(), {&model.multi_token->embedding_norm, &model.multi_token->hidden_norm,
                                     &model.multi_token->norm});
        for (Param* param : list)
            if (param->data) {
                Doubles drawn = randoms(param->data.size(), ++key);
                for (double& x : drawn) x = param->init_value + 0.3 * x;
                copy(param->data, tensor(drawn, param->data.shape(), DType::f64, Device::cpu));
            }
    }
}

inline double run_model(Llama& model, const Tokens& data) {
    for (Param* param : model.params()) fill(param->grad, 0);
    Tape tape;
    const std::vector<double> losses = read(model.forward(tape, data.batch(model.config.window)).data);
    tape.backward();
    return std::accumulate(losses.begin(), losses.end(), 0.0);
}

}  // namespace train70b::test
