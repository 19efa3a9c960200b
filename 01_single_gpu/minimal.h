#pragma once
// A Llama with its backward pass written out, AdamW and the training text: what the minimal.cpp of every chapter stands
// on. Weights, samples and arithmetic are those of the complete programs, and so is the loss.
//
//   x    = embedding(tokens)
//   x    = x + o(attention(rope(qkv(norm(x)))))          \ a block: its attention half
//   x    = x + down(swiglu(gate_up(norm(x))))            / and its feed-forward half
//   loss = cross_entropy(head(norm(x)))
//
// B sequences of T tokens, R = B*T rows, E hidden, H heads, K key/value heads, D head size, F ffn, V vocabulary.
// A Tensor refers to its memory: a copy shares it, as in PyTorch.
#include <cmath>

#include "01_single_gpu/complete/data/source.h"
#include "01_single_gpu/complete/param.h"

namespace train70b::minimal {

struct Sizes {  // the default model and batch of all chapters; a token is a byte of the text
    int64_t layers = 4, E = 128, H = 8, K = 4, F = 384, V = 256, T = 128;
    int64_t batch = 16;        // sequences per step, over all ranks
    DType dtype = DType::f32;  // of weights, activations, gradients and moments; or f64
    Device device = why_no_cuda().empty() ? Device::cuda : Device::cpu;
    int64_t D() const { return E / H; }
};
constexpr double kInitStd = 0.02, kNormEps = 1e-5, kRopeTheta = 10000;
constexpr double kPeakLr = 3e-3, kWarmup = 20, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8, kWeightDecay = 0.1, kClip = 1;
constexpr uint64_t kSeed = 1;

inline Tensor empty(const Tensor& like, int64_t rows, int64_t cols) {
    return Tensor({rows, cols}, like.dtype(), like.device());
}
inline Tensor per_row(const Tensor& x) {  // one number each, in fp32 or wider
    return Tensor({x.rows()}, stats_dtype(x.dtype()), x.device());
}
inline Tensor zeros(int64_t size, const Sizes& s, Memory kind) {
    Tensor x({size}, s.dtype, s.device, kind);
    fill(x, 0);
    return x;
}
inline Tensor sum(const Tensor& a, const Tensor& b) {  // a + b, element by element
    Tensor y = Tensor::like(a);
    add(y, a, b);
    return y;
}
inline Tensor norm_backward(Param& weight, const Tensor& dy, const Tensor& x, const Tensor& inv_rms) {
    Tensor dx = Tensor::like(x);
    rmsnorm_backward(dx, weight.grad, dy, x, inv_rms, weight.data);
    return dx;
}

struct Batch {
    int64_t B, T;                       // T: of each sequence on this rank (chapters 06 and 08)
    Tensor tokens, targets, positions;  // (R) i32
    double scale;                       // of the loss: 1 / all tokens of the step
};
struct Heads {
    Tensor q, k, v;   // (R, H*D), (R, K*D), (R, K*D)
    Tensor out, lse;  // (R, H*D), (R, H): per token and head, log(sum(exp(scores)))
};

// The parts of the model that chapters replace, here for one device. A chapter's own Parts inherits from this.
struct OneDevice {
    // What a rank holds of an (out, in) weight: some rows (Megatron: column-parallel), some columns, or all of it (04).
    Param rows(Param p) const { return p; }
    Param cols(Param p) const { return p; }
    Param whole(Param p) const { return p; }
    // Around each half of a block (chapter 04).
    Tensor f(const Tensor& x) { return x; }
    Tensor f_backward(const Tensor& dx) { return dx; }
    Tensor g(const Tensor& y) { return y; }
    Tensor g_backward(const Tensor& dy) { return dy; }
    // Softmax statistics of this rank's part of the vocabulary become those of all of it (04).
    void whole_vocabulary(Tensor& /*row_max*/, Tensor& /*row_sum*/, Tensor& /*target_logit*/) {}
    // A linear layer (07).
    Tensor product(const Tensor& x, const Tensor& w) { return matmul(x, w, Transpose::b); }  // Y = X W^T
    Tensor product_backward(const Tensor& dy, const Tensor& x, const Tensor& w, Tensor dw) {
        matmul_into(dw, dy, x, Transpose::a, 1);  // dW += dY^T X
        return matmul(dy, w);                     // dX = dY W
    }
    // Causal attention, scores / sqrt(D); query head i uses key/value head i / (H / K). h.out and h.lse from h.q, h.k,
    // h.v; their gradients from dout (06), with probabilities recomputed from lse: no T x T matrix is stored.
    void attend(Heads& h, const AttentionShape& shape) { attention(h.out, h.lse, h.q, h.k, h.v, shape); }
    void attend_backward(Heads& dh, const Tensor& dout, const Heads& h, const AttentionShape& shape) {
        attention_backward(dh.q, dh.k, dh.v, dout, h.q, h.k, h.v, h.out, h.lse, shape);
    }
};

struct Block {
    Param norm1, q, k, v, o, norm2, gate, up, down;
    int64_t D;
    Rope rope;      // turns elements i and i + D/2 of a head; its backward pass turns them back
    struct Saved {  // for the backward pass: (R, E), but inv_rms (R), gate_up (R, 2F), and h, swiglu's output (R, F)
        Tensor x, inv_rms1, normed1, middle, inv_rms2, normed2, gate_up, h;
        Heads heads;
    };

    Block(const Sizes& s, int64_t layer, const auto& parts) : D(s.D()), rope{.head_dim = int(D)} {
        const std::string name = "model.layers." + std::to_string(layer) + ".";
        const double out_std = kInitStd / std::sqrt(2.0 * double(s.layers));
        norm1 = parts.whole(make_param(name + "input_layernorm.weight", {s.E}, 0));  // std 0: all ones
        q = parts.rows(make_param(name + "self_attn.q_proj.weight", {s.H * D, s.E}, kInitStd));
        k = parts.rows(make_param(name + "self_attn.k_proj.weight", {s.K * D, s.E}, kInitStd));
        v = parts.rows(make_param(name + "self_attn.v_proj.weight", {s.K * D, s.E}, kInitStd));
        o = parts.cols(make_param(name + "self_attn.o_proj.weight", {s.E, s.H * D}, out_std));
        norm2 = parts.whole(make_param(name + "post_attention_layernorm.weight", {s.E}, 0));
        gate = parts.rows(make_param(name + "mlp.gate_proj.weight", {s.F, s.E}, kInitStd));
        up = parts.rows(make_param(name + "mlp.up_proj.weight", {s.F, s.E}, kInitStd));
        down = parts.cols(make_param(name + "mlp.down_proj.weight", {s.E, s.F}, out_std));
        for (int64_t i = 0; i < D / 2; ++i) rope.inv_freq[i] = std::pow(kRopeTheta, -2.0 * double(i) / double(D));
    }
    std::vector<Param*> params() { return {&norm1, &q, &k, &v, &o, &norm2, &gate, &up, &down}; }
    // q, k and v are neighbors in the unit's buffer, and so are gate and up: a view of them is one matrix.
    Tensor qkv(Tensor Param::*what) { return Tensor::stack_neighbors({q.*what, k.*what, v.*what}); }
    Tensor gate_up(Tensor Param::*what) { return Tensor::stack_neighbors({gate.*what, up.*what}); }
    AttentionShape shape(const Batch& b) const { return {b.B, b.T, b.T, q.local.rows / D, k.local.rows / D, D}; }

    Tensor forward(const Tensor& x, Saved& s, const Batch& b, auto& parts) {
        s = {.x = x, .inv_rms1 = per_row(x), .normed1 = Tensor::like(x)};
        rmsnorm(s.normed1, s.inv_rms1, x, norm1.data, kNormEps);
        s.normed1 = parts.f(s.normed1);
        Heads& h = s.heads;
        const int64_t R = x.rows(), kv = k.local.rows;
        h = {empty(x, R, q.local.rows), empty(x, R, kv), empty(x, R, kv), empty(x, R, q.local.rows), {}};
        h.lse = Tensor({R, shape(b).heads}, stats_dtype(x.dtype()), x.device());
        split_rope(h.q, h.k, h.v, parts.product(s.normed1, qkv(&Param::data)), b.positions, rope);
        parts.attend(h, shape(b));
        const Tensor mixed = parts.g(parts.product(h.out, o.data));

        s.middle = Tensor::like(x), s.inv_rms2 = per_row(x), s.normed2 = Tensor::like(x);
        add_rmsnorm(s.middle, s.normed2, s.inv_rms2, x, mixed, norm2.data, kNormEps);  // middle = x + mixed
        s.normed2 = parts.f(s.normed2);
        if constexpr (requires { parts.feed_forward(*this, s); }) return sum(s.middle, parts.feed_forward(*this, s));
        s.gate_up = parts.product(s.normed2, gate_up(&Param::data));
        s.h = empty(x, R, gate.local.rows);
        swiglu(s.h, s.gate_up);
        return sum(s.middle, parts.g(parts.product(s.h, down.data)));
    }

    // Adds to the gradients of the weights; returns that of x.
    Tensor backward(const Tensor& dy, Saved& s, const Batch& b, auto& parts) {
        const Tensor dmiddle = sum(dy, norm_backward(norm2, mlp_backward(dy, s, parts), s.middle, s.inv_rms2));

        const Heads& h = s.heads;
        const Tensor dout = parts.product_backward(parts.g_backward(dmiddle), h.out, o.data, o.grad);
        Heads d = {Tensor::like(h.q), Tensor::like(h.k), Tensor::like(h.v), {}, {}};
        parts.attend_backward(d, dout, h, shape(b));
        Tensor dqkv = empty(dout, dout.rows(), h.q.cols() + 2 * h.k.cols());
        split_rope_backward(dqkv, d.q, d.k, d.v, b.positions, rope);
        const Tensor dnormed1 =
            parts.f_backward(parts.product_backward(dqkv, s.normed1, qkv(&Param::data), qkv(&Param::grad)));
        const Tensor dx = sum(dmiddle, norm_backward(norm1, dnormed1, s.x, s.inv_rms1));
        s = {};  // frees the activations
        return dx;
    }
    Tensor mlp_backward(const Tensor& dy, Saved& s, auto& parts) {
        if constexpr (requires { parts.feed_forward(*this, s); }) return parts.feed_forward_backward(*this, s, dy);
        const Tensor dh = parts.product_backward(parts.g_backward(dy), s.h, down.data, down.grad);
        Tensor dgate_up = Tensor::like(s.gate_up);
        swiglu_backward(dgate_up, dh, s.gate_up);
        return parts.f_backward(
            parts.product_backward(dgate_up, s.normed2, gate_up(&Param::data), gate_up(&Param::grad)));
    }
};

// ---- the model, or a stage of it: layers [first, end) (chapters 05 and 08) ------------------------------------------

// Parameters in one buffer, side by side: what a ring sums (chapter 02) and ZeRO shards (03).
struct Unit {
    std::vector<Param*> params;
    Tensor data, grad, exp_avg, exp_avg_sq;
};

struct Llama {
    int64_t first, end, all;  // layers
    Param table, norm, head;  // the first stage has the embedding's table, the last one the others
    std::vector<Block> blocks;
    std::vector<Unit> units;  // in the order of the forward pass
    struct Saved {
        std::vector<Block::Saved> blocks;
        Tensor x, inv_rms, normed, dlogits;  // of the head
    };

    template <class Parts = OneDevice>
    explicit Llama(const Sizes& s, const Parts& parts = {}, int64_t first_layer = 0, int64_t end_layer = -1)
        : first(first_layer), end(end_layer < 0 ? s.layers : end_layer), all(s.layers) {
        table = parts.rows(make_param("model.embed_tokens.weight", {s.V, s.E}, kInitStd));
        norm = parts.whole(make_param("model.norm.weight", {s.E}, 0));
        head = parts.rows(make_param("lm_head.weight", {s.V, s.E}, kInitStd));
        for (int64_t layer = first; layer < end; ++layer) blocks.emplace_back(s, layer, parts);
        if (first == 0) units.push_back({.params = {&table}});
        for (Block& block : blocks) units.push_back({.params = block.params()});
        if (end == all) units.push_back({.params = {&norm, &head}});
    }
    Llama(const Llama&) = delete;  // the units point to the parameters

    // shards: ranks that share AdamW's work on a unit (03), whose buffers are padded to a multiple of that. An initial
    // weight is normal, a function of seed, name and place in the whole parameter: the same in every layout.
    void allocate(const Sizes& s, int64_t shards = 1) {
        for (Unit& u : units) {
            const int64_t shard = (total_size(u.params) + shards - 1) / shards;
            u.data = zeros(shards * shard, s, Memory::params);
            u.grad = zeros(shards * shard, s, Memory::grads);
            for (Tensor* moment : {&u.exp_avg, &u.exp_avg_sq}) *moment = zeros(shard, s, Memory::optimizer);
            bind_data(u.params, u.data);
            bind_grads(u.params, u.grad);
            for (Param* p : u.params) initialize(*p, kSeed, 0, p->data);
        }
    }

    Tensor embed(const Batch& b, auto& parts) {
        Tensor x = empty(table.data, b.tokens.size(), table.data.cols());
        embedding(x, b.tokens, table.data, table.local.row_begin);  // 0 where another rank has the token's row
        return parts.g(x);
    }
    void embed_backward(const Tensor& dx, const Batch& b, auto& parts) {
        embedding_backward(table.grad, b.tokens, parts.g_backward(dx), table.local.row_begin);
    }
    // This rank's share of the loss, (1); the gradient of the logits replaces the logits.
    Tensor loss(const Tensor& x, Saved& s, const Batch& b, auto& parts) {
        s.x = x, s.inv_rms = per_row(x), s.normed = Tensor::like(x);
        rmsnorm(s.normed, s.inv_rms, x, norm.data, kNormEps);
        s.normed = parts.f(s.normed);
        s.dlogits = matmul(s.normed, head.data, Transpose::b);
        Tensor row_max = per_row(x), row_sum = per_row(x), target_logit = per_row(x), lse = per_row(x);
        Tensor result({1}, stats_dtype(x.dtype()), x.device());
        softmax_stats(row_max, row_sum, target_logit, s.dlogits, b.targets, head.local.row_begin);
        parts.whole_vocabulary(row_max, row_sum, target_logit);
        cross_entropy(result, lse, row_max, row_sum, target_logit, b.scale);
        cross_entropy_backward(s.dlogits, b.targets, lse, b.scale, head.local.row_begin);
        return result;
    }
    Tensor loss_backward(Saved& s, auto& parts) {
        matmul_into(head.grad, s.dlogits, s.normed, Transpose::a, 1);
        return norm_backward(norm, parts.f_backward(matmul(s.dlogits, head.data)), s.x, s.inv_rms);
    }

    // x: from the stage before. Returns what the next stage needs; the last stage, the loss.
    Tensor forward(Tensor x, Saved& s, const Batch& b, auto& parts) {
        s.blocks.resize(blocks.size());
        if (first == 0) x = embed(b, parts);
        for (size_t i = 0; i < blocks.size(); ++i) x = blocks[i].forward(x, s.blocks[i], b, parts);
        return end == all ? loss(x, s, b, parts) : x;
    }
    Tensor backward(Tensor dx, Saved& s, const Batch& b, auto& parts) {
        if (end == all) dx = loss_backward(s, parts);
        for (size_t i = blocks.size(); i-- > 0;) dx = blocks[i].backward(dx, s.blocks[i], b, parts);
        if (first == 0) embed_backward(dx, b, parts);
        s = {};
        return dx;
    }
};

// ---- data, optimizer, loop ------------------------------------------------------------------------------------------

inline Source open_text(const Sizes& s) { return Source(repository_file("docs/data/corpus.txt"), s.V, s.T, -1); }

// Samples [first, first + count) of the shuffled text, T + 1 tokens each. Rows: the first of `ranges` (begin, count of
// tokens) of every sample, then the second of every sample (06); {{0, T}} is all of each.
using Ranges = std::vector<std::pair<int64_t, int64_t>>;
inline Batch make_batch(const Source& text, const Sizes& s, int64_t first, int64_t count, const Ranges& ranges) {
    std::vector<int32_t> tokens, targets, positions;
    for (const auto& [begin, length] : ranges)
        for (int64_t index = first; index < first + count; ++index) {
            const std::vector<int32_t> window = text.window(kSeed, index);
            const auto from = window.begin() + begin;
            tokens.insert(tokens.end(), from, from + length);
            targets.insert(targets.end(), from + 1, from + length + 1);
            for (int64_t t = begin; t < begin + length; ++t) positions.push_back(int32_t(t));
        }
    const int64_t R = int64_t(tokens.size());
    const auto on_device = [&](const std::vector<int32_t>& values) { return upload(values, {R}, s.device); };
    return {count, R / count, on_device(tokens), on_device(targets), on_device(positions), 1 / double(s.batch * s.T)};
}

// Calls body(param, begin, end) for every parameter with elements in `part`, which is elements [offset, offset +
// part.size()) of the unit's buffer: all of it, or a shard (03). begin and end count from the start of `part`.
void for_params(const Unit& unit, const Tensor& part, int64_t offset, auto&& body) {
    int64_t begin = -offset;
    for (const Param* p : unit.params) {
        const int64_t end = begin + p->local.size(), first = std::max<int64_t>(begin, 0);
        if (first < std::min(end, part.size())) body(*p, first, std::min(end, part.size()));
        begin = end;
    }
}

// Sum of squares of a gradient. A parameter that several ranks hold (04) counts on one of them only.
inline double squares(const Unit& unit, const Tensor& grad, int64_t offset = 0) {
    double total = 0;
    for_params(unit, grad, offset, [&](const Param& p, int64_t begin, int64_t end) {
        if (p.replica == 0) total += train70b::squares({grad.element_slice(begin, {end - begin})})[0];
    });
    return total;
}
inline double squares(const Llama& model) {
    double total = 0;
    for (const Unit& unit : model.units) total += squares(unit, unit.grad);
    return total;
}

// AdamW. norm: of the gradient of the whole model.
inline void update(Unit& unit, const Tensor& data, const Tensor& grad, int64_t step, double norm, int64_t offset = 0) {
    const double lr = kPeakLr * std::min(1.0, double(step) / kWarmup), clip = std::min(1.0, kClip / (norm + 1e-6));
    for_params(unit, data, offset, [&](const Param& p, int64_t begin, int64_t end) {
        const auto part = [&](const Tensor& x) { return x.element_slice(begin, {end - begin}); };
        Tensor w = part(data), m = part(unit.exp_avg), v = part(unit.exp_avg_sq), no_master;
        adamw(w, no_master, m, v, part(grad), {lr, kBeta1, kBeta2, kEps, p.is_matrix() ? kWeightDecay : 0, clip, step});
    });
}

struct Result {
    double loss, norm;
};
void train(auto& training, int64_t steps = 20) {
    for (int64_t step = 1; step <= steps; ++step)
        if (const Result result = training.step(step); this_rank == 0)
            fmt::print("step {}  loss {:#.9g}\n", step, result.loss);
}

}  // namespace train70b::minimal
