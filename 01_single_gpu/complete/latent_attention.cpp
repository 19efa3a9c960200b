#include "01_single_gpu/complete/latent_attention.h"

#include "01_single_gpu/complete/llama.h"
#include "01_single_gpu/ops/latent_heads.h"

namespace train70b {

namespace {

constexpr double kLatentEps = 1e-6;  // of DeepSeek's code, whatever rms_norm_eps is

Tensor empty(const Tensor& like, int64_t cols) { return Tensor({like.rows(), cols}, like.dtype(), like.device()); }

QKV heads_of(Tape& tape, const Var& q_in, const Var& kv, const Var& k_rope, const Tensor& positions, const Rope& rope) {
    const auto make = [positions, rope](const Tensor& q_in, const Tensor& kv, const Tensor& k_rope) {
        std::array<Tensor, 3> parts = {Tensor::like(q_in), Tensor::like(q_in), Tensor::like(q_in)};
        latent_heads(parts[0], parts[1], parts[2], q_in, kv, k_rope, positions, rope);
        return parts;
    };
    const QKV result = make_qkv(tape, make(q_in.data, kv.data, k_rope.data),
                                [make, q_in = Saved(q_in), kv = Saved(kv), k_rope = Saved(k_rope)] {
                                    return make(q_in.get(), kv.get(), k_rope.get());
                                });
    tape.record([positions, rope, kv_width = kv.data.cols(), dq_in = q_in.grad, dkv = kv.grad, dk_rope = k_rope.grad,
                 dq = result.q.grad, dk = result.k.grad, dv = result.v.grad] {
        Tensor q_part = Tensor::like(*dq), kv_part = empty(*dq, kv_width), rope_part = empty(*dq, rope.head_dim);
        latent_heads_backward(q_part, kv_part, rope_part, *dq, *dk, *dv, positions, rope);
        accumulate(*dq_in, q_part);
        accumulate(*dkv, kv_part);
        accumulate(*dk_rope, rope_part);
    });
    return result;
}

}  // namespace

LatentAttention::LatentAttention(const LlamaConfig& c, const std::string& prefix, double init_std)
    : rope_(c.rope()), width_(c.head_dim()) {
    const int64_t E = c.hidden, H = c.heads, Q = c.latent.q_rank, C = c.latent.kv_rank;
    kv_a_proj = make_param(prefix + "kv_a_proj_with_mqa.weight", {C + rope_.head_dim, E}, init_std);
    kv_a_norm = make_param(prefix + "kv_a_layernorm.weight", {C}, 0);
    kv_b_proj = make_param(prefix + "kv_b_proj.weight", {H * 2 * c.value_dim(), C}, init_std);
    q_proj = make_param(prefix + (Q > 0 ? "q_b_proj.weight" : "q_proj.weight"), {H * width_, Q > 0 ? Q : E}, init_std);
    if (Q > 0) {
        q_a_proj = make_param(prefix + "q_a_proj.weight", {Q, E}, init_std);
        q_a_norm = make_param(prefix + "q_a_layernorm.weight", {Q}, 0);
        down.weights = {&q_a_proj};
    }
    down.weights.push_back(&kv_a_proj);
    q_up.weights = {&q_proj};
    kv_up.weights = {&kv_b_proj};
}

QKV LatentAttention::operator()(Tape& tape, const Var& x, const Tensor& positions, const TensorParallelOps& ranks) {
    const bool q_latent = down.weights.size() > 1;
    std::vector<int64_t> widths = {kv_a_norm.global_size(), rope_.head_dim};
    if (q_latent) widths.insert(widths.begin(), q_a_norm.global_size());
    const std::vector<Var> parts = split_columns(tape, down(tape, x), widths);
    const auto norm = [&](const Var& latent, Param& weight) { return rmsnorm(tape, latent, weight, kLatentEps); };
    const Var kv = up(tape, ranks.f(tape, norm(*(parts.end() - 2), kv_a_norm), kv_up), kv_up);
    const Var q = up(tape, ranks.f(tape, q_latent ? norm(parts[0], q_a_norm) : x, q_up), q_up);
    return heads_of(tape, q, kv, ranks.f(tape, parts.back(), kv_up), positions, rope_);
}

Var LatentAttention::values(Tape& tape, const Var& mixed) const {
    const int64_t rows = mixed.data.rows(), heads = mixed.data.cols() / width_, N = width_ - rope_.head_dim;
    const auto by_head = [=](const Tensor& x) { return x.view({rows * heads, x.cols() / heads}); };
    const auto narrow = [=](const Tensor& x) {
        Tensor y = empty(x, heads * N), to = by_head(y);
        copy_columns(to, 0, by_head(x), 0, N);
        return y;
    };
    Var y{.data = narrow(mixed.data)};
    y.recomputed = Lazy<Tensor>([narrow, x = Saved(mixed)] { return narrow(x.get()); });
    tape.record([=, dx = mixed.grad, dy = y.grad, width = width_] {
        Tensor part = empty(*dy, heads * width), to = by_head(part);
        fill(part, 0);
        copy_columns(to, 0, by_head(*dy), 0, N);
        accumulate(*dx, part);
    });
    return y;
}

}  // namespace train70b
