#include "01_single_gpu/complete/experts/experts.h"

#include <algorithm>
#include <numeric>

namespace train70b {

namespace {

// (R, E) -> (S, E): the rows of the kept slots, sorted by expert.
Var gather(Tape& tape, const Var& x, const Routing& to, int64_t top_k) {
    Var y{.data = Tensor({to.order.size(), x.data.cols()}, x.data.dtype(), x.data.device())};
    gather_slots(y.data, x.data, to.order, top_k);
    tape.record([place = to.place, dx = x.grad, dy = y.grad, rows = x.data.rows()] {
        Tensor part({rows, dy->cols()}, dy->dtype(), dy->device());
        sum_slots(part, *dy, place);
        accumulate(*dx, part);
    });
    return y;
}

// (S, E) -> (R, E): the weighted sum of each row's slots.
Var weighted_sum(Tape& tape, const Var& z, const Var& weights, const Routing& of) {
    Var y{.data = Tensor({of.place.rows(), z.data.cols()}, z.data.dtype(), z.data.device())};
    sum_slots(y.data, z.data, of.place, weights.data);
    tape.record([order = of.order, place = of.place, z = z.data, dz = z.grad, w = weights.data, dw = weights.grad,
                 dy = y.grad] {
        Tensor dots = Tensor::like(w), part = Tensor::like(z);
        slot_products(dots, *dy, z, place);
        accumulate(*dw, dots);
        gather_slots(part, *dy, order, place.cols(), w);
        accumulate(*dz, part);
    });
    return y;
}

// y_g = x_g W_g^T for each group of rows.
Var grouped_linear(Tape& tape, const Var& x, Param& w, const std::vector<int64_t>& rows) {
    Var y{.data = Tensor({x.data.rows(), w.data.rows() / int64_t(rows.size())}, x.data.dtype(), x.data.device())};
    grouped_forward(y.data, x.data, w.data, rows);
    tape.record_wgrad([x = Saved(x), dy = y.grad, &w, rows] { grouped_wgrad(w.grad, *dy, x.get(), rows); });
    tape.record([dx = x.grad, dy = y.grad, &w, rows] {
        Tensor part({dy->rows(), w.data.cols()}, dy->dtype(), dy->device());
        grouped_dgrad(part, *dy, w.data, rows);
        accumulate(*dx, part);
    });
    return y;
}

}  // namespace

static std::string mlp_of(int64_t layer) { return fmt::format("model.layers.{}.mlp.", layer); }
constexpr const char* kBias = ".e_score_correction_bias";  // Hugging Face's name: model.layers.0.mlp.gate, and this

std::unique_ptr<FeedForward> make_feed_forward(const LlamaConfig& c, int64_t layer, double init_std, double out_std) {
    if (c.is_sparse(layer)) return std::make_unique<Experts>(c, layer, init_std, out_std);
    return std::make_unique<FeedForward>(c, mlp_of(layer), c.ffn, init_std, out_std);
}

Experts* experts_of(const Block& block) { return dynamic_cast<Experts*>(block.feed_forward.get()); }

bool is_buffer(const std::string& name) { return name.ends_with(kBias); }

DType stored_dtype(const std::string& name, DType dtype) { return is_buffer(name) ? DType::f32 : dtype; }

Experts::Experts(const LlamaConfig& c, int64_t layer, double init_std, double out_std)
    : FeedForward(c, mlp_of(layer) + "shared_experts.", c.mlp_width(layer), init_std, out_std),
      config_(c.experts),
      shape_(c.experts.router()) {
    static const ExpertRanks one_rank;
    ranks = &one_rank;
    const std::string prefix = mlp_of(layer);
    const int64_t N = config_.count, F = config_.ffn;
    router = make_param(prefix + "gate.weight", {N, c.hidden}, init_std);
    expert_gate_up = make_param(prefix + "experts.gate_up_proj", {N * 2 * F, c.hidden}, init_std);
    expert_down = make_param(prefix + "experts.down_proj", {N * c.hidden, F}, out_std);
    expert_gate_up.over_ep = expert_down.over_ep = true;
    expert_gate_up.matrices = 2 * N, expert_down.matrices = N;
    unit = {.name = fmt::format("experts {}", layer), .params = {&expert_gate_up, &expert_down}, .inside = true};
    if (config_.sigmoid || config_.balance.bias_rate > 0) bias_.assign(size_t(N), 0.0f);
    if (config_.balance.of_batch) fractions_.assign(size_t(N), 1.0f);
    loads = {std::vector<double>(size_t(N), 0.0), std::vector<double>(size_t(N), 0.0)};
}

std::string Experts::buffer_name() const {
    return config_.sigmoid ? router.name.substr(0, router.name.rfind('.')) + kBias : "";
}

// The same for all tokens of a step.
const Tensor& Experts::bias_like(const Tensor& logits) {
    if (!bias_.empty() && !device_bias_)
        device_bias_ = upload({bias_.begin(), bias_.end()}, {int64_t(bias_.size())}, logits.dtype(), logits.device(),
                              Memory::workspace);
    return device_bias_;
}

Var Experts::logits(Tape& tape, const Var& x) {
    const DType logits_dtype = stats_dtype(x.data.dtype());
    Var y{.data = Tensor({x.data.rows(), router.data.rows()}, logits_dtype, x.data.device())};
    matmul_into(y.data, x.data, router.data, Transpose::b);  // of bf16: summed, and kept, in fp32
    tape.record_wgrad([x = Saved(x), dy = y.grad, this, logits_dtype] {
        const Tensor part =
            matmul(*dy, converted(x.get(), logits_dtype, dy->device()), Transpose::a, Memory::workspace);
        add(router.grad, router.grad, part);
    });
    tape.record([dx = x.grad, dy = y.grad, this, logits_dtype, dtype = x.data.dtype()] {
        const Tensor part =
            matmul(*dy, converted(router.data, logits_dtype, dy->device()), Transpose::none, Memory::workspace);
        accumulate(*dx, converted(part, dtype, part.device()));
    });
    return y;
}

// The gradient of the balancing loss by each score of a row, one line for each of this rank's pieces. counts: (pieces,
// N); the pieces may be those of all parts.
Tensor Experts::piece_grads(const std::vector<double>& counts, const std::vector<RowPiece>& pieces, const Batch& batch,
                            const Tensor& logits) const {
    if (config_.balance.aux_loss == 0 || batch.sequence_scale == 0) return {};
    const size_t N = size_t(config_.count);
    const double per_token = config_.balance.aux_loss * batch.sequence_scale / double(batch.whole_len);
    std::vector<double> slots(size_t(batch.sequences) * N, 0.0), grads;  // slots: of each sequence
    for (size_t q = 0; q < pieces.size(); ++q)
        for (size_t e = 0; e < N; ++e) slots[size_t(pieces[q].sequence) * N + e] += counts[q * N + e];
    const std::vector<RowPiece> local_pieces = ranks->pieces(batch, ranks->part());
    for (const RowPiece& piece : local_pieces)
        for (size_t e = 0; e < N; ++e)
            grads.push_back(per_token * (config_.balance.of_batch ? double(fractions_[e])
                                                                  : slots[size_t(piece.sequence) * N + e] * double(N) /
                                                                        double(config_.top_k * batch.whole_len)));
    return upload(grads, {int64_t(local_pieces.size()), config_.count}, logits.dtype(), logits.device(),
                  Memory::workspace);
}

void Experts::route(Routing& to, const Tensor& logits, const Batch& batch) {
    const int64_t R = logits.rows(), N = config_.count, k = config_.top_k;
    const Device device = logits.device();
    const std::vector<RowPiece> local_pieces = ranks->pieces(batch, ranks->part());
    const int64_t P = int64_t(local_pieces.size());
    if (on_logits) on_logits(logits);
    to.chosen = Tensor({R, k}, DType::i32, device);
    choose_experts(to.chosen, logits, bias_like(logits), shape_);
    Tensor counted({P, N}, DType::i32, device, Memory::workspace);
    count_choices(counted, to.chosen);
    // The host waits for the device here, once for each layer of experts.
    std::vector<double> counts = read(counted);
    if (device == Device::meta)  // balanced, the remainder on the lower experts
        for (size_t i = 0; i < counts.size(); ++i) {
            const int64_t slots = R / P * k, e = int64_t(i) % N;
            counts[i] = double(slots / N + (e < slots % N ? 1 : 0));
        }
    // Of all ranks that hold tokens of the same sequences, if that is needed.
    const bool by_sequence = batch.sequence_scale > 0 && config_.balance.aux_loss != 0 && !config_.balance.of_batch;
    std::vector<RowPiece> pieces = local_pieces;
    std::vector<double> all = counts;
    if (ranks->parts() > 1 && (by_sequence || config_.capacity_factor > 0)) {
        all = ranks->gather(counts);
        pieces.clear();
        for (int part = 0; part < ranks->parts(); ++part)
            for (const RowPiece& piece : ranks->pieces(batch, part)) pieces.push_back(piece);
    }

    const std::vector<int32_t> begin_keep =
        begin_keep_of({local_pieces, counts}, {pieces, all}, config_.capacity_factor, batch.whole_len * k);
    to.sent.assign(size_t(N), 0);
    for (int64_t p = 0; p < P; ++p)
        for (int64_t e = 0; e < N; ++e) {
            const double count = counts[size_t(p * N + e)];
            const int32_t kept = begin_keep[size_t((P + p) * N + e)];
            to.sent[size_t(e)] += kept;
            if (batch.sequence_scale == 0) continue;
            loads.slots[size_t(e)] += count;
            loads.dropped[size_t(e)] += count - kept;
        }
    to.order = Tensor({std::accumulate(to.sent.begin(), to.sent.end(), int64_t(0))}, DType::i32, device);
    to.place = Tensor({R, k}, DType::i32, device);
    place_slots(to.order, to.place, to.chosen, upload(begin_keep, {2, P, N}, device, Memory::workspace));
    to.piece_grads = piece_grads(all, pieces, batch, logits);
    const double z_loss = z_loss_of(batch);
    if (to.piece_grads || z_loss > 0) router_losses(losses, logits, to.piece_grads, z_loss, shape_);
    ranks->plan(to, logits);
}

Var Experts::operator()(Tape& tape, const Var& x, const Batch& batch, const TensorParallelOps& tensor_parallel,
                        const std::shared_ptr<void>& choice) {
    Var shared;
    const Var mixed = routed(tape, x, batch, *static_cast<Routing*>(choice.get()), [&] {
        if (has_mlp()) shared = mlp(tape, x, tensor_parallel);
    });
    return shared ? add(tape, shared, mixed) : mixed;
}

Var Experts::routed(Tape& tape, const Var& x, const Batch& batch, Routing& routing,
                    const std::function<void()>& meanwhile) {
    const Var scores = logits(tape, x);
    if (!routing) route(routing, scores.data, batch);
    const Routing to = routing;
    Var weights{.data = Tensor(to.chosen.shape(), scores.data.dtype(), scores.data.device())};
    router_weights(weights.data, scores.data, to.chosen, shape_);
    const double z_loss = z_loss_of(batch);
    tape.record([this, to, z_loss, logits = scores.data, dlogits = scores.grad, dw = weights.grad] {
        *dlogits = Tensor::like(logits);
        router_backward(*dlogits, *dw, logits, to.chosen, to.piece_grads, z_loss, shape_);
    });
    const Var rows = ranks->dispatch(tape, gather(tape, x, to, config_.top_k), to, meanwhile);
    const Var out = unit.run(tape, rows, [this, to](Tape& t, const Var& in) {
        return grouped_linear(t, swiglu(t, grouped_linear(t, in, expert_gate_up, to.rows)), expert_down, to.rows);
    });
    return weighted_sum(tape, ranks->combine(tape, out, to), weights, to);
}

}  // namespace train70b
