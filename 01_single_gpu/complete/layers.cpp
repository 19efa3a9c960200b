#include "01_single_gpu/complete/layers.h"

#include "01_single_gpu/ops/latent_heads.h"
#include "01_single_gpu/ops/sinks.h"

namespace train70b {

namespace {
std::vector<Tensor> all(const std::vector<Param*>& params, Tensor Param::*what) {
    std::vector<Tensor> tensors;
    for (const Param* param : params) tensors.push_back(param->*what);
    return tensors;
}

// The tensors, adjacent in memory, as one vector.
Tensor joined(std::vector<Tensor> vectors) {
    for (Tensor& tensor : vectors) tensor = tensor.view({tensor.size(), 1});
    const Tensor all = Tensor::stack_neighbors(vectors);
    return all.view({all.size()});
}

// One number per row.
Tensor row_stats(const Tensor& x) { return Tensor({x.rows()}, stats_dtype(x.dtype()), x.device()); }
}  // namespace

Tensor Linear::weight() const { return Tensor::stack_neighbors(all(weights, &Param::data)); }
Tensor Linear::grad() const { return Tensor::stack_neighbors(all(weights, &Param::grad)); }
Tensor Linear::bias() const { return joined(all(biases, &Param::data)); }
Tensor Linear::bias_grad() const { return joined(all(biases, &Param::grad)); }

Var Linear::operator()(Tape& tape, const Var& x) {
    Var y = multiply ? multiply(tape, x, *this) : train70b::multiply(tape, x, *this);
    if (biases.empty()) return y;
    add_bias(y.data, bias());
    tape.record_wgrad([dy = y.grad, this] {
        Tensor db = bias_grad();
        add_bias_backward(db, *dy);  // db += sum of the rows of dY
    });
    return y;
}

Var multiply(Tape& tape, const Var& x, Linear& linear) {
    Var y{.data = matmul(x.data, linear.weight(), Transpose::b, linear.y_kind)};
    // The backward pass runs in reverse order: first dX, then dW.
    tape.record_wgrad([x = Saved(x), dy = y.grad, &linear] {
        Tensor dw = linear.grad();
        matmul_into(dw, *dy, x.get(), Transpose::a, 1);  // dW += dY^T X
    });
    tape.record([dx = x.grad, dy = y.grad, &linear] {
        accumulate(*dx, matmul(*dy, linear.weight(), Transpose::none, linear.dx_kind));  // dX = dY W
    });
    return y;
}

Var embedding(Tape& tape, const Batch& batch, Param& table) {
    Var y{.data = Tensor({batch.tokens.size(), table.data.cols()}, table.data.dtype(), table.data.device())};
    embedding(y.data, batch.tokens, table.data, table.local.row_begin);
    tape.record([tokens = batch.tokens, order = batch.order, dy = y.grad, &table] {
        embedding_backward(table.grad, tokens, *dy, table.local.row_begin, order);
    });
    return y;
}

Var add(Tape& tape, const Var& a, const Var& b) {
    Var y{.data = Tensor::like(a.data)};
    add(y.data, a.data, b.data);
    tape.record([da = a.grad, db = b.grad, dy = y.grad] {
        accumulate(*da, *dy);
        accumulate(*db, *dy);
    });
    return y;
}

namespace {
Tensor joined_columns(const std::vector<Tensor>& parts) {
    int64_t cols = 0, begin = 0;
    for (const Tensor& part : parts) cols += part.cols();
    Tensor all({parts[0].rows(), cols}, parts[0].dtype(), parts[0].device());
    for (const Tensor& part : parts) {
        copy_columns(all, begin, part, 0, part.cols());
        begin += part.cols();
    }
    return all;
}

std::vector<Tensor> columns_of(const Tensor& x, const std::vector<int64_t>& widths) {
    std::vector<Tensor> parts;
    int64_t begin = 0;
    for (const int64_t width : widths) {
        parts.emplace_back(Shape{x.rows(), width}, x.dtype(), x.device());
        copy_columns(parts.back(), 0, x, begin, width);
        begin += width;
    }
    return parts;
}
}  // namespace

std::vector<Var> split_columns(Tape& tape, const Var& x, const std::vector<int64_t>& widths) {
    std::vector<Var> vars;
    std::vector<std::shared_ptr<Tensor>> grads;
    for (const Tensor& part : columns_of(x.data, widths)) grads.push_back(vars.emplace_back(Var{.data = part}).grad);
    tape.record([grads, dx = x.grad] {
        std::vector<Tensor> parts;
        for (const auto& grad : grads) parts.push_back(*grad);
        accumulate(*dx, joined_columns(parts));
    });
    return vars;
}

Var join_columns(Tape& tape, const std::vector<Var>& vars) {
    std::vector<Tensor> parts;
    std::vector<std::shared_ptr<Tensor>> grads;
    std::vector<int64_t> widths;
    for (const Var& var : vars) {
        parts.push_back(var.data);
        grads.push_back(var.grad);
        widths.push_back(var.data.cols());
    }
    Var y{.data = joined_columns(parts)};
    tape.record([grads, widths, dy = y.grad] {
        const std::vector<Tensor> pieces = columns_of(*dy, widths);
        for (size_t i = 0; i < grads.size(); ++i) accumulate(*grads[i], pieces[i]);
    });
    return y;
}

// Shared by both norms: y is the normalized x; adds the gradient through the norm to that of x.
static void finish_norm(Tape& tape, Var& y, const Var& x, const Tensor& inv_rms, Param& weight) {
    if (tape.recompute_pointwise)
        y.recomputed = Lazy<Tensor>([x = x.data, inv_rms, &weight] {
            Tensor normed = Tensor::like(x);
            rmsnorm_recompute(normed, x, inv_rms, weight.data);
            return normed;
        });
    // tag::rmsnorm-backward[]
    tape.record([x = x.data, dx = x.grad, dy = y.grad, inv_rms, &weight] {
        Tensor part = Tensor::like(x);
        rmsnorm_backward(part, weight.grad, *dy, x, inv_rms, weight.data);
        accumulate(*dx, part);
    });
    // end::rmsnorm-backward[]
}

Var rmsnorm(Tape& tape, const Var& x, Param& weight, double eps) {
    Var y{.data = Tensor::like(x.data)};
    Tensor inv_rms = row_stats(x.data);
    rmsnorm(y.data, inv_rms, x.data, weight.data, eps);
    finish_norm(tape, y, x, inv_rms, weight);
    return y;
}

SumAndNorm add_rmsnorm(Tape& tape, const Var& a, const Var& b, Param& weight, double eps) {
    SumAndNorm result{Var{.data = Tensor::like(a.data)}, Var{.data = Tensor::like(a.data)}};
    auto& [sum, y] = result;
    Tensor inv_rms = row_stats(a.data);
    add_rmsnorm(sum.data, y.data, inv_rms, a.data, b.data, weight.data, eps);
    tape.record([da = a.grad, db = b.grad, dsum = sum.grad] {
        accumulate(*da, *dsum);
        accumulate(*db, *dsum);
    });
    finish_norm(tape, y, sum, inv_rms, weight);
    return result;
}

Var swiglu(Tape& tape, const Var& gate_up) {
    const auto run = [gate_up = gate_up.data] {
        Tensor h({gate_up.rows(), gate_up.cols() / 2}, gate_up.dtype(), gate_up.device());
        swiglu(h, gate_up);
        return h;
    };
    Var h{.data = run()};
    if (tape.recompute_pointwise) h.recomputed = Lazy<Tensor>(run);
    tape.record([gate_up = gate_up.data, dgate_up = gate_up.grad, dh = h.grad] {
        Tensor part = Tensor::like(gate_up);
        swiglu_backward(part, *dh, gate_up);
        accumulate(*dgate_up, part);
    });
    return h;
}

QKV make_qkv(const Tape& tape, const std::array<Tensor, 3>& made, std::function<std::array<Tensor, 3>()> again) {
    QKV result{{.data = made[0]}, {.data = made[1]}, {.data = made[2]}};
    if (!tape.recompute_pointwise) return result;
    const Lazy<std::array<Tensor, 3>> parts(std::move(again));
    result.q.recomputed = Lazy<Tensor>([parts] { return parts.get()[0]; });
    result.k.recomputed = Lazy<Tensor>([parts] { return parts.get()[1]; });
    result.v.recomputed = Lazy<Tensor>([parts] { return parts.get()[2]; });
    return result;
}

QKV split_rope(Tape& tape, const Var& qkv, const Tensor& positions, const Rope& rope, int64_t kv_width,
               const std::optional<HeadNorms>& norms) {
    const int64_t rows = qkv.data.rows(), q_width = qkv.data.cols() - 2 * kv_width;
    const auto run = [=, qkv = qkv.data] {
        const auto empty = [&](int64_t cols) { return Tensor({rows, cols}, qkv.dtype(), qkv.device()); };
        std::array<Tensor, 3> parts = {empty(q_width), empty(kv_width), empty(kv_width)};
        Tensor normed = qkv;
        if (norms) {
            normed = Tensor::like(qkv);
            head_norm(normed, qkv, norms->q->data, norms->k->data, kv_width, norms->eps);
        }
        split_rope(parts[0], parts[1], parts[2], normed, positions, rope);
        return parts;
    };
    const QKV result = make_qkv(tape, run(), run);
    tape.record([=, before_norms = norms ? qkv.data : Tensor(), dqkv = qkv.grad, dq = result.q.grad, dk = result.k.grad,
                 dv = result.v.grad] {
        Tensor part({rows, q_width + 2 * kv_width}, dq->dtype(), dq->device());
        split_rope_backward(part, *dq, *dk, *dv, positions, rope);
        if (norms)
            head_norm_backward(part, norms->q->grad, norms->k->grad, before_norms, norms->q->data, norms->k->data,
                               kv_width, norms->eps);
        accumulate(*dqkv, part);
    });
    return result;
}

Var attention(Tape& tape, const QKV& x, const AttentionMask& mask, AttentionForward forward,
              AttentionBackward backward) {
    // Of these heads; when they run: the parameters may be elsewhere in between.
    const auto of_heads = [first = mask.first_head](const Tensor& all, const Tensor& lse) {
        return all.element_slice(first, {lse.cols()});
    };
    const auto attend = [=, sinks = mask.sinks](const Tensor& q, const Tensor& k, const Tensor& v) {
        OutLse result = forward(q, k, v);
        if (sinks) add_sinks(result.out, result.lse, of_heads(sinks->data, result.lse));
        return result;
    };
    const auto run = [attend, q = Saved(x.q), k = Saved(x.k), v = Saved(x.v)] {
        return attend(q.get(), k.get(), v.get());
    };
    OutLse computed = attend(x.q.data, x.k.data, x.v.data);
    Var out{.data = computed.out};
    const Lazy<OutLse> saved =
        tape.recompute_attention ? Lazy<OutLse>(run) : Lazy<OutLse>([computed] { return computed; });
    if (tape.recompute_attention) out.recomputed = Lazy<Tensor>([saved] { return saved.get().out; });
    tape.record([=, sinks = mask.sinks, q = Saved(x.q), k = Saved(x.k), v = Saved(x.v), dq = x.q.grad, dk = x.k.grad,
                 dv = x.v.grad, dout = out.grad] {
        const auto& [o, lse] = saved.get();
        if (sinks) {
            Tensor dsinks = of_heads(sinks->grad, lse);
            add_sinks_backward(dsinks, *dout, o, lse, of_heads(sinks->data, lse));
        }
        QKVGrads grads = backward(*dout, q.get(), k.get(), v.get(), o, lse);
        accumulate(*dq, grads.dq);
        accumulate(*dk, grads.dk);
        accumulate(*dv, grads.dv);
    });
    return out;
}

Var one_device_attention(Tape& tape, const QKV& qkv, const Batch& batch, const AttentionMask& mask, int64_t head_dim) {
    const AttentionShape shape{.batch = batch.sequences,
                               .query_len = batch.seq_len,
                               .key_len = batch.seq_len,
                               .heads = qkv.q.data.cols() / head_dim,
                               .kv_heads = qkv.k.data.cols() / head_dim,
                               .head_dim = head_dim};
    return attention(
        tape, qkv, mask,
        [shape, starts = mask.starts](const Tensor& q, const Tensor& k, const Tensor& v) {
            OutLse result{Tensor::like(q), Tensor({q.rows(), shape.heads}, stats_dtype(q.dtype()), q.device())};
            attention(result.out, result.lse, q, k, v, shape, starts);
            return result;
        },
        [shape, starts = mask.starts](const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                      const Tensor& out, const Tensor& lse) {
            QKVGrads grads{Tensor::like(q), Tensor::like(k), Tensor::like(v)};
            attention_backward(grads.dq, grads.dk, grads.dv, dout, q, k, v, out, lse, shape, starts);
            return grads;
        });
}

Var next_token_loss(Tape& tape, const Var& logits, const Batch& batch, const LossOptions& o) {
    Tensor row_max = row_stats(logits.data), row_sum = row_stats(logits.data), target_logit = row_stats(logits.data);
    Tensor lse = row_stats(logits.data);
    Var loss{.data = Tensor({o.numbers()}, stats_dtype(logits.data.dtype()), logits.data.device())};
    softmax_stats(row_max, row_sum, target_logit, logits.data, batch.targets, 0, INT64_MAX, o.logit_scale);
    cross_entropy(loss.data, lse, row_max, row_sum, target_logit, batch.loss_scale, o.z_loss);
    if (tape.recording) {
        Tensor dlogits = logits.data;  // the gradient overwrites the logits, so only one copy is stored
        cross_entropy_backward(dlogits, batch.targets, lse, batch.loss_scale, 0, INT64_MAX, o.logit_scale, o.z_loss);
        tape.record([dlogits, grad = logits.grad] { *grad = dlogits; });
    }
    return loss;
}

}  // namespace train70b
