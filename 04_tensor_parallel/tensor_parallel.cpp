#include "04_tensor_parallel/tensor_parallel.h"

#include <cstring>
#include <numeric>
#include <utility>

#include "02_data_parallel/runtime/launch.h"
#include "04_tensor_parallel/overlap.h"
#include "04_tensor_parallel/vocabulary.h"

namespace train70b {

void add_tensor_parallel_flags(Flags& flags, int64_t& tp, TensorParallelOptions& o) {
    flags.group("Communication");
    flags
        .add("--tp", tp, "tensor-parallel ranks of a model copy [what --dp leaves, all without it]",
             whole_number_from(1))
        .default_text("");
    flags.add_switch("--sequence-parallel", o.sequence_parallel, "divide the rows of norms and residuals, too");
    flags.add_switch("--tp-overlap", o.overlap, "communicate behind the products");
}

namespace {
std::string what_would_do(const LlamaConfig& c) {  // "--tp 1, 2 or 4 would do"
    std::vector<int64_t> list;
    for (int64_t tp = 1; tp <= c.heads; ++tp)
        if (c.heads_divide_by(tp) && c.ffn % tp == 0) list.push_back(tp);
    std::string text;
    for (size_t i = 0; i < list.size(); ++i)
        text += fmt::format("{}{}", i == 0 ? "" : i + 1 == list.size() ? " or " : ", ", list[i]);
    return fmt::format("--tp {} would do", text);
}
}  // namespace

void check_tensor_parallel(const LlamaConfig& c, int64_t seq_len, int64_t tp, const TensorParallelOptions& o) {
    if (c.heads % tp != 0) usage_error("--tp {}: --heads {} does not divide by it; {}", tp, c.heads, what_would_do(c));
    if (c.ffn % tp != 0) usage_error("--tp {}: --ffn {} does not divide by it; {}", tp, c.ffn, what_would_do(c));
    if (!c.heads_divide_by(tp))
        usage_error("--tp {}: --kv-heads {} can be divided over it or copied, if one divides the other; {}", tp,
                    c.kv_heads, what_would_do(c));
    if (o.sequence_parallel && seq_len % tp != 0)
        usage_error("--sequence-parallel on: --seq-len {} does not divide by --tp {}; {} would", seq_len, tp,
                    (seq_len / tp + 1) * tp);
}

// ---- f and g --------------------------------------------------------------------------------------------------------

namespace {
// x, to be changed in place: itself where nobody else holds it, else a copy.
Tensor unshared(const Tensor& x) {
    if (x.sole_owner()) return x;
    Tensor own = Tensor::like(x, x.kind());
    copy(own, x);
    return own;
}
// The same of the gradient in a slot, which is empty after it.
Tensor take(Tensor& slot) {
    Tensor own = unshared(slot);
    slot = Tensor();
    return own;
}
}  // namespace

Var copy_to_ranks(Tape& tape, const Var& x, const Comm& ranks) {
    Var y{.data = x.data, .again = x.again};
    tape.record([ranks, dx = x.grad, dy = y.grad] {
        Tensor sum = take(*dy);
        ranks.all_reduce(sum).wait();
        accumulate(*dx, sum);
    });
    return y;
}

Var reduce_from_ranks(Tape&, const Var& y, const Comm& ranks) {
    Var z{.data = unshared(y.data), .grad = y.grad};  // backward is a copy: y and z share one gradient
    ranks.all_reduce(z.data).wait();
    return z;
}

Tensor gather_rows(const Comm& ranks, const Tensor& part) {
    Tensor whole({part.rows() * ranks.size(), part.cols()}, part.dtype(), part.device(), Memory::comm);
    ranks.all_gather(whole, part).wait();
    return whole;
}

Var gather_sequence(Tape& tape, const Var& x, const Comm& ranks) {
    Var y{.data = gather_rows(ranks, x.data)};
    // Kept are this rank's rows; the backward pass gathers again.
    y.again = Lazy<Tensor>([ranks, x = Saved(x)] { return gather_rows(ranks, x.get()); });
    tape.record([ranks, dx = x.grad, dy = y.grad] {
        const Tensor whole = take(*dy);
        Tensor sum({whole.rows() / ranks.size(), whole.cols()}, whole.dtype(), whole.device());
        ranks.reduce_scatter(sum, whole).wait();
        accumulate(*dx, sum);
    });
    return y;
}

Var scatter_sequence(Tape& tape, const Var& y, const Comm& ranks) {
    Var z{.data = Tensor({y.data.rows() / ranks.size(), y.data.cols()}, y.data.dtype(), y.data.device())};
    ranks.reduce_scatter(z.data, unshared(y.data)).wait();
    tape.record([ranks, dy = y.grad, dz = z.grad] { accumulate(*dy, gather_rows(ranks, *dz)); });
    return z;
}

// ---- the model ------------------------------------------------------------------------------------------------------

namespace {

void narrow_rows(Param& param, int64_t part, int64_t parts) {
    CHECK(param.local.rows % parts == 0, "{}: {} rows over {}", param.name, param.local.rows, parts);
    param.local.rows /= parts;
    param.local.row_begin += part * param.local.rows;
}

void narrow_cols(Param& param, int64_t part, int64_t parts) {
    CHECK(param.local.cols % parts == 0, "{}: {} columns over {}", param.name, param.local.cols, parts);
    param.local.cols /= parts;
    param.local.col_begin += part * param.local.cols;
}

// Equally many rows on every rank; the last ranks' reach beyond the vocabulary where it does not divide.
void narrow_vocabulary(Param& param, int64_t part, int64_t parts) {
    param.local.rows = (param.global_shape[0] + parts - 1) / parts;
    param.local.row_begin = part * param.local.rows;
}

void replicate(Param& param, int replica, int replicas) {
    param.replica = replica;
    param.replicas = replicas;
}

}  // namespace

TensorParallel apply_tensor_parallel(Llama& model, const Comm& ranks, const TensorParallelOptions& options) {
    TensorParallel result;
    result.model_ = &model;
    result.ranks_ = ranks;
    const int rank = ranks.rank(), N = ranks.size();
    if (N == 1) return result;
    const bool sequence = options.sequence_parallel, overlap = options.overlap;

    // f stands in `before`, g in `after`; with overlap they move into the product.
    using Slot = std::function<Var(Tape&, const Var&)>;
    const auto column = [&](Slot& before, Linear& linear) {
        if (sequence) linear.dx_kind = Memory::comm;
        if (overlap)
            linear.multiply = [=](Tape& tape, const Var& x, Linear& self) {
                return column_product(tape, x, self, ranks, sequence);
            };
        else
            before = [=](Tape& tape, const Var& x) {
                return sequence ? gather_sequence(tape, x, ranks) : copy_to_ranks(tape, x, ranks);
            };
    };
    const Slot g = [=](Tape& tape, const Var& y) {
        return sequence ? scatter_sequence(tape, y, ranks) : reduce_from_ranks(tape, y, ranks);
    };
    const auto row = [&](Linear& linear, Slot& after) {  // without sequence parallelism nothing can hide g
        if (sequence) linear.y_kind = Memory::comm;
        if (overlap && sequence)
            linear.multiply = [=](Tape& tape, const Var& x, Linear& self) { return row_product(tape, x, self, ranks); };
        else
            after = g;
    };

    TensorParallel::Replicated norms{ranks, {}}, key_value;
    const int kv_parts = int(std::gcd(model.config.kv_heads, int64_t(N))), copies = N / kv_parts;
    if (copies > 1) key_value.ranks = ranks.split([=](int r) { return r / copies; }, ranks.name() + "_kv");
    const auto norm = [&](Param& weight) {
        replicate(weight, rank, N);
        if (sequence) norms.params.push_back(&weight);
    };

    if (model.stage.embedding) {
        narrow_vocabulary(model.embed_tokens, rank, N);
        model.embed = [g, ranks, std = model.options.init_std](Tape& tape, const Batch& batch, Param& table) {
            Var y = embedding(tape, batch, table);
            // A world that is not there has no owners of other tokens, and from zeros only zeros would follow.
            if (!ranks.has_peers())
                fill_normal(y.data, 1, {.cols = y.data.size(), .global_cols = y.data.size()},
                            float(std / ranks.size()));
            return g(tape, y);
        };
    }
    for (Block& block : model.blocks) {
        norm(block.input_norm);
        narrow_rows(block.q_proj, rank, N);
        for (Param* param : {&block.k_proj, &block.v_proj}) {
            narrow_rows(*param, rank / copies, kv_parts);
            replicate(*param, rank % copies, copies);
            if (copies > 1) key_value.params.push_back(param);
        }
        narrow_cols(block.o_proj, rank, N);
        norm(block.post_attention_norm);
        narrow_rows(block.gate_proj, rank, N);
        narrow_rows(block.up_proj, rank, N);
        narrow_cols(block.down_proj, rank, N);
        column(block.before_attention, block.qkv);
        row(block.o, block.after_attention);
        column(block.before_mlp, block.gate_up);
        row(block.down, block.after_mlp);
    }
    if (model.stage.head) {
        norm(model.final_norm);
        narrow_vocabulary(model.lm_head, rank, N);
        column(model.before_head, model.head);
        model.loss = [ranks, &table = model.lm_head](Tape& tape, const Var& logits, const Batch& batch) {
            return vocabulary_parallel_loss(tape, logits, batch, ranks, table.local.row_begin, table.global_shape[0]);
        };
    }
    for (const auto& list : {norms, key_value})
        if (!list.params.empty()) result.replicated_.push_back(list);
    return result;
}

void TensorParallel::sum_replicated_gradients(const std::function<std::vector<Tensor>(const Param&)>& parts) const {
    for (const Replicated& list : replicated_) {  // one message instead of many small ones
        std::vector<Tensor> grads;
        int64_t size = 0;
        for (const Param* param : list.params)
            for (const Tensor& part : parts(*param)) {
                grads.push_back(part);
                size += part.size();
            }
        if (size == 0) continue;  // on all ranks: their shards are cut alike
        Tensor flat({size}, model_->options.grad_dtype, model_->options.device, Memory::comm);
        const auto each = [&](const std::function<void(Tensor&, Tensor&)>& body) {
            int64_t begin = 0;
            for (Tensor& grad : grads) {
                Tensor place = flat.element_slice(begin, grad.shape());
                body(place, grad);
                begin += place.size();
            }
        };
        each([](Tensor& place, Tensor& grad) { copy(place, grad); });
        list.ranks.all_reduce(flat).wait();
        each([](Tensor& place, Tensor& grad) { copy(grad, place); });
    }
}

namespace {

// The whole parameter on rank 0, put together from the ranks' rectangles. local: this rank's.
Tensor put_together(const Comm& ranks, const Param& param, const Tensor& local) {
    Tensor parts({local.size() * ranks.size()}, local.dtype(), local.device(), Memory::workspace);
    ranks.all_gather(parts, local).wait();
    const Rect mine = param.real();
    const std::vector<double> places = ranks.gather(
        {double(mine.row_begin), double(mine.rows), double(mine.col_begin), double(mine.cols), double(param.replica)});
    if (ranks.rank() > 0) return {};
    Tensor host({parts.size()}, parts.dtype(), Device::cpu, Memory::workspace);
    copy(host, parts);
    Tensor whole(param.global_shape, parts.dtype(), Device::cpu, Memory::workspace);
    const int64_t cols = param.is_matrix() ? param.global_shape[1] : 1, width = size_of(host.dtype());
    for (int r = 0; r < ranks.size(); ++r) {
        const double* place = &places[5 * size_t(r)];
        if (place[4] > 0) continue;  // a copy of what another rank has
        const int64_t row_begin = int64_t(place[0]), rows = int64_t(place[1]), col_begin = int64_t(place[2]);
        const int64_t part_cols = int64_t(place[3]);
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(whole.data<char>() + ((row_begin + row) * cols + col_begin) * width,
                        host.data<char>() + (r * local.size() + row * part_cols) * width, size_t(part_cols * width));
    }
    return whole;
}

}  // namespace

void TensorParallel::attach(Trainer& trainer) const {
    if (ranks_.size() == 1) return;
    trainer.reduce_gradients = [*this, before = trainer.reduce_gradients, parts = trainer.gradient_parts] {
        if (before) before();
        sum_replicated_gradients(parts);
    };
    sum_norms(trainer, ranks_);  // each rank counts what it holds, copies once
    trainer.whole = [model = model_, ranks = ranks_, inner = trainer.whole](const Param& wanted, Which which) {
        const Tensor local = inner(wanted, which);
        if (!local) return local;  // of all of this model copy's ranks
        for (const Param* param : model->params())
            if (param->name == wanted.name) return put_together(ranks, *param, local);
        CHECK(false, "{} is no parameter of this model", wanted.name);
        return Tensor();
    };
}

}  // namespace train70b
